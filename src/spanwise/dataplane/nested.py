"""Jagged nested tensors as what they are: values laid end to end, and the lengths of the rows.

``torch.nested`` knows several layouts; everything here speaks of one, ``torch.jagged`` with the ragged dimension right
behind the rows, and makes the others into it. O(N), and a copy of the values only where rows do not lie end to end.

Shapes: N rows, L the sum of their lengths, ``*tail`` further dimensions of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


def nested_from_rows(values: Tensor, counts: Sequence[int]) -> Tensor:
    """A jagged nested tensor over ``values`` [sum(counts), *tail], without a copy of them."""
    offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int64).to(values.device)
    nested: Tensor = torch.nested.nested_tensor_from_jagged(
        values, offsets=offsets, min_seqlen=min(counts, default=0), max_seqlen=max(counts, default=0)
    )
    return nested


def nested_parts(nested: Tensor) -> tuple[Tensor, list[int]]:
    """Values [L, *tail] and per-row lengths of any nested tensor; a copy only where rows do not lie end to end."""
    part: Any = nested  # the accessors below are not in torch's stubs
    if nested.layout == torch.jagged and part._ragged_idx == 1 and part.lengths() is None:
        offsets = part.offsets()
        counts = offsets.diff().tolist()
        values = part.values()
        return (values if values.shape[0] == sum(counts) else values[: sum(counts)]), counts
    rows = list(nested.unbind())
    if not rows:
        return part.values()[:0], []
    odd = next((row for row, entry in enumerate(rows) if entry.shape[1:] != rows[0].shape[1:]), None)
    if odd is not None:
        raise ValueError(
            f"a nested tensor has rows of shape {tuple(rows[0].shape)} (row 0) and {tuple(rows[odd].shape)} "
            f"(row {odd}); expected rows that differ in their first dimension only. The ragged dimension was probably "
            "transposed away from its place. Fix: transpose it back, so that tokens come first in every row."
        )
    return torch.cat(rows), [row.shape[0] for row in rows]


def whole_lengths(lengths: Tensor) -> list[int]:
    """Row lengths [N] as Python integers; a dtype without integers is refused, since 2.9 tokens are no length."""
    if lengths.dim() != 1:
        raise ValueError(
            f"lengths shape is {tuple(lengths.shape)}; expected (N,), one length per row. They were probably kept as a "
            "column, or a mask was passed. Fix: lengths.flatten(), or mask.sum(1)."
        )
    if lengths.numel() and (lengths.dtype.is_floating_point or lengths.dtype.is_complex or lengths.dtype == torch.bool):
        raise ValueError(
            f"lengths are of dtype {lengths.dtype}; expected an integer dtype. They were probably computed by a "
            "division or a mean, or a mask was passed. Fix: count tokens, e.g. mask.sum(1), which is int64."
        )
    counts: list[int] = lengths.tolist()
    return counts
