"""Sharded students (FSDP2) on two processes: the curve of one process, and parameters that really are sharded."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from spanwise.train.recipe import parse_recipe
from spanwise.train.run import train
from tests.train import runs
from tests.train.two_ranks import on_two_ranks


def test_a_sharded_student_gives_the_curve_of_one_process(tmp_path: Path) -> None:
    """Also saved as one model, and continued from its shards when the newest checkpoint is gone."""
    teacher = runs.save_teacher(tmp_path / "teacher")
    alone = train(parse_recipe(runs.recipe(tmp_path / "alone", teacher)))
    content = runs.recipe(tmp_path / "sharded", teacher, per_device_train_batch_size=2, fsdp=True)
    content["train"] |= {
        "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"},
        "save_strategy": "steps",
        "save_steps": 2,
    }
    content["loss"] = {"fused": True}  # a sharded head cannot be read, so the plain losses must be taken
    [ranks] = on_two_ranks([content], tmp_path / "sharded", "sharded", again=True)
    for seen in ranks:
        assert seen["kinds"] == ["sharded"], "plain DDP would leave whole parameters"
        torch.testing.assert_close(seen["loss_per_step"], alone["loss_per_step"], rtol=2e-5, atol=1e-6)
        torch.testing.assert_close(seen["again"], alone["loss_per_step"], rtol=2e-5, atol=1e-6)
    saved, expected = (AutoModelForCausalLM.from_pretrained(place) for place in (content["output"], alone["output"]))
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], weight, rtol=1e-4, atol=1e-5)
