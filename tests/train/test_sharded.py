"""Sharded models (FSDP2) on two processes: the curve of one process, and parameters that really are sharded."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.train import runs
from tests.train.small_tasks import alone, dealt, distill, masked, vision
from tests.train.two_ranks import on_two_ranks

SHARDED = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}


def test_sharded_models_give_the_curve_of_one_process_in_every_task(tmp_path: Path) -> None:
    """The first is also saved as one model, and continued from its shards when the newest checkpoint is gone."""
    teacher = runs.save_teacher(tmp_path / "teacher")
    fused, tied = distill(tmp_path, teacher, True), distill(tmp_path, teacher, True)
    tied["student"]["model"] = runs.config(tie_word_embeddings=True)
    tasks = [fused, tied, distill(tmp_path, teacher, False), vision(tmp_path), masked(tmp_path)]
    wanted = [alone(content, tmp_path / f"alone-{place}") for place, content in enumerate(tasks)]
    contents = [dealt(content, tmp_path / f"sharded-{place}", **SHARDED) for place, content in enumerate(tasks)]
    contents[0]["train"] |= {"save_strategy": "steps", "save_steps": 2}
    found = on_two_ranks(contents, tmp_path, "sharded", again=[0])
    for expected, ranks in zip(wanted, found, strict=True):
        for seen in ranks:
            assert seen["kinds"] == ["sharded"], "plain DDP would leave whole parameters"
            torch.testing.assert_close(seen["loss_per_step"], expected["loss_per_step"], rtol=2e-5, atol=1e-6)
    # Two micro-batches in each of four steps; two steps once more in the run that is continued.
    assert [[seen["fused"] for seen in ranks] for ranks in found] == [[12, 12], [8, 8], [0, 0], [0, 0], [0, 0]]
    assert all(seen["gathered"] for ranks in found for seen in ranks)
    for seen in found[0]:
        torch.testing.assert_close(seen["again"], wanted[0]["loss_per_step"], rtol=2e-5, atol=1e-6)
    saved, whole = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("sharded-0", "alone-0"))
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], weight, rtol=1e-4, atol=1e-5)
