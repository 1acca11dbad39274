"""Intersect two partitions of the same bytes: the chunks of an alignment.

Both sides place their tokens on one axis of bytes per row; the rows lie end to end on one global axis. Where both sides
have a token boundary, a bit is set; a chunk is what lies between two neighbouring bits, and its number an exclusive
cumulative sum. Tokens that stand for no bytes (BOS, EOS) get cells of their own between chunks; those of both sides at
one place are paired by role. Only places with such tokens are visited one by one. O(bytes + tokens) time and memory.

Shapes: n tokens of one side of all rows laid end to end, B rows, C chunk ids of all rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(eq=False)
class Placed:
    """The tokens of one side on the byte axes of their rows.

    Attributes:
        row: int64 [n], ascending.
        start: int64 [n], the position in the row's axis where the token starts, or the nearest known one before.
        end: int64 [n], where it ends; -1 where the axis has no exact counterpart.
        inserted: bool [n], the token stands for no bytes of the text.
        first: int64 [B], where the side's first token starts.
    """

    row: Positions
    start: Positions
    end: Positions
    inserted: Flags
    first: Positions


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunk of every token (-1 = none), chunks per row, and which of them are correct: row, chunk id, ascending."""

    student: Positions
    teacher: Positions
    count: Positions
    correct_row: Positions
    correct_chunk: Positions


@dataclass(eq=False)
class _Axis:
    """The global axis: where rows begin on it, and the boundaries that both sides have."""

    base: Positions
    common: Flags
    index: Positions
    row_of: Positions
    row_first: Positions
    closed: Flags
    bad: Flags

    def boundary(self, row: Positions, position: Positions) -> Positions:
        """The last common boundary at or before a position of a row, -1 where the row has none."""
        found = self.index[self.base[row] + position] - 1
        found[found < self.row_first[row]] = -1
        return found


def intersect(
    student: Placed,
    teacher: Placed,
    lengths: Positions,
    gaps: list[tuple[int, int]],
    paired: Callable[[int, int], bool],
) -> Chunks:
    """Chunks of two partitions.

    Args:
        student, teacher: the tokens of both sides.
        lengths: int64 [B], the length of every row's axis.
        gaps: (row, position) of places on which the sides do not agree: the chunk around one is split by sides.
        paired: whether two inserted tokens (their indices into the two sides) mean the same.
    """
    axis = _axis(student, teacher, lengths, gaps)
    cells = _cells(student, teacher, axis, paired)
    per_boundary = np.zeros(len(axis.row_of), dtype=np.int64)
    for (boundary, _, _), _cell in cells:
        per_boundary[boundary] += 1
    at = [axis.boundary(side.row, side.start) for side in (student, teacher)]
    split = np.zeros_like(axis.bad)
    if axis.bad.any():
        present = [np.bincount(where[where >= 0], minlength=len(axis.row_of)) > 0 for where in at]
        split = axis.bad & present[0] & present[1]
    total = per_boundary + axis.closed + (axis.closed & split)
    before = np.cumsum(total) - total
    rows = len(lengths)
    count = np.zeros(rows, dtype=np.int64)
    np.add.at(count, axis.row_of, total)
    origin = before - np.concatenate([before, [0]])[axis.row_first][axis.row_of]
    chunk = origin + per_boundary
    # Index -1, no boundary, reads the sentinel at the end.
    mine = np.append(np.where(axis.closed, chunk, -1), -1)
    ids = [mine[at[0]], (mine + np.append(axis.closed & split, False) if split.any() else mine)[at[1]]]
    good = np.flatnonzero(axis.closed & ~axis.bad)
    correct = [(axis.row_of[good] << 32) + chunk[good]]
    for (boundary, place, both), (left, right) in cells:
        number = origin[boundary] + place
        if left is not None:
            ids[0][left] = number
        if right is not None:
            ids[1][right] = number
        if both:
            correct.append(np.array([(axis.row_of[boundary] << 32) + number], dtype=np.int64))
    keys = np.sort(np.concatenate(correct)) if len(correct) > 1 else correct[0]
    return Chunks(ids[0], ids[1], count, keys >> 32, keys & 0xFFFFFFFF)


def _axis(student: Placed, teacher: Placed, lengths: Positions, gaps: list[tuple[int, int]]) -> _Axis:
    base = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths + 1)])
    rows = np.arange(len(lengths))
    bits = []
    for side in (student, teacher):
        bit = np.zeros(int(base[-1]), dtype=bool)
        place = base[side.row] + side.end
        bit[place if int(side.end.min(initial=0)) >= 0 else place[side.end >= 0]] = True
        bit[base[rows] + side.first] = True
        bits.append(bit)
    common = bits[0] & bits[1]
    positions = np.flatnonzero(common)
    row_of = (np.searchsorted(base, positions, side="right") - 1).astype(np.int64)
    closed = np.zeros(len(positions), dtype=bool)
    closed[:-1] = row_of[1:] == row_of[:-1]
    row_first = np.searchsorted(row_of, rows)
    bad = np.zeros(len(positions), dtype=bool)
    axis = _Axis(base, common, np.cumsum(common, dtype=np.int64), row_of, row_first, closed, bad)
    if gaps:
        row, position = np.array(gaps, dtype=np.int64).T
        around = axis.boundary(row, position)
        axis.bad[around[around >= 0]] = True
    return axis


Cell = tuple[tuple[int, int, bool], tuple[int | None, int | None]]


def _cells(student: Placed, teacher: Placed, axis: _Axis, paired: Callable[[int, int], bool]) -> list[Cell]:
    """(boundary, place among its cells, paired) and the token of each side, for tokens that stand for no bytes."""
    runs: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for number, side in enumerate((student, teacher)):
        tokens = np.flatnonzero(_own_cell(side))
        at = axis.boundary(side.row[tokens], side.start[tokens])
        meets = axis.common[axis.base[side.row[tokens]] + side.start[tokens]]
        for token, boundary, agreed in zip(tokens.tolist(), at.tolist(), meets.tolist(), strict=True):
            if boundary >= 0 and agreed:
                runs[boundary][number].append(token)
            elif boundary >= 0:
                axis.bad[boundary] = True  # it interrupts the chunk, whose tokens are then no contiguous span
    cells: list[Cell] = []
    for boundary, (mine, theirs) in sorted(runs.items()):
        for place, (left, right) in enumerate(_merge(mine, theirs, paired)):
            cells.append(((boundary, place, left is not None and right is not None), (left, right)))
    return cells


def _own_cell(side: Placed) -> Flags:
    """Inserted tokens, and empty ones that stand right before an inserted one."""
    own = side.inserted.copy()
    if not own.any():
        return own
    empty = np.flatnonzero(~own & (side.end == side.start))
    for token in empty[::-1].tolist():
        follower = token + 1
        if follower < len(own) and own[follower] and side.row[follower] == side.row[token]:
            own[token] = side.start[follower] == side.start[token]
    return own


def _merge(
    mine: list[int], theirs: list[int], paired: Callable[[int, int], bool]
) -> list[tuple[int | None, int | None]]:
    """Both runs in one order: the first partner in sight is taken, what has none stands alone."""
    merged: list[tuple[int | None, int | None]] = []
    next_theirs = 0
    for token in mine:
        partner = next((k for k in range(next_theirs, len(theirs)) if paired(token, theirs[k])), None)
        if partner is None:
            merged.append((token, None))
            continue
        merged += [(None, lonely) for lonely in theirs[next_theirs:partner]]
        merged.append((token, theirs[partner]))
        next_theirs = partner + 1
    return merged + [(None, lonely) for lonely in theirs[next_theirs:]]
