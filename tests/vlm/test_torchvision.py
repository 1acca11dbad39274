"""The processors that need torchvision, and real videos and waveforms, in a process that has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.xdist_group("vlm_torchvision")  # one process is started for all of this file


@pytest.fixture(scope="module")
def lines() -> list[dict[str, dict[str, object]]]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.vlm.torchvision_run"], capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def test_no_label_is_wrong_on_any_real_class(lines: list[dict], capsys: pytest.CaptureFixture[str]) -> None:
    stress = [line for line in lines if "stress" in line]
    with capsys.disabled():
        print(f"\n{'real class, with torchvision':30} {'labelled':>9} {'refused':>8}")
        for line in stress:
            total = line["labelled"] + line["refused"] + line["wrong"]
            print(f"{line['family']:30} {line['labelled'] / total:9.1%} {line['refused'] / total:8.1%}")
    assert len(stress) == 14
    assert all(line["wrong"] == 0 for line in stress)
    assert all(line["refused"] <= 0.01 * line["labelled"] for line in stress)


def test_images_videos_and_audio(lines: list[dict]) -> None:
    closings = {"phi4_multimodal": "<|end|>", "gemma4": "<turn|>"}
    seen = [(kind, line[kind]) for line in lines for kind in ("image", "video", "audio") if kind in line]
    assert len(seen) == 7
    for kind, found in seen:
        assert found["said"] == "a cat" + closings.get(found["name"], "<|im_end|>"), (kind, found)
        assert found["media_tokens"] > 2
