"""Exact match and token accuracy, of rows and of what was generated."""

from __future__ import annotations

import pytest
import torch

from spanwise.mlm import exact_match, seq2seq_exact_match, seq2seq_token_accuracy, token_accuracy

IDS = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
TARGETS = torch.tensor([[5, 6, 7, 8], [5, 1, 7, 8]])


def test_rows_and_tokens():
    assert exact_match(IDS, TARGETS).value == 0.5
    assert token_accuracy(IDS, TARGETS).value == 6 / 8
    ignored = TARGETS.clone()
    ignored[1, 1] = ignored[1, 3] = -100
    assert exact_match(IDS, ignored).value == 1
    assert token_accuracy(IDS, ignored).value == 1


def test_a_row_without_masks_gives_no_nan():
    where = torch.tensor([[False] * 4, [True, True, False, False]])
    assert token_accuracy(IDS, TARGETS, where).value == 0.5
    assert token_accuracy(IDS, TARGETS, torch.zeros_like(where)).value == 0.0
    assert exact_match(IDS[:0], TARGETS[:0]).value == 0.0


@pytest.mark.parametrize("start", [2, torch.tensor([2, 2])])
def test_generated_parts(start):
    targets = torch.tensor([[7, 8], [7, 8]])
    assert seq2seq_exact_match(IDS, targets, start).value == 0.5
    assert seq2seq_token_accuracy(IDS, targets, start).value == 0.75


def test_generated_parts_of_other_widths_do_not_match():
    assert seq2seq_exact_match(IDS, torch.tensor([[7, 8, 0], [7, 9, 0]]), 2).value == 0
    assert seq2seq_exact_match(IDS, torch.tensor([[7], [7]]), 2).value == 0
    assert seq2seq_token_accuracy(IDS, torch.tensor([[7, 8, 0], [7, 9, 0]]), 2).value == 4 / 6


def test_ratios_add_up():
    both = exact_match(IDS, TARGETS) + exact_match(IDS[:1], TARGETS[:1])
    assert both.value == 2 / 3


def test_unequal_shapes_are_named():
    with pytest.raises(ValueError, match="seq2seq_exact_match"):
        exact_match(IDS, TARGETS[:, :2])
