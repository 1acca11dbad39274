"""A run that wants its losses in the head and cannot have them there says so, and trains on whole logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from spanwise.train import distill
from spanwise.train.fused_losses import verified_head
from spanwise.train.recipe import parse_recipe
from tests.train import runs


class Plain(nn.Module):
    """A model whose forward always gives every logit."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, use_cache: bool = False) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)


def test_a_model_that_cannot_leave_its_logits_out_is_said() -> None:
    with pytest.warns(UserWarning, match="the fused loss is not used: Plain cannot leave its logits out"):
        assert verified_head(Plain(nn.Identity()), torch.zeros(1, 4, dtype=torch.long)) is None


def test_a_wrapped_student_is_said_and_its_losses_are_the_plain_ones(tmp_path: Path) -> None:
    content = runs.recipe(tmp_path, runs.save_teacher(tmp_path / "teacher")) | {"loss": {"fused": True}}
    tmp_path.joinpath("run").mkdir()
    task = distill.build(parse_recipe(content), tmp_path / "run")
    batch = task.collator([task.train_rows[number] for number in range(2)])
    scales = {"ce": 1.0, "kd/0": 1.0}
    fused = task.losses(task.model, batch, scales)
    task._fused = None
    with pytest.warns(UserWarning, match="not used: the student is wrapped in Plain"):
        plain = task.losses(Plain(task.model), batch, scales)
    for name, parts in fused.items():
        torch.testing.assert_close(plain[name].total, parts.total, rtol=1e-3, atol=1e-3)
    task.close()
