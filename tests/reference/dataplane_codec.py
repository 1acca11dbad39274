"""The codec one row at a time: slices, ``torch.nested`` and ``F.pad``. Slow and obvious; imports nothing it checks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def to_nested(padded: Tensor, lengths: Tensor) -> Tensor:
    """Slice every row and let torch nest them."""
    rows = [padded[row, : int(length)] for row, length in enumerate(lengths)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def pad(rows: list[Tensor], value: Any, at_least: int = 0) -> Tensor:
    """Fill a rectangle row by row."""
    width = max([at_least, *(row.shape[0] for row in rows)])
    out = torch.full((len(rows), width, *rows[0].shape[1:]), value, dtype=rows[0].dtype)
    for place, row in enumerate(rows):
        out[place, : row.shape[0]] = row
    return out


def materialize_like_torch(nested: Tensor, value: float = 0.0, pad_to_seqlen: int = 0) -> Tensor:
    """What the reference does: ``to_padded_tensor``, then ``F.pad`` on the right."""
    padded = torch.nested.to_padded_tensor(nested, value)
    if padded.shape[1] < pad_to_seqlen:
        padded = F.pad(padded, [0, 0] * (padded.dim() - 2) + [0, pad_to_seqlen - padded.shape[1]], value=value)
    return padded


def response(rows: list[Tensor], response_lengths: list[int]) -> list[Tensor]:
    """The outputs that predict the last tokens of each row."""
    return [row[len(row) - take - 1 : len(row) - 1] for row, take in zip(rows, response_lengths, strict=True)]
