"""Sharded students (FSDP2) on two processes: the curve of one process, and parameters that really are sharded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from spanwise.train.recipe import parse_recipe
from spanwise.train.run import train
from tests.train import runs

RANK = Path(__file__).with_name("rank.py")


def on_two_ranks(content: dict[str, Any], folder: Path, *words: str) -> list[dict[str, Any]]:
    """Run a recipe on two gloo processes; what each rank saw."""
    folder.mkdir(parents=True, exist_ok=True)
    path = runs.write(content, folder / "recipe.yaml")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(RANK), str(path), str(folder), *words],
        env=runs.environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_a_sharded_student_gives_the_curve_of_one_process(tmp_path: Path) -> None:
    teacher = runs.save_teacher(tmp_path / "teacher")
    alone = train(parse_recipe(runs.recipe(tmp_path / "alone", teacher)))
    content = runs.recipe(tmp_path / "sharded", teacher, per_device_train_batch_size=2, fsdp=True)
    content["train"] |= {
        "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"},
        "save_strategy": "steps",
        "save_steps": 2,
    }
    content["loss"] = {"fused": True}  # a sharded head cannot be read, so the plain losses must be taken
    ranks = on_two_ranks(content, tmp_path / "sharded", "sharded")
    assert ranks[0]["pid"] != ranks[1]["pid"]
    for rank, seen in enumerate(ranks):
        assert (seen["rank"], seen["world"]) == (rank, 2)
        assert seen["kinds"] == ["sharded"], "plain DDP would leave whole parameters"
        torch.testing.assert_close(seen["loss_per_step"], alone["loss_per_step"], rtol=2e-5, atol=1e-6)
    folder = Path(content["output"])
    saved, expected = (AutoModelForCausalLM.from_pretrained(place) for place in (folder, alone["output"]))
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], weight, rtol=1e-4, atol=1e-5)
    # The last checkpoint gone, the run goes on from the shards of the one before.
    shutil.rmtree(folder / "checkpoint-4")
    again = on_two_ranks(content, tmp_path / "sharded", "sharded", "resume")
    torch.testing.assert_close(again[0]["loss_per_step"], alone["loss_per_step"], rtol=2e-5, atol=1e-6)
