"""Exact match and token accuracy, of rows and of what was generated."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import one_hot

from spanwise.loss_parts import Ratio
from spanwise.mlm import (
    MLMPredictor,
    MLMSeq2SeqPredCollator,
    exact_match,
    seq2seq_exact_match,
    seq2seq_token_accuracy,
    token_accuracy,
)
from tests.mlm.helpers import EOS, PAD, IdTokenizer

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


def test_collated_prompts_predicted_and_measured():
    """A model that knows the answers but for one token of the second row."""
    rows = [
        {"prompt_ids": [10, 11, 12], "target_ids": [20, 21], "answer": [20, 21]},
        {"prompt_ids": [13], "target_ids": [22, 23, 24], "answer": [22, 25, 24]},
    ]
    batch = MLMSeq2SeqPredCollator(IdTokenizer(), block_size=5)(rows)
    said = torch.tensor([[*row["answer"], EOS, *[PAD] * (4 - len(row["answer"]))] for row in rows])

    def model(ids, attention_mask, positions):
        return one_hot(torch.cat([ids[:, :-5], said], 1), 30).float()

    out = MLMPredictor(3, 5, IdTokenizer(), model, confidence="top_prob", temperature=0).predict(batch)
    where = out["output_start_idx"]
    assert where.tolist() == [4, 4]
    assert out["text"] == ["10 11 12 20 21", "13 22 25 24"]
    assert seq2seq_exact_match(out["ids"], batch["target_ids"], where) == Ratio(1.0, 2.0)
    assert seq2seq_token_accuracy(out["ids"], batch["target_ids"], where) == Ratio(9.0, 10.0)


def test_ratios_add_up():
    both = exact_match(IDS, TARGETS) + exact_match(IDS[:1], TARGETS[:1])
    assert both.value == 2 / 3


def test_unequal_shapes_are_named():
    with pytest.raises(ValueError, match="seq2seq_exact_match"):
        exact_match(IDS, TARGETS[:, :2])
