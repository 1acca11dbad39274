"""Gemma 4's thinking prefix: inserted behind every model turn, seen, never trained on."""

from __future__ import annotations

import torch
from PIL import Image

from spanwise.vlm import collate_fns
from tests.vlm import processors
from tests.vlm.test_collate_fns import chat, rows

IMAGE = Image.new("RGB", (60, 40), (10, 200, 30))


def test_gemma4_prefix_is_seen_and_not_trained_on() -> None:
    processor = processors.build("gemma4")
    examples = rows(chat("what", "a cat", IMAGE), chat("hello", "a good day"))
    plain = collate_fns.default_collate_fn(examples, processor)
    batch = collate_fns.gemma4_prefix_collate_fn(examples, processor)
    prefix = processor.tokenizer.encode(collate_fns._GEMMA4_THINKING_PREFIX, add_special_tokens=False)
    assert batch["input_ids"].shape[1] == plain["input_ids"].shape[1] + len(prefix)
    for row in range(2):
        ids = batch["input_ids"][row].tolist()
        place = next(i for i in range(len(ids)) if ids[i : i + len(prefix)] == prefix)
        assert batch["attention_mask"][row, place : place + len(prefix)].tolist() == [1] * len(prefix)
        assert batch["mm_token_type_ids"][row, place : place + len(prefix)].tolist() == [0] * len(prefix)
        assert batch["labels"][row, place - 1 : place - 1 + len(prefix)].tolist() == [-100] * len(prefix)
        trained = batch["labels"][row][batch["labels"][row] != -100]
        assert trained.tolist() == plain["labels"][row][plain["labels"][row] != -100].tolist()
    untouched = collate_fns._inject_thinking_prefix_tokens(
        {"input_ids": torch.tensor([[5, 6]]), "other": torch.ones(1, 2).long()}, processor.tokenizer
    )
    assert untouched["input_ids"].tolist() == [[5, 6]]


def test_gemma4_prefix_counts_before_rows_are_left_out() -> None:
    processor = processors.build("gemma4")
    short, longer = chat("x", "y"), chat("x", "a longer answer than the other")
    width = collate_fns.gemma4_prefix_collate_fn(rows(longer), processor)["input_ids"].shape[1] + 1
    assert "left_out" not in collate_fns.gemma4_prefix_collate_fn(rows(longer), processor, max_length=width)
    batch = collate_fns.gemma4_prefix_collate_fn(rows(short, longer), processor, max_length=width - 1)
    assert batch["left_out"] == {"overlong": 1}
    assert batch["input_ids"].shape == (1, width - 2)


def test_gemma4_prefix_grows_every_table_of_integers_with_zeros() -> None:
    tokenizer = processors.build("gemma4").tokenizer
    prefix = tokenizer.encode(collate_fns._GEMMA4_THINKING_PREFIX, add_special_tokens=False)
    turn = tokenizer.encode(collate_fns._GEMMA4_MODEL_TURN, add_special_tokens=False)
    ids = torch.tensor([[5, *turn, 6]])
    batch = {
        "input_ids": ids, "some_places": torch.full_like(ids, 9), "seen": torch.ones_like(ids, dtype=torch.bool),
        "scores": torch.ones(ids.shape), "other_width": torch.ones(1, 2, dtype=torch.int64),
    }  # fmt: skip
    grown = collate_fns._inject_thinking_prefix_tokens(batch, tokenizer)
    at = 1 + len(turn)
    assert grown["input_ids"].tolist() == [[5, *turn, *prefix, 6]]
    assert grown["some_places"].tolist() == [[9] * at + [0] * len(prefix) + [9]]
    assert grown["seen"].tolist() == [[True] * at + [False] * len(prefix) + [True]]
    assert grown["scores"] is batch["scores"]
    assert grown["other_width"] is batch["other_width"]
    assert batch["some_places"].tolist() == [[9] * (at + 1)]
