"""Broken batches are replaced and counted by class; what other rows would not mend is raised."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from spanwise.spans.chat import UnprovenSpanError
from spanwise.vlm import make_robust_collate


class Fails:
    """Raises the errors it was given, then returns the rows."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self, rows: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return rows


def test_other_rows_are_taken_and_failures_counted() -> None:
    generator = torch.Generator().manual_seed(0)
    robust = make_robust_collate(range(100), Fails(ValueError("a"), OSError("b"), ValueError("c")), generator=generator)
    drawn = robust([1, 2, 3])
    assert len(drawn) == 3
    assert drawn != [1, 2, 3]
    assert robust.failures == {"ValueError": 2, "OSError": 1}
    again = make_robust_collate(
        range(100), Fails(ValueError(), OSError(), ValueError()), generator=torch.Generator().manual_seed(0)
    )
    assert again([1, 2, 3]) == drawn


def test_after_all_retries_the_last_error_is_the_cause() -> None:
    error = OSError("last")
    robust = make_robust_collate([1], Fails(ValueError("first"), error), max_retries=2)
    with pytest.raises(RuntimeError, match=r"Collate failed after 2 retries.*Last error: last") as raised:
        robust([1])
    assert raised.value.__cause__ is error


def test_unproven_labels_pass_unless_asked() -> None:
    with pytest.raises(UnprovenSpanError):
        make_robust_collate([1], Fails(UnprovenSpanError("turn 1")))([1])
    assert make_robust_collate([1], Fails(UnprovenSpanError("turn 1")), retry_unproven=True)([1]) == [1]


@pytest.mark.parametrize("error", [ImportError("no package"), MemoryError(), NameError("x")])
def test_what_is_not_the_data_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        make_robust_collate([1], Fails(error))([1])


def test_there_must_be_other_rows_to_draw() -> None:
    for empty in ([], iter([1])):
        with pytest.raises(ValueError, match=r"has no rows to draw others from") as raised:
            make_robust_collate(empty, Fails(OSError("first")))([1])
        assert isinstance(raised.value.__cause__, OSError)
    with pytest.raises(ValueError, match="max_retries=0 was given; expected at least 1"):
        make_robust_collate([1], Fails(), max_retries=0)


def test_picklable() -> None:
    robust = make_robust_collate([1, 2], Fails())
    assert pickle.loads(pickle.dumps(robust))([5]) == [5]
