"""Gemma 4's thinking prefix: its larger instruction-tuned models open every answer with an empty thinking channel.

Training text without it would teach the model to skip what it always writes. The prefix is inserted behind every
``<|turn>model`` line, is seen and never trained on. O(tokens).

Shapes: B rows, S tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spanwise.spans.chat import IGNORE_INDEX
from spanwise.vlm.search import find_pattern

MODEL_TURN = "<|turn>model\n"
THINKING_PREFIX = "<|channel>thought\n<channel|>"


def with_thinking_prefix(batch: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Insert the prefix behind every model turn; every 2-D integer tensor of equal width grows with the ids.

    Inserted places get attention 1, label -100 and 0 elsewhere; rows that stay shorter are padded on the right.
    """
    marker = tokenizer.encode(MODEL_TURN, add_special_tokens=False)
    prefix = tokenizer.encode(THINKING_PREFIX, add_special_tokens=False)
    ids = batch["input_ids"]
    if not marker or not prefix:
        return batch
    places = [_behind_markers(row, torch.tensor(marker, dtype=ids.dtype, device=ids.device)) for row in ids]
    if not any(places):
        return batch
    pad_id = getattr(tokenizer, "pad_token_id", 0) or 0
    inserted = {"input_ids": torch.tensor(prefix), "attention_mask": 1, "labels": IGNORE_INDEX}
    padded = {"input_ids": pad_id, "labels": IGNORE_INDEX}
    changed = dict(batch)
    for key, value in batch.items():
        if isinstance(value, Tensor) and value.shape == ids.shape and not value.is_floating_point():
            rows = [_grown(row, at, inserted.get(key, 0), len(prefix)) for row, at in zip(value, places, strict=True)]
            changed[key] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padded.get(key, 0))
    return changed


def _behind_markers(row: Tensor, marker: Tensor) -> list[int]:
    places: list[int] = []
    end = 0
    while True:
        start, end = find_pattern(row, marker, end)
        if start < 0:
            return places
        places.append(end)


def _grown(row: Tensor, places: list[int], fill: Any, size: int) -> Tensor:
    new = torch.as_tensor(fill, dtype=row.dtype, device=row.device).expand(size)
    pieces = []
    begin = 0
    for place in places:
        pieces += [row[begin:place], new]
        begin = place
    return torch.cat([*pieces, row[begin:]])
