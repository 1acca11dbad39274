"""Lay rows end to end: which documents share a row, and where each begins.

Packing is best-fit decreasing over a window of documents: sort by the tightest side, put each where the least room is
left. It is exact about room (nothing is ever cut) and reports what does not fit at all. A document may have several
lengths at once (a student's and a teacher's); it joins a row only if it fits on every side. O(D log D + D·R) time,
O(D) memory for D documents and R rows.

Shapes: D documents, R rows, S row width, L sides (one length per side).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Bins:
    """Rows of document indices, each in ascending order, and the documents that fit nowhere."""

    rows: list[list[int]]
    too_long: list[int]


def pack_documents(lengths: Sequence[Sequence[int]] | Sequence[int], capacities: Sequence[int] | int) -> Bins:
    """Group documents into rows whose summed lengths stay within ``capacities`` on every side.

    Args:
        lengths: one length per document, or one sequence of L lengths per document.
        capacities: the row width, or one width per side.

    Returns:
        Bins. Every document is in exactly one row or in ``too_long``; rows are ordered by their first document.

    >>> pack_documents([6, 5, 4, 12, 3], 10)
    Bins(rows=[[0, 2], [1, 4]], too_long=[3])
    """
    room = [capacities] if isinstance(capacities, int) else list(capacities)
    sides = [[length] if isinstance(length, int) else list(length) for length in lengths]
    for document, side in enumerate(sides):
        if len(side) != len(room) or min(side, default=0) < 0:
            raise ValueError(
                f"document {document} has lengths {side}; expected {len(room)} lengths, none negative (one per row "
                "capacity). A side was probably left out. Fix: give every document one length per capacity."
            )
    if min(room, default=0) <= 0:
        raise ValueError(
            f"row capacities are {room}; expected positive widths. The context length was probably left at 0. "
            "Fix: pass the context length of each side."
        )
    too_long = [d for d, side in enumerate(sides) if any(n > c for n, c in zip(side, room, strict=True))]
    dropped = set(too_long)
    order = sorted(
        (d for d in range(len(sides)) if d not in dropped),
        key=lambda d: (-max(n / c for n, c in zip(sides[d], room, strict=True)), d),
    )
    rows: list[list[int]] = []
    left: list[list[int]] = []
    for document in order:
        need = sides[document]
        best, least = -1, float("inf")
        for row, free in enumerate(left):
            remaining = min((f - n) / c for f, n, c in zip(free, need, room, strict=True))
            if 0 <= remaining < least:
                best, least = row, remaining
        if best < 0:
            best = len(rows)
            rows.append([])
            left.append(list(room))
        rows[best].append(document)
        left[best] = [f - n for f, n in zip(left[best], need, strict=True)]
    return Bins(sorted(sorted(row) for row in rows), too_long)


def balanced_shards(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Split rows into ``count`` shards of nearly equal total length and of sizes that differ by at most one.

    Longest first into the lightest shard that still has a place. Returns ascending row indices per shard.

    >>> balanced_shards([9, 1, 1, 8], 2)
    [[0, 2], [1, 3]]
    """
    if count < 1:
        raise ValueError(
            f"asked for {count} shards; expected at least 1. The world size was probably not set. "
            "Fix: pass the number of ranks."
        )
    total = len(lengths)
    places = [total // count + (shard < total % count) for shard in range(count)]
    shards: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, shard) for shard in range(count) if places[shard]]
    for row in sorted(range(total), key=lambda r: (-lengths[r], r)):
        weight, shard = heapq.heappop(heap)
        shards[shard].append(row)
        if len(shards[shard]) < places[shard]:
            heapq.heappush(heap, (weight + lengths[row], shard))
    return [sorted(shard) for shard in shards]


def segment_positions(segment_ids: Int[Tensor, "B S"]) -> Int[Tensor, "B S"]:
    """Positions that restart at 0 where a segment begins; 0 on padding (segment 0).

    >>> segment_positions(torch.tensor([[1, 1, 2, 2, 2, 0]])).tolist()
    [[0, 1, 0, 1, 2, 0]]
    """
    place = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand_as(segment_ids)
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    begin = torch.where(starts, place, torch.zeros_like(place)).cummax(dim=1).values
    return torch.where(segment_ids > 0, place - begin, torch.zeros_like(place))


def block_causal_mask(segment_ids: Int[Tensor, "B S"]) -> Bool[Tensor, "B 1 S S"]:
    """True where a query may see a key: same segment, not later, not padding. O(B·S²) bools."""
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    causal = torch.ones(same.shape[-2:], dtype=torch.bool, device=segment_ids.device).tril()
    return (same & causal & (segment_ids > 0)[:, None, :]).unsqueeze(1)


def cumulative_lengths(segment_ids: Int[Tensor, "B S"]) -> Int[Tensor, " n"]:
    """``cu_seqlens``: int32 [n + 1] over the non-padding tokens of all rows laid end to end.

    >>> cumulative_lengths(torch.tensor([[1, 1, 2, 0], [1, 0, 0, 0]])).tolist()
    [0, 2, 3, 4]
    """
    row = torch.arange(segment_ids.shape[0], device=segment_ids.device)[:, None].expand_as(segment_ids)
    kept = segment_ids > 0
    stride = int(segment_ids.max()) + 1 if segment_ids.numel() else 1
    _, sizes = torch.unique_consecutive((row * stride + segment_ids)[kept], return_counts=True)
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(torch.int32)
