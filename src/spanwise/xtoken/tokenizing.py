"""Tokenize without leaving a trace: ids per text, and their rectangle.

A tokenizer's call writes padding and truncation into its Rust part; both are put back. Padding is done here, always on
the right, so the tokenizer's own side and its lack of a pad token do not matter. O(tokens).

Shapes: B texts, S padded length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from spanwise.spans.encode import state_kept


def padding_id(tokenizer: Any) -> int:
    """What fills the rectangle: pad, else eos (padding is masked, so it may equal a real token)."""
    for name in ("pad_token_id", "eos_token_id"):
        token_id = getattr(tokenizer, name, None)
        if token_id is not None:
            return int(token_id)
    raise ValueError(
        f"the tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__} has neither a pad token "
        "nor an eos token; expected one of them to fill rows of unequal length. It was probably loaded from a bare "
        "tokenizer.json. Fix: tokenizer.pad_token = tokenizer.eos_token = '<the model's end of text>'."
    )


def end_id(tokenizer: Any) -> int:
    """The end of sequence, which is appended to rows that are supervised to their end."""
    token_id = getattr(tokenizer, "eos_token_id", None)
    if token_id is None:
        raise ValueError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__} has no eos token; "
            "expected one, since rows end with it (prompt + completion rows, append_eos=True). It was probably loaded "
            "from a bare tokenizer.json. Fix: tokenizer.eos_token = '<the model's end of text>'."
        )
    return int(token_id)


def encode_texts(
    texts: Sequence[str], tokenizer: Any, ctx_length: int, *, add_special_tokens: bool = True
) -> list[list[int]]:
    """The ids of every text, at most ``ctx_length``, with the tokenizer's own defaults otherwise."""
    if not texts:
        return []
    with state_kept(tokenizer):
        encoded = tokenizer(
            list(texts),
            add_special_tokens=add_special_tokens,
            truncation=True,
            max_length=ctx_length,
            padding=False,
            return_attention_mask=False,
        )
    return [list(ids) for ids in encoded["input_ids"]]


def rectangle(
    rows: Sequence[Sequence[int]], fill: int, width: int, divisor: int
) -> tuple[Int64[Tensor, "B S"], Int64[Tensor, "B S"]]:
    """Rows padded on the right to ``width`` and on to a multiple of ``divisor``; mask 1 where a value is real.

    >>> rectangle([[5, 6], [7]], 0, 2, 4)[0].tolist()
    [[5, 6, 0, 0], [7, 0, 0, 0]]
    """
    size = -(-width // divisor) * divisor
    ids = torch.full((len(rows), size), fill, dtype=torch.long)
    mask = torch.zeros((len(rows), size), dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.as_tensor(row, dtype=torch.long)
        mask[place, : len(row)] = 1
    return ids, mask
