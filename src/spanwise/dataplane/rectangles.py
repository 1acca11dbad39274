"""One column as a rectangle: the width it needs, what fills the gaps, and a buffer of the caller's to put it in.

``codec.materialize`` is this over every column of a batch. O(bytes of the rectangle); nothing where it is one already.

Shapes: N rows, ``*tail`` further dimensions of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from spanwise.dataplane.nested import nested_parts
from spanwise.dataplane.ragged import place_spans, write_padded


def exact_pad(value: int | float, dtype: torch.dtype, name: str) -> int | float | bool:
    """``value`` as ``dtype`` has it: integers exactly, bools by truth; what it cannot hold is a ValueError."""
    if dtype.is_complex:
        return value
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise ValueError(
            f"the pad value of '{name}' is {value!r}; expected a number. A missing pad token id was probably passed "
            "on. Fix: name the number, or leave the column out to pad it with 0."
        )
    if dtype == torch.bool:
        return bool(value)
    floating = dtype.is_floating_point
    limits = torch.finfo(dtype) if floating else torch.iinfo(dtype)
    finite = value == value and abs(value) != float("inf")
    if (finite and not limits.min <= value <= limits.max) or (not floating and (not finite or value % 1)):
        raise ValueError(
            f"the pad value of '{name}' is {value}, which {dtype} cannot hold; expected a "
            f"{'number' if floating else 'whole number'} from {limits.min} to {limits.max}. It was probably meant for "
            "a column of another dtype. Fix: choose another pad value for this column."
        )
    return value if floating else int(value)


def rectangle(name: str, column: Tensor, pad: int | float | bool, at_least: int, out: Tensor | None) -> Tensor:
    """The column [N, width, *tail], ``pad`` behind its rows, in fresh memory or in the corner of ``out``.

    A column that needs no padding is returned as it is, unless ``out`` asks for a copy.
    """
    if column.is_nested:
        flat, counts = nested_parts(column)
        starts: Sequence[int] = [0, *accumulate(counts)][:-1]
        natural = max(counts, default=0)
    elif column.dim() < 2:
        return column if out is None else _corner(name, out, tuple(column.shape), column.dtype).copy_(column)
    elif out is None and column.shape[1] >= at_least:
        return column
    else:
        rows, natural = column.shape[:2]
        flat = column.reshape(rows * natural, *column.shape[2:])
        starts, counts = [row * natural for row in range(rows)], [natural] * rows
    width = max(natural, at_least)
    if out is not None:
        target = _corner(name, out, (len(counts), width, *flat.shape[1:]), flat.dtype)
        if out.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr():
            flat = flat.clone()  # the last batch read into this buffer, read into it again
        write_padded(target, flat, starts, counts, pad)
        return target
    places = [row * width for row in range(len(counts))]
    return place_spans(flat, places, counts, len(counts) * width, pad).reshape(len(counts), width, *flat.shape[1:])


def _corner(name: str, out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    fits = out.dim() == len(shape) and all(have >= need for have, need in zip(out.shape[:2], shape[:2], strict=True))
    if not fits or out.shape[2:] != shape[2:] or out.dtype != dtype or not out.is_contiguous() or out.requires_grad:
        raise ValueError(
            f"out['{name}'] is {out.dtype} {tuple(out.shape)}; expected a contiguous {dtype} buffer without gradient "
            f"of at least {shape}. The batch is probably longer than the one it was made for. "
            "Fix: allocate it for the longest batch."
        )
    return out[tuple(slice(size) for size in shape[:2])]
