"""Copy row spans between a flat buffer and a padded one: the kernel under the codec, the frames and the readers.

A span is (start, length) in rows of a flat tensor. ``gather_spans`` lays spans end to end; ``place_spans`` puts them
back with a pad value in the gaps; each is the other's derivative, so autograd passes through both. On a CPU a span is
one memcpy out of a memoryview (a torch slice costs 2 µs, a memoryview slice 0.1 µs); elsewhere an index is built on the
device. O(bytes moved + N) time.

Shapes: N spans, M rows of the flat tensor, L the sum of lengths, ``*tail`` the dimensions of one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

LARGE_BYTES = 256 << 10
"""From here on an array of NumPy's (of huge pages, from 4 MiB on) beats a join, provided that rows are long."""
LONG_ROW_BYTES = 8 << 10


def gather_spans(flat: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Rows ``starts[i] : starts[i] + lengths[i]`` of flat [M, *tail], laid end to end: [L, *tail]."""
    if flat.requires_grad and torch.is_grad_enabled():
        return _GatherSpans.apply(flat, starts, lengths)
    return _gather(flat, starts, lengths)


def place_spans(
    values: Tensor, starts: Sequence[int], lengths: Sequence[int], rows: int, pad: int | float | bool = 0
) -> Tensor:
    """The inverse: values [L, *tail] into a new [rows, *tail] that holds ``pad`` elsewhere. Starts ascend."""
    if values.requires_grad and torch.is_grad_enabled():
        return _PlaceSpans.apply(values, starts, lengths, rows, pad)
    return _place(values, starts, lengths, rows, pad)


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor of any dtype, without a copy."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())
    start = tensor.storage_offset() * tensor.element_size()
    raw: Any = storage.numpy()  # numpy's stubs do not say that arrays are buffers
    return memoryview(raw)[start : start + tensor.numel() * tensor.element_size()]


def plain(tensor: Tensor) -> Tensor:
    """Contiguous, detached, with lazy conjugation and negation carried out: what the bytes must say."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def row_bytes(tensor: Tensor) -> int:
    """The bytes of one row along the first dimension."""
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def span_slices(flat: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> list[memoryview]:
    """Each span of a CPU tensor as a memoryview: pieces for a join."""
    width = row_bytes(flat)
    source = byte_view(plain(flat))
    return [source[s * width : (s + n) * width] for s, n in zip(starts, lengths, strict=True)]


def tensor_over(buffer: Any, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor over the bytes of ``buffer``, read-only buffers included (torch knows no read-only tensors)."""
    raw = np.frombuffer(buffer, dtype=np.uint8)
    if raw.nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    writable: Any = np.asarray(_Window(raw))
    return torch.from_numpy(writable).view(dtype).view(tuple(shape))


def write_pieces(buffer: Any, pieces: Iterable[bytes | memoryview]) -> None:
    """Lay pieces end to end into a writable buffer."""
    target = memoryview(buffer).cast("B")
    position = 0
    for piece in pieces:
        target[position : position + len(piece)] = piece
        position += len(piece)


class _Window:
    """Bytes presented to NumPy as writable, so that torch takes them without a warning; keeps their owner alive."""

    def __init__(self, raw: np.ndarray) -> None:
        self.raw = raw
        address = raw.__array_interface__["data"][0]
        self.__array_interface__ = {"shape": raw.shape, "typestr": "|u1", "data": (address, False), "version": 3}


def pad_bytes(value: int | float | bool, dtype: torch.dtype, count: int) -> memoryview:
    """``count`` elements of ``value`` as bytes of ``dtype``; integers are exact."""
    return byte_view(torch.full((count,), value, dtype=dtype))


def write_padded(
    out: Tensor, flat: Tensor, starts: Sequence[int], lengths: Sequence[int], pad: int | float | bool
) -> None:
    """Fill out [N, W, *tail] (rows contiguous) with the spans of flat, ``pad`` to the right of each."""
    if out.numel() == 0 or {out.device.type, flat.device.type} != {"cpu"}:
        out.copy_(_place(_gather(flat, starts, lengths), *_row_starts(out, lengths), pad).view(out.shape))
        return
    out.fill_(pad)
    storage = torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage())
    raw: Any = storage.numpy()
    stride = out.stride(0) * out.element_size()
    first = out.storage_offset() * out.element_size()
    _copy_spans(memoryview(raw), range(first, first + stride * out.shape[0], stride), flat, starts, lengths)


def _copy_spans(
    target: memoryview, places: Iterable[int], flat: Tensor, starts: Iterable[int], lengths: Iterable[int]
) -> None:
    """Each span of a CPU tensor to its byte offset in the target."""
    width = row_bytes(flat)
    source = byte_view(plain(flat))
    for place, start, length in zip(places, starts, lengths, strict=True):
        used = length * width
        target[place : place + used] = source[start * width : start * width + used]


def _row_starts(out: Tensor, lengths: Sequence[int]) -> tuple[list[int], Sequence[int], int]:
    return [row * out.shape[1] for row in range(len(lengths))], lengths, out.shape[0] * out.shape[1]


def _gather(flat: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    shape = (sum(lengths), *flat.shape[1:])
    if flat.device.type != "cpu":
        return flat.index_select(0, _span_index(starts, lengths, flat.device))
    size = math.prod(shape) * flat.element_size()
    if size == 0:
        return flat.new_empty(shape)
    if size >= LARGE_BYTES and size >= len(lengths) * LONG_ROW_BYTES:
        raw: Any = np.empty(size, np.uint8)
        write_pieces(raw, span_slices(flat, starts, lengths))
        return torch.from_numpy(raw).view(flat.dtype).view(shape)
    return tensor_over(bytearray().join(span_slices(flat, starts, lengths)), flat.dtype, shape)


def _place(values: Tensor, starts: Sequence[int], lengths: Sequence[int], rows: int, pad: int | float | bool) -> Tensor:
    shape = (rows, *values.shape[1:])
    if values.device.type != "cpu":
        return values.new_full(shape, pad).index_copy_(0, _span_index(starts, lengths, values.device), values)
    if math.prod(shape) == 0:
        return values.new_empty(shape)
    width = row_bytes(values)
    blank = not any(pad_bytes(pad, values.dtype, 1))
    # NumPy asks for huge pages and for zeroed ones: most of this work is page faults.
    raw: Any = np.zeros(rows * width, np.uint8) if blank else np.empty(rows * width, np.uint8)
    placed = torch.from_numpy(raw).view(values.dtype).view(shape)
    if not blank:
        placed.fill_(pad)
    _copy_spans(memoryview(raw), [start * width for start in starts], values, [0, *accumulate(lengths)][:-1], lengths)
    return placed


def _span_index(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Positions of every span's rows, built with host-to-device copies only."""
    total = sum(lengths)
    before = [0, *accumulate(lengths)][:-1]
    shift = torch.tensor([s - b for s, b in zip(starts, before, strict=True)], dtype=torch.long).to(device)
    counts = torch.tensor(list(lengths), dtype=torch.long).to(device)
    return torch.repeat_interleave(shift, counts, output_size=total) + torch.arange(total, device=device)


class _GatherSpans(torch.autograd.Function):
    @staticmethod
    @override
    def forward(*args: Any, **kwargs: Any) -> Any:
        ctx, flat, starts, lengths = args
        ctx.spans = (starts, lengths, flat.shape[0])
        return _gather(flat, starts, lengths)

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        starts, lengths, rows = ctx.spans
        return place_spans(grad_outputs[0], starts, lengths, rows), None, None


class _PlaceSpans(torch.autograd.Function):
    @staticmethod
    @override
    def forward(*args: Any, **kwargs: Any) -> Any:
        ctx, values, starts, lengths, rows, pad = args
        ctx.spans = (starts, lengths)
        return _place(values, starts, lengths, rows, pad)

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return gather_spans(grad_outputs[0], *ctx.spans), None, None, None, None
