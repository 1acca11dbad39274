"""Softmax in place: equal to torch's, and without NaN where a row holds nothing."""

from __future__ import annotations

import pytest
import torch

from spanwise.teachers.softmax import safe_log_softmax, safe_softmax, tempered

BOTH_DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@BOTH_DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 3, 5_000])
def test_equal_to_torchs_and_in_place(device: str, dtype: torch.dtype, width: int) -> None:
    logits = (30 * torch.randn(4, width, generator=torch.Generator().manual_seed(0), dtype=dtype)).to(device)
    if width > 1:
        logits[1, 0] = -torch.inf
    for ours, theirs in ((safe_log_softmax, torch.log_softmax), (safe_softmax, torch.softmax)):
        mine = logits.clone()
        made = ours(mine)
        assert made.data_ptr() == mine.data_ptr()
        torch.testing.assert_close(made, theirs(logits, -1))


@BOTH_DEVICES
def test_a_row_of_nothing_stays_nothing(device: str) -> None:
    logits = torch.zeros(3, 4, device=device)
    logits[1] = -torch.inf
    assert safe_log_softmax(logits.clone())[1].tolist() == [-torch.inf] * 4
    assert safe_softmax(logits.clone()).sum(-1).tolist() == [1.0, 0.0, 1.0]
    assert safe_log_softmax(torch.zeros(0, 4, device=device)).shape == (0, 4)
    logits[2, 0] = torch.nan
    assert safe_softmax(logits)[2].isnan().all()


def test_a_temperature_of_one_touches_nothing() -> None:
    logits = torch.ones(1, 2)
    assert tempered(logits, 1.0) is logits
    assert tempered(logits, 2.0).tolist() == [[0.5, 0.5]]
