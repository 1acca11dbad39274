"""No room on the disk: said before the first step where it can be known, and without loss where it fills up later."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback

from spanwise.train import run as run_module
from spanwise.train.full_disk import FullDiskError, told_of_a_full_disk
from spanwise.train.recipe import parse_recipe
from spanwise.train.run import train
from spanwise.train.run_folder import STAGING, checkpoints
from tests import tiny_tokenizers
from tests.train import runs


class FillsUp(TrainerCallback):
    """From the third step on no file may be larger than the weights, so that the optimizer's state does not fit."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            (weights,) = Path(args.output_dir).glob("checkpoint-2/model.safetensors")
            resource.setrlimit(resource.RLIMIT_FSIZE, (weights.stat().st_size + 1_000, resource.RLIM_INFINITY))


def test_a_disk_that_fills_up_is_said_and_the_run_goes_on_from_what_is_whole(tmp_path: Path) -> None:
    content = runs.recipe(tmp_path / "cut", save_strategy="steps", save_steps=2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(FullDiskError, match=r"room for two checkpoints.*--resume: checkpoint-2 is whole"):
            train(parse_recipe(content), callbacks=[FillsUp()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    folder = Path(content["output"])
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-2"]
    assert not (folder / STAGING).exists()
    continued = train(parse_recipe(content), resume=True)["loss_per_step"]
    assert continued == train(parse_recipe(content | {"output": str(tmp_path / "whole")}))["loss_per_step"]


def test_other_failures_are_left_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="of its own"), told_of_a_full_disk(tmp_path):
        raise RuntimeError("a failure of its own")


def test_a_disk_without_room_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters a checkpoint is small, unless the model is to be merged."""
    usage = SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(free=100_000))
    monkeypatch.setattr(run_module, "shutil", usage)
    base = runs.save_teacher(tmp_path / "base", tiny_tokenizers.byte_level_bpe(400))
    content = runs.recipe(tmp_path, max_steps=1)
    adapted = {"student": {"model": str(base), "peft": {"r": 1, "target_modules": ["q_proj"]}}}
    merged = {"student": adapted["student"] | {"merge": True}}
    for refused in (content, content | merged):
        with pytest.raises(ValueError, match=r"has 0\.00 GiB free; expected at least .* for two checkpoints"):
            train(parse_recipe(refused))
        assert not [entry for entry in Path(content["output"]).iterdir() if entry.name != ".lock"]
    assert len(train(parse_recipe(content | adapted))["loss_per_step"]) == 1
    shutil.rmtree(content["output"])
