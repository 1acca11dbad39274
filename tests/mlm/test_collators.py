"""Layouts: what lies where, what may be hidden, what is lost to a cut."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

from spanwise.batch import for_trainer
from spanwise.mlm import (
    DefaultInfillMLMCollator,
    DefaultMLMCollator,
    MLMEmptyDataset,
    MLMEmptyDatasetFromLengthRef,
    MLMInfillWithExactTargetPredCollator,
    MLMSeq2SeqCollator,
    MLMSeq2SeqPredCollator,
    MLMSeq2SeqTrainCollator,
    PackedMLMCollator,
    PaplUnconditionalCollator,
    PaplUnconditionalMLMDataset,
)
from tests.mlm.helpers import BOS, EOS, MASK, PAD, IdTokenizer

TOKENIZER = IdTokenizer()


class Everything:
    """A schedule that hides all that may be hidden."""

    def __call__(self, t):
        return torch.full_like(t, float("inf")), torch.ones_like(t)

    noise_rate = total_noise = t_from_noise_rate = t_from_total_noise = sample_t = __call__


def hidden_by(collator, rows):
    return (collator(rows)["input_ids"] == MASK).long().tolist()


def test_default_layout():
    batch = DefaultMLMCollator(TOKENIZER, 6, None, loss_on_padding=False)([{"input_ids": [7, 8]}, {"input_ids": [9]}])
    assert batch["target_ids"].tolist() == [[BOS, 7, 8, EOS, -100, -100], [BOS, 9, EOS, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert batch["labels_shifted"] is False
    visible = batch["input_ids"] != MASK
    expected = torch.tensor([[BOS, 7, 8, EOS, PAD, PAD], [BOS, 9, EOS, PAD, PAD, PAD]])
    assert torch.equal(batch["input_ids"][visible], expected[visible])


@pytest.mark.parametrize(("padding", "expected"), [(False, [1, 1, 1, 0, 0]), (True, [1, 1, 1, 1, 1])])
def test_default_may_hide_everything_and_padding_on_request(padding, expected):
    collator = DefaultMLMCollator(TOKENIZER, 5, Everything(), loss_on_padding=padding)
    assert hidden_by(collator, [{"input_ids": [7]}]) == [expected]
    assert collator([{"input_ids": [7]}])["attention_mask"].tolist() == [expected]


@pytest.mark.parametrize(
    ("truncate", "block", "width"), [("block", 4, 4), (None, 4, 7), ("max", 4, 7), ("max", 9, 9), ("block", None, 7)]
)
def test_widths(truncate, block, width):
    batch = DefaultMLMCollator(TOKENIZER, block, None, truncate=truncate)([{"input_ids": [5] * 5}, {"input_ids": [6]}])
    assert batch["input_ids"].shape == (2, width)
    assert (int(batch["target_ids"][0, -1]) == EOS) == (width == 7)


def test_rows_may_be_tensors_and_say_their_name():
    batch = DefaultMLMCollator(TOKENIZER, 4, None)([{"input_ids": torch.tensor([5]), "idx": 17, "sample_mask": 0.5}])
    assert batch["idx"].tolist() == [17]
    assert batch["sample_mask"].tolist() == [0.5]


def test_seq2seq_training_layout():
    collator = MLMSeq2SeqTrainCollator(TOKENIZER, Everything(), block_size=4, input_block_size=5, loss_on_padding=False)
    rows = [{"prompt_ids": [10, 11], "target_ids": [20, 21]}, {"prompt_ids": [12], "target_ids": [22]}]
    batch = collator(rows)
    assert batch["target_ids"].tolist() == [
        [10, 11, BOS, 20, 21, EOS, -100, -100, -100],
        [12, BOS, 22, EOS, -100, -100, -100, -100, -100],
    ]
    assert batch["input_ids"].tolist() == [
        [10, 11, BOS, MASK, MASK, MASK, PAD, PAD, PAD],
        [12, BOS, MASK, MASK, PAD, PAD, PAD, PAD, PAD],
    ]
    assert batch["fixed_positions_mask"].sum(1).tolist() == [3, 2]


def test_seq2seq_training_slot_is_exactly_block_size_with_padding():
    collator = MLMSeq2SeqTrainCollator(TOKENIZER, Everything(), block_size=4, input_block_size=5)
    batch = collator([{"prompt_ids": [10], "target_ids": [20]}])
    assert batch["input_ids"].tolist() == [[10, BOS, MASK, MASK, MASK, MASK, PAD, PAD, PAD]]
    assert batch["attention_mask"].sum() == 6


@pytest.mark.parametrize("kind", [MLMSeq2SeqTrainCollator, MLMSeq2SeqCollator])
def test_a_long_prefix_is_cut_on_the_left_and_the_suffix_survives(kind):
    batch = kind(TOKENIZER, None, block_size=4, input_block_size=3)(
        [{"prompt_ids": [10, 11, 12, 13, 14, 15], "target_ids": [20, 21]}]
    )
    assert {20, 21} <= set(batch["target_ids"][0].tolist())
    assert batch["target_ids"].shape == (1, 7)
    assert 10 not in batch["target_ids"]


def test_seq2seq_pads_on_both_sides_and_may_hide_bos():
    collator = MLMSeq2SeqCollator(TOKENIZER, Everything(), block_size=5, input_block_size=3, loss_on_padding=False)
    batch = collator(
        [{"prompt_ids": [10], "target_ids": [20], "answer": "a"}, {"prompt_ids": [11, 12], "input_ids": [21, 22]}]
    )
    assert batch["input_ids"].tolist() == [
        [PAD, PAD, 10, MASK, MASK, MASK, PAD, PAD],
        [PAD, 11, 12, MASK, MASK, MASK, MASK, PAD],
    ]
    assert batch["target_ids"][1].tolist() == [-100, 11, 12, BOS, 21, 22, EOS, -100]


def test_fields_pass_through():
    rows = [{"prompt_ids": [10], "target_ids": [20], "answer": "a"}, {"prompt_ids": [11], "answer": "b"}]
    assert MLMSeq2SeqCollator(TOKENIZER, None, block_size=4)(rows)["answer"] == ["a", "b"]
    assert "answer" not in MLMSeq2SeqCollator(TOKENIZER, None, block_size=4)([rows[0], {"prompt_ids": [1]}])
    other = MLMSeq2SeqCollator(TOKENIZER, None, block_size=4, pass_through_fields=["prompt_ids"])(rows)
    assert other["prompt_ids"] == [[10], [11]]


def test_prediction_layout():
    collator = MLMSeq2SeqPredCollator(TOKENIZER, None, block_size=3, input_block_size=4)
    rows = [{"prompt_ids": [10], "target_ids": [20]}, {"prompt_ids": [11, 12, 13, 14, 15], "target_ids": [21, 22]}]
    batch = collator(rows)
    assert batch["input_ids"].tolist() == [[PAD, PAD, 10, BOS], [13, 14, 15, BOS]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert batch["target_ids"].tolist() == [[20, EOS, PAD], [21, 22, EOS]]


def test_prediction_without_and_with_mixed_suffixes():
    collator = MLMSeq2SeqPredCollator(TOKENIZER, None, block_size=3, input_block_size=4)
    assert "target_ids" not in collator([{"prompt_ids": [10]}, {"prompt_ids": [11]}])
    with pytest.raises(ValueError, match="in all rows or in none"):
        collator([{"prompt_ids": [10], "target_ids": [20]}, {"prompt_ids": [11]}])
    with pytest.raises(ValueError, match="block_size=4"):
        collator([{"prompt_ids": [10], "target_ids": [20, 21, 22]}])


def test_infilling_hides_only_what_the_prompt_leaves_open():
    collator = DefaultInfillMLMCollator(TOKENIZER, 6, Everything(), loss_on_padding=True)
    batch = collator([{"input_ids": [7, 8, 9], "prompt_ids": [7, MASK, 9]}])
    assert batch["input_ids"].tolist() == [[MASK, 7, MASK, 9, MASK, MASK]]
    assert batch["fixed_positions_mask"].tolist() == [[False, True, False, True, False, False]]


def test_infilling_longer_than_the_block_is_cut():
    row = {"input_ids": [7, 8, 9, 10], "prompt_ids": [MASK, 8, MASK, MASK]}
    batch = DefaultInfillMLMCollator(TOKENIZER, 3, Everything())([row])
    assert batch["input_ids"].tolist() == [[MASK, MASK, 8]]
    exact = MLMInfillWithExactTargetPredCollator(TOKENIZER, 3, None)([row])
    assert exact["target_ids"].tolist() == [[BOS, 7, 8]]


@pytest.mark.parametrize("kind", [DefaultInfillMLMCollator, MLMInfillWithExactTargetPredCollator])
def test_infilling_wants_equal_lengths(kind):
    with pytest.raises(ValueError, match="1 prompt_ids and 2 input_ids"):
        kind(TOKENIZER, 6, None)([{"input_ids": [7, 8], "prompt_ids": [7]}])


def test_exact_infilling_adds_no_masks():
    collator = MLMInfillWithExactTargetPredCollator(TOKENIZER, 6, Everything())
    batch = collator([{"input_ids": [7, 8], "prompt_ids": [MASK, 8]}])
    assert batch["input_ids"].tolist() == [[BOS, MASK, 8, EOS, PAD, PAD]]
    assert batch["target_ids"].tolist() == [[BOS, 7, 8, EOS, PAD, PAD]]


def test_packed_rows_restart_after_eos():
    batch = PackedMLMCollator(TOKENIZER, 7, None)([{"input_ids": [7, EOS, 8, 9, EOS, 10]}])
    assert batch["segment_ids"].tolist() == [[1, 1, 2, 2, 2, 3, 0]]
    assert batch["positions"].tolist() == [[0, 1, 0, 1, 2, 0, 0]]
    with pytest.raises(ValueError, match="block_size=9"):
        PackedMLMCollator(TOKENIZER, 7, None)([{"input_ids": [7] * 9}])


def test_collators_are_picklable():
    for collator in (
        DefaultMLMCollator(TOKENIZER, 6, None),
        MLMSeq2SeqTrainCollator(TOKENIZER, None, block_size=3, input_block_size=3),
        PackedMLMCollator(TOKENIZER, 6, None),
    ):
        copy = pickle.loads(pickle.dumps(collator))
        row = {"input_ids": [5, 6], "prompt_ids": [7], "epoch": 0, "position": 1}
        assert torch.equal(copy([row])["input_ids"], collator([row])["input_ids"])


def test_for_trainer_trains_on_masks_alone():
    collator = DefaultMLMCollator(TOKENIZER, 8, None, loss_on_padding=False)
    rows = [{"input_ids": [5, 6, 7], "epoch": 0, "position": place} for place in range(4)]
    batch, inputs = collator(rows), for_trainer(collator)(rows)
    hidden = batch["input_ids"] == MASK
    assert torch.equal(inputs["labels"] != -100, hidden)
    assert set(inputs) == {"input_ids", "attention_mask", "labels"}


def test_bert_tokenizers_stand_in_with_cls_and_sep(wordpiece):
    batch = DefaultMLMCollator(wordpiece, 4, None)([{"input_ids": [9]}])
    assert batch["target_ids"][0, :3].tolist() == [wordpiece.cls_token_id, 9, wordpiece.sep_token_id]


@pytest.mark.parametrize(
    ("missing", "words"),
    [("mask_token_id", "no mask token"), ("pad_token_id", "no pad token"), ("bos_token_id", "add_bos=False")],
)
def test_missing_special_tokens_are_named(missing, words):
    ids = {"pad_token_id": 0, "mask_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, missing: None}
    with pytest.raises(ValueError, match=words):
        DefaultMLMCollator(SimpleNamespace(**ids), 4, None)


def test_missing_rows_and_fields_are_named():
    with pytest.raises(ValueError, match="no rows"):
        DefaultMLMCollator(TOKENIZER, None, None)([])
    with pytest.raises(ValueError, match="no field 'input_ids'"):
        DefaultMLMCollator(TOKENIZER, 4, None)([{"text": "x"}])
    with pytest.raises(ValueError, match="truncate='left'"):
        DefaultMLMCollator(TOKENIZER, 4, None, truncate="left")([{"input_ids": [5]}])


@pytest.mark.parametrize("value", ["text", [1.5, 2], [[5, 6]], [None], 7, None, torch.tensor([0.5])])
def test_what_is_no_list_of_ids_is_named(value):
    with pytest.raises(ValueError, match="flat list of token ids"):
        DefaultMLMCollator(TOKENIZER, 4, None)([{"input_ids": value}])


@pytest.mark.parametrize("masking", ["bernoulli", "exact"])
def test_rows_of_nothing_are_a_column_of_padding(masking):
    ends = {"add_bos": False, "add_eos": False}
    for truncate in (None, "block", "max"):
        collator = DefaultMLMCollator(TOKENIZER, None, None, False, truncate, **ends, masking=masking)
        batch = collator([{"input_ids": []}] * 2)
        assert batch["input_ids"].tolist() == [[PAD], [PAD]]
        assert not batch["attention_mask"].any()
    with pytest.raises(ValueError, match="Fix: pass None"):
        DefaultMLMCollator(TOKENIZER, 0, None)([{"input_ids": [5]}])


def test_empty_datasets(tmp_path):
    assert [row["input_ids"] for row in MLMEmptyDataset(TOKENIZER, 2, 3)] == [[MASK] * 3] * 2
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("1\n5\n")
    data = MLMEmptyDatasetFromLengthRef(TOKENIZER, 50, lengths, min_length=2)
    assert {len(row["input_ids"]) for row in data} == {2, 5}
    assert list(data) == list(data)
    lengths.write_text("one\n")
    with pytest.raises(ValueError, match="whole number"):
        MLMEmptyDatasetFromLengthRef(TOKENIZER, 2, lengths)
    with pytest.raises(ValueError, match=r"\.txt"):
        MLMEmptyDatasetFromLengthRef(TOKENIZER, 2, tmp_path / "lengths.pkl")


def test_empty_datasets_share_their_rows_between_workers():
    loader = torch.utils.data.DataLoader(MLMEmptyDataset(TOKENIZER, 5, 3), batch_size=None, num_workers=2)
    assert sorted(row["idx"] for row in loader) == list(range(5))


def test_papl_rows_come_by_length():
    data = list(PaplUnconditionalMLMDataset(TOKENIZER, 2, [3, 5]))
    assert [len(row["input_ids"]) for row in data] == [3, 3, 5, 5]
    assert PaplUnconditionalCollator()(data[:2])["input_ids"].shape == (2, 3)
    with pytest.raises(ValueError, match="one length"):
        PaplUnconditionalCollator()(data[1:3])
