"""The dynamic ratio at its edges: a term that vanished must neither stop nor swamp a run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from spanwise.train.trainer import LARGEST_RATIO, SpanwiseTrainer


@pytest.mark.parametrize(
    ("kd", "ce", "ratio"),
    [
        (2.0, 6.0, 3.0),
        (-2.0, 6.0, 3.0),
        (0.0, 6.0, 1.0),
        (2.0, 0.0, 1.0),
        (0.0, 0.0, 1.0),
        (1e-30, 6.0, LARGEST_RATIO),
        (1e-320, 1e300, LARGEST_RATIO),
    ],
)
def test_the_next_ratio(kd: float, ce: float, ratio: float) -> None:
    task: Any = SimpleNamespace(scaled_terms=["kd"], weights={"kd": 1.0})
    trainer: Any = SimpleNamespace(task=task, terms=["kd", "ce"])
    found = SpanwiseTrainer._next_ratio(trainer, {"kd": kd, "ce": ce})
    assert found == ratio
    assert math.isfinite(found * kd)
