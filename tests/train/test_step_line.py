"""What a step's line says of tokens, over ranks and without the rows that only complete a batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from spanwise.train.run_log import RunLog
from spanwise.train.trainer import SpanwiseTrainer, _tokens_in


def test_tokens_are_those_of_all_ranks() -> None:
    trainer: Any = SimpleNamespace(
        terms=["ce"],
        _sums={"ce": torch.tensor(6.0)},
        _counts={"ce": 4.0},
        _tokens=50,
        asked_to_stop=lambda: False,
        _sum_over_ranks=lambda values: 2 * values,  # another rank with the same
    )
    assert SpanwiseTrainer._reduced(trainer) == ({"ce": 3.0}, 100.0)


def test_rows_that_complete_a_batch_are_not_counted() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]])
    assert _tokens_in({"token_mask": mask}) == 8
    assert _tokens_in({"token_mask": mask, "sample_mask": torch.tensor([1.0, 0.5, 0.0])}) == 5
    packed = {"token_mask": mask, "segment_ids": mask, "sample_mask": torch.tensor([1.0, 1.0, 0.0])}
    assert _tokens_in(packed) == 8, "a packed batch's mask is of documents, not of rows"


def test_the_newest_steps_are_found_behind_evaluations(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in range(1, 6):
        log.write("step", step, {"loss": float(step)})
        log.write("evaluation", step, {})
    assert [entry["step"] for entry in log.last_steps(2)] == [4, 5]
    assert len(log.last_steps(9)) == 5
