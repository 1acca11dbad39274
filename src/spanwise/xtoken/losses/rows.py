"""The tile loop that every loss over student logits shares: value and gradient in one pass, without [rows, V] copies.

A :class:`RowLoss` names the predictor rows it reads, grouped into tiles, and turns one tile of logits into its part of
the loss and, in the same memory, into the gradient. :func:`over_logits` runs it over logits that exist; the fused form
(``fused.py``) over hidden states and a head. Gradients are made in the forward pass, so nothing of the tile is kept:
memory beyond the gradient is O(tile · V), whatever the number of rows.

Sums, softmax and logarithms are float32 (float64 for float64 logits) inside any autocast.

Shapes: B rows, S student length, V student vocabulary (the head may be wider), R rows of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from typing_extensions import override

from spanwise.loss_parts import nothing_counted
from spanwise.xtoken.losses.plan import Side

# Elements of float32 workspace per tile: 16 MiB, about what stays in a last-level cache.
TILE_ELEMENTS = 1 << 22
# An accelerator has no such cache and pays for every launch: tiles of 256 MiB there.
ACCELERATOR_FACTOR = 16


@dataclass(frozen=True)
class Tile:
    """A range of rows and the range of units (chunks or tokens) they make up."""

    first_row: int
    last_row: int
    first_unit: int
    last_unit: int

    @property
    def units(self) -> tuple[int, int]:
        """The range of units."""
        return self.first_unit, self.last_unit


@runtime_checkable
class RowLoss(Protocol):
    """A loss that can be evaluated tile by tile over student rows.

    Attributes:
        rows: predictor positions (row · S + position).
        shape: (B, S) of the batch they were counted in.
        repeats: a row may occur more than once, and its gradients add.
        width: the student tokenizer's size; a wider head is cut to it.
        tiles: in order; together they cover all rows.
    """

    rows: Int64[Tensor, " R"]
    shape: tuple[int, int]
    repeats: bool
    width: int
    tiles: list[Tile]

    def evaluate(self, tile: Tile, logits: Float[Tensor, "R V"], *, gradient: bool) -> Float[Tensor, ""]:
        """The tile's part of the total; with ``gradient``, ``logits`` is overwritten by the total's gradient."""
        ...


def make_tiles(starts: Int64[Tensor, " N1"], width: int, *, breaks: Int64[Tensor, " N"] | None = None) -> list[Tile]:
    """Group units into tiles of about ``TILE_ELEMENTS`` logits; a unit is never split.

    Args:
        starts: where each unit's rows begin, and their total.
        width: logits per row.
        breaks: a tile never crosses a change of this value.
    """
    bounds = starts.tolist()
    kind = breaks.tolist() if breaks is not None else None
    room = tile_rows(width, starts.device)
    tiles: list[Tile] = []
    first = 0
    for unit in range(1, len(bounds)):
        full = unit == len(bounds) - 1 or bounds[unit + 1] - bounds[first] > room
        if full or (kind is not None and kind[unit] != kind[unit - 1]):
            tiles.append(Tile(bounds[first], bounds[unit], first, unit))
            first = unit
    return tiles


def tile_rows(width: int, device: torch.device) -> int:
    """How many rows of ``width`` logits make a tile on a device."""
    elements = TILE_ELEMENTS if device.type == "cpu" else TILE_ELEMENTS * ACCELERATOR_FACTOR
    return max(1, elements // max(width, 1))


def row_tiles(count: int, width: int, device: torch.device) -> list[Tile]:
    """Tiles over units of one row each."""
    room = tile_rows(width, device)
    return [Tile(at, min(at + room, count), at, min(at + room, count)) for at in range(0, count, room)]


def check_batch(what: str, given: Tensor, loss: RowLoss) -> None:
    """Refuse a tensor of another batch than the one that was planned: its rows would be read at wrong places."""
    rows, length = loss.shape
    if tuple(given.shape[:2]) != loss.shape:
        raise ValueError(
            f"the {what} are {given.shape[0]} × {given.shape[1]} and the loss was planned for {rows} × {length} (rows "
            "× tokens); expected equal sizes. The last position was probably cut off to shift by hand, or the batch "
            "was padded or sliced in between. Fix: pass all positions of the batch; the loss shifts by itself."
        )
    if given.device != loss.rows.device:
        raise ValueError(
            f"the {what} lie on {given.device} and the loss was planned on {loss.rows.device}; expected one device. "
            "The batch was probably planned before it was moved. Fix: move the batch first, then plan."
        )


def over_logits(student_logits: Float[Tensor, "B S Vh"], loss: RowLoss, *, inplace: bool = False) -> Float[Tensor, ""]:
    """The total of ``loss`` over logits, with a graph.

    Args:
        student_logits: a head wider than ``loss.width`` is cut; its surplus columns get gradient 0.
        loss: what to evaluate.
        inplace: write the gradient into the memory of ``student_logits``, which is lost for every other reader.
    """
    check_batch("student's logits", student_logits, loss)
    head = student_logits.shape[-1]
    if head < loss.width:
        raise ValueError(
            f"the student's head scores {head:,} tokens and its tokenizer has {loss.width:,}; expected a head at "
            "least as wide. The projection or tokenizer probably belongs to another student. Fix: rebuild the "
            "projection: spanwise project build STUDENT TEACHER -o FILE, or resize the model's embeddings."
        )
    if not len(loss.rows):
        return nothing_counted(student_logits).to(torch.promote_types(student_logits.dtype, torch.float32))
    if inplace and loss.repeats:
        raise ValueError(
            "an in-place gradient was asked of a loss that reads rows twice (ALM with debiasing); expected one "
            "reading. The first would overwrite what the second needs. Fix: pass inplace=False."
        )
    # Inside forward() grad mode is off and needs_input_grad is set all the same, so it is asked here.
    wanted = torch.is_grad_enabled() and student_logits.requires_grad
    total: Tensor = cast("Any", _OverLogits).apply(student_logits, loss, inplace, wanted)
    return total


class _OverLogits(torch.autograd.Function):
    """Evaluates a RowLoss and keeps only its gradient."""

    @staticmethod
    @override
    def forward(*arguments: Any, **_: Any) -> Tensor:
        ctx, logits, loss, inplace, wanted = cast("tuple[Any, Tensor, RowLoss, bool, bool]", arguments)
        gradient = None
        if wanted:
            gradient = logits.detach() if inplace else _empty_gradient(logits, loss)
        compute = torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=torch.float64 if logits.device.type != "mps" else compute, device=logits.device)
        length, width = logits.shape[1], loss.width
        with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
            for tile in loss.tiles:
                rows = loss.rows[tile.first_row : tile.last_row]
                at = (rows // length, rows % length)
                work = logits.detach()[..., :width][at].to(compute)
                total += loss.evaluate(tile, work, gradient=wanted)
                if gradient is not None and loss.repeats:
                    gradient[..., :width].index_put_(at, work.to(gradient.dtype), accumulate=True)
                elif gradient is not None:
                    gradient[..., :width][at] = work.to(gradient.dtype)
            if gradient is not None:
                _clear_the_rest(gradient, loss.rows, width)
        ctx.gradients = [gradient]
        ctx.versions = versions(ctx.gradients)
        return total.to(compute)

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad_output,) = grad_outputs
        return (*hand_out(ctx, grad_output), None, None, None)


def versions(gradients: list[Tensor | None]) -> list[int | None]:
    """How often each was written, so that a later writer is noticed."""
    return [None if g is None else g._version for g in gradients]


def hand_out(ctx: Any, grad_output: Tensor) -> list[Tensor | None]:
    """The gradients made in the forward pass, times ``grad_output``.

    Where that is 1 they are handed out as they are, by an alias that a leaf may take as its ``.grad`` without copying.
    If the taker wrote to it and the graph is walked once more, that is an error instead of a wrong number.
    """
    if versions(ctx.gradients) != ctx.versions:
        raise RuntimeError(
            "backward() was called again on a loss whose gradient was changed in place since; expected one backward "
            "per forward. A .grad was probably zeroed or accumulated into between two calls with retain_graph=True. "
            "Fix: call the loss again."
        )
    factor = float(grad_output)
    if factor == 1.0:
        return [None if g is None else g.detach() for g in ctx.gradients]
    # A number, not a tensor of the gradient's type: a scaler's 65,536 is beyond float16.
    return [None if g is None else g * factor for g in ctx.gradients]


def _empty_gradient(logits: Tensor, loss: RowLoss) -> Tensor:
    """Memory for the gradient: zeroed only where rows add up, else every element is written once.

    float32 for float16 logits: before a scaler lifts it, most of a gradient lies below float16's range.
    """
    dtype = torch.float32 if logits.dtype == torch.float16 else logits.dtype
    make = torch.zeros if loss.repeats else torch.empty
    return make(logits.shape, dtype=dtype, device=logits.device)


def _clear_the_rest(gradient: Tensor, rows: Tensor, width: int) -> None:
    """Zero what no tile wrote: rows outside the plan, and columns beyond the tokenizer."""
    length = gradient.shape[1]
    unread = torch.ones(gradient.shape[0] * length, dtype=torch.bool, device=gradient.device)
    unread[rows] = False
    rest = unread.nonzero().squeeze(1)
    gradient[rest // length, rest % length] = 0.0
    gradient[..., width:] = 0.0


def segment_sum(values: Float[Tensor, "R X"], segment: Int64[Tensor, " R"], segments: int) -> Float[Tensor, "C X"]:
    """Sums of consecutive rows; the same memory where every segment is one row."""
    if len(values) == segments:
        return values.clone()
    return torch.zeros(segments, values.shape[1], dtype=values.dtype, device=values.device).index_add_(
        0, segment, values
    )


def chunk_rows(
    side: Side, chunks: tuple[int, int]
) -> tuple[Int64[Tensor, " R"], Int64[Tensor, " R"], Int64[Tensor, " C"]]:
    """One side's rows of a range of chunks, the chunk of each counted from the range's first, and the chunk sizes."""
    bounds = side.starts[chunks[0] : chunks[1] + 1]
    span = slice(int(bounds[0]), int(bounds[-1]))
    return side.rows[span], side.chunk[span] - chunks[0], bounds.diff()
