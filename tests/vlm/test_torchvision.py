"""The processors that need torchvision, and real videos and waveforms, in a process that has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from spanwise.vlm import FAMILIES
from tests.vlm import processors, stand_ins
from tests.vlm.stress import run
from tests.vlm.test_stand_ins import parsed

KEYS = ("labelled", "refused", "wrong")
pytestmark = pytest.mark.xdist_group("vlm_torchvision")  # one process is started for all of this file


@pytest.fixture(scope="module")
def lines() -> list[dict[str, dict[str, object]]]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.vlm.torchvision_run"], capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def test_no_label_is_wrong_on_any_real_class(lines: list[dict]) -> None:
    stress = [line for line in lines if "stress" in line]
    assert len(stress) == 14
    assert all(line["wrong"] == 0 for line in stress)
    assert all(line["refused"] <= 0.01 * line["labelled"] for line in stress)


def test_the_table_of_families(lines: list[dict], capsys: pytest.CaptureFixture[str]) -> None:
    """For people, on stderr, which parallel runs show, too: what was run on which class, and what came of it."""
    seen = {line["family"]: (*(line[key] for key in KEYS), "real") for line in lines if "stress" in line}
    stood_in = "stand-in, never run on the real class"
    for outcome in (run("kimi_vl", 2, stand_ins.kimi_vl()), parsed(2)):
        seen[outcome.family] = (*(getattr(outcome, key) for key in KEYS), stood_in)
    others = [run(name, 2) for name in processors.NO_FAMILY]
    assert {outcome.family for outcome in others} == {"default"}
    counts = (sum(getattr(outcome, key) for outcome in others) for key in KEYS)
    seen["default"] = (*counts, "real (Llama 3.2, Aya, DeepSeek)")
    table = [f"{'family':20} {'class':38} {'chats':>5} {'labelled':>9} {'refused':>8}"]
    for family in FAMILIES:
        labelled, refused, wrong, kind = seen[family.name]
        total = labelled + refused + wrong
        table.append(f"{family.name:20} {kind:38} {total:5} {labelled / total:9.1%} {refused / total:8.1%}")
        assert wrong == 0
        assert refused <= 0.01 * total
    assert len(FAMILIES) == 17
    with capsys.disabled():
        print("", *table, sep="\n", file=sys.stderr)


def test_images_videos_and_audio(lines: list[dict]) -> None:
    closings = {"phi4_multimodal": "<|end|>", "gemma4": "<turn|>"}
    seen = [(kind, line[kind]) for line in lines for kind in ("image", "video", "audio") if kind in line]
    assert len(seen) == 7
    for kind, found in seen:
        assert found["said"] == "a cat" + closings.get(found["name"], "<|im_end|>"), (kind, found)
        assert found["media_tokens"] > 2


def test_sound_of_a_video_stands_inside_it(lines: list[dict]) -> None:
    (found,) = [line["sound of a video"] for line in lines if "sound of a video" in line]
    assert found["said"] == "a cat<|im_end|>"
    assert found["clips"][1] > found["clips"][0]
    assert found["heard"] > found["heard_inside"] > found["heard"] - found["heard_inside"] > 0


def test_kimi_says_its_grids_under_every_name(lines: list[dict]) -> None:
    (found,) = [line["grids"] for line in lines if "grids" in line]
    assert found["said"] == "a cat<|im_end|>"
    assert found["grid_thws"] == found["image_grid_thw"]
    assert found["image_grid_hws"] == [grid[1:] for grid in found["image_grid_thw"]]
    assert found["n"] == [2]
