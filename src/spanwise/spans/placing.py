"""Lay the tokens of a whole batch on byte axes, under the reading that nearly every row confirms.

Control tokens at the edges of a row were inserted and stand for no bytes, those inside are text, a dummy prefix is
taken off. If both sides' bytes are then equal, or one is the beginning of the other, nothing more is needed. Vectorised
over the batch; only the edges of rows are found row by row. O(tokens + bytes).

Shapes: B rows, n tokens of all rows of one side laid end to end, N their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from spanwise.spans.fold import Flags, Positions, unfinished
from spanwise.spans.intersect import Placed
from spanwise.spans.profile import IS_SPECIAL, IS_UNKNOWN, Profile, entry_length, entry_start

Stream = npt.NDArray[np.uint8]

# The quality of a row: equal bytes, equal after a canonical form, certain blocks only, nothing.
EXACT, CANONICAL, RESYNC, FAILED = 0, 1, 2, 3
_SPACE = 0x20
# Longer than any control token is spelled, and than the blanks before it.
_LONGEST_CONTROL = 256


@dataclass(frozen=True, eq=False)
class PlacedRow:
    """One side of a row on its axis: see :class:`spanwise.spans.intersect.Placed`.

    ``same`` bool [n]: the token's own bytes are the axis's bytes there; no canonical form changed them.
    """

    start: Positions
    end: Positions
    inserted: Flags
    first: int
    same: Flags


@dataclass(frozen=True, eq=False)
class Reconciled:
    """Both sides of a row on one axis, its length, the places where they do not agree, and how it was found."""

    student: PlacedRow
    teacher: PlacedRow
    length: int
    gaps: list[int]
    quality: int


@dataclass(eq=False)
class Tokens:
    """The real tokens of one side.

    Attributes:
        ids: int64 [n].
        bounds: int64 [B + 1], row ``r`` owns ``ids[bounds[r]:bounds[r + 1]]``.
        profile: how to read them.
    """

    ids: Positions
    bounds: Positions
    profile: Profile

    @cached_property
    def row(self) -> Positions:
        """int64 [n]: the row of every token."""
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))


@dataclass(eq=False)
class BatchPlaces:
    """Both sides of a batch on common axes.

    ``slow`` names the rows whose bytes differ: their places are not filled in yet. ``changed`` marks the tokens of each
    side whose own bytes are not the axis's. The rest is as in :class:`Reconciled`, for all rows.
    """

    student: Placed
    teacher: Placed
    lengths: Positions
    gaps: list[tuple[int, int]]
    quality: Positions
    slow: list[int]
    changed: tuple[Flags, Flags]

    def fill(self, row: int, found: Reconciled, sides: tuple[Tokens, Tokens]) -> None:
        """Enter a row that was placed on its own."""
        self.lengths[row], self.quality[row] = found.length, found.quality
        self.gaps += [(row, gap) for gap in found.gaps]
        for placed, tokens, mine, changed in (
            (self.student, sides[0], found.student, self.changed[0]),
            (self.teacher, sides[1], found.teacher, self.changed[1]),
        ):
            here = slice(tokens.bounds[row], tokens.bounds[row + 1])
            placed.start[here], placed.end[here], placed.inserted[here] = mine.start, mine.end, mine.inserted
            placed.first[row] = mine.first
            changed[here] = ~mine.same


def gather(flat: Stream, starts: Positions, lengths: Positions) -> Stream:
    """``lengths[i]`` bytes from ``starts[i]`` on, end to end.

    >>> gather(np.frombuffer(b"abcdef", dtype=np.uint8), np.array([3, 0]), np.array([2, 3])).tobytes()
    b'deabc'
    """
    if not lengths.all():
        filled = lengths > 0
        starts, lengths = starts[filled], lengths[filled]
    if not len(lengths):
        return flat[:0]
    # Steps of one inside a piece and jumps between pieces, summed up: half the time of repeating every start.
    ends = np.cumsum(lengths)
    source = np.ones(int(ends[-1]), dtype=np.int64)
    source[0] = starts[0]
    source[ends[:-1]] = starts[1:] - starts[:-1] - lengths[:-1] + 1
    return flat.take(np.cumsum(source, out=source))


def place_batch(sides: tuple[Tokens, Tokens]) -> BatchPlaces:
    """Place all rows as if both sides had the same bytes, and say for which rows that is not so."""
    edges = [_edges(side) for side in sides]
    student = _lay_out(sides[0], edges[0], sides[1].profile.dummy, edges[1].spaced)
    teacher = _lay_out(sides[1], edges[1], sides[0].profile.dummy, edges[0].spaced)
    rows = len(sides[0].bounds) - 1
    sizes = np.stack([np.diff(student.row_bytes), np.diff(teacher.row_bytes)])
    agreed = sizes.min(axis=0)
    slow = []
    for row in range(rows):
        mine, theirs, least = student.row_stream(row), teacher.row_stream(row), int(agreed[row])
        shorter = int(len(theirs) < len(mine))
        # Cut at its end; unless its tokenizer cuts beginnings, or its control tokens are text that the other spells.
        cut = least and not sides[shorter].profile.truncates_left and not (student, teacher)[shorter].trailing[row]
        same = np.array_equal(mine[:least], theirs[:least]) and (cut or len(mine) == len(theirs))
        literal = _may_be_text(sides[0], edges[0], row, theirs) or _may_be_text(sides[1], edges[1], row, mine)
        if student.doubtful[row] or teacher.doubtful[row] or literal or not same:
            slow.append(row)
        else:
            # The other side may have another character there, which only begins alike: NFC of U+2000 is U+2002.
            agreed[row] -= unfinished(mine[:least][-4:].tobytes())
    for side in (student, teacher):
        if (np.diff(side.row_bytes) > agreed).any():
            side.placed.end[side.placed.end > agreed[side.placed.row]] = -1
    quality = np.where(student.spaced == teacher.spaced, EXACT, CANONICAL)
    changed = (np.zeros(len(sides[0].ids), dtype=bool), np.zeros(len(sides[1].ids), dtype=bool))
    return BatchPlaces(student.placed, teacher.placed, sizes.max(axis=0), [], quality, slow, changed)


@dataclass(eq=False)
class _Laid:
    """One side under the usual reading.

    ``row_bytes`` int64 [B + 1] cuts ``stream`` into rows. ``trailing``: control tokens end the row. ``doubtful``: some
    token's bytes are unknown, or a dummy prefix may follow a control token inside. ``spaced``: a space was taken off.
    """

    placed: Placed
    stream: Stream
    row_bytes: Positions
    trailing: Flags
    doubtful: Flags
    spaced: Flags

    def row_stream(self, row: int) -> Stream:
        return self.stream[self.row_bytes[row] : self.row_bytes[row + 1]]


def _lay_out(side: Tokens, edges: _Edges, other_dummy: str, other_spaced: Flags) -> _Laid:
    profile, bounds = side.profile, side.bounds
    rows = len(bounds) - 1
    lengths, starts = entry_length(edges.entry), entry_start(edges.entry)
    lengths[edges.inserted] = 0
    doubt = IS_UNKNOWN if profile.dummy == other_dummy == "none" else IS_UNKNOWN | IS_SPECIAL
    unsure = (edges.entry & doubt).astype(bool)
    unsure[edges.inserted] = False
    doubtful = _any_per_row(unsure, bounds)
    if profile.dummy == "unless_space":
        extra = edges.spaced & ~other_spaced  # where both sides have it, the text may have it too
    elif profile.dummy == "always" and other_dummy == "none":
        extra = edges.spaced
    else:
        extra = np.zeros(rows, dtype=bool)
    if {profile.dummy, other_dummy} == {"always", "unless_space"}:
        doubtful |= edges.spaced
    starts[edges.first[extra]] += 1
    lengths[edges.first[extra]] -= 1
    ends = np.cumsum(lengths)
    row_bytes = np.concatenate([np.zeros(1, dtype=np.int64), ends])[bounds]
    row = side.row
    base = row_bytes[:-1][row]
    placed = Placed(row, ends - lengths - base, ends - base, edges.inserted, np.zeros(rows, dtype=np.int64))
    return _Laid(placed, gather(profile.flat, starts, lengths), row_bytes, edges.trailing, doubtful, extra)


@dataclass(eq=False)
class _Edges:
    """Control tokens at the edges of rows.

    ``entry`` int64 [n], the profile's entry of every token; ``inserted`` bool [n]; per row the ``first`` token that is
    none of them (-1: no such), whether its bytes begin with a space (``spaced``), and whether control tokens end the
    row (``trailing``).
    """

    entry: Positions
    inserted: Flags
    first: Positions
    spaced: Flags
    trailing: Flags


def _edges(side: Tokens) -> _Edges:
    profile, bounds = side.profile, side.bounds
    entry = profile.entries[side.ids]
    special = (entry & IS_SPECIAL).astype(bool)
    inserted = np.zeros(len(special), dtype=bool)
    rows = len(bounds) - 1
    first = np.where(bounds[:-1] < bounds[1:], bounds[:-1], -1)
    trailing = np.zeros(rows, dtype=bool)
    for row in range(rows) if special.any() else ():
        low, high = int(bounds[row]), int(bounds[row + 1])
        text = np.flatnonzero(~special[low:high])
        if not len(text):
            inserted[low:high] = True
            first[row], trailing[row] = -1, high > low
            continue
        inserted[low : low + text[0]] = True
        inserted[low + text[-1] + 1 : high] = True
        first[row] = low + text[0]
        trailing[row] = low + text[-1] + 1 < high
    spaced = np.zeros(rows, dtype=bool)
    leading = entry[first[first >= 0]]
    full = entry_length(leading) > 0
    spaced[first >= 0] = full & (profile.flat[np.where(full, entry_start(leading), 0)] == _SPACE)
    return _Edges(entry, inserted, first, spaced, trailing)


def _may_be_text(side: Tokens, edges: _Edges, row: int, stream: Stream) -> bool:
    """Whether the other side's bytes begin as a control token at the beginning of this side's row is spelled."""
    leading = side.ids[side.bounds[row] : edges.first[row]] if edges.first[row] >= 0 else side.ids[:0]
    beginning = stream[:_LONGEST_CONTROL].tobytes().lstrip(b" ")
    for token in leading.tolist():
        content = side.profile.table.bytes_of(token)
        size = min(len(content), len(beginning))
        if size and content[:size] == beginning[:size]:
            return True
    return False


def _any_per_row(flags: Flags, bounds: Positions) -> Flags:
    if not flags.any():
        return np.zeros(len(bounds) - 1, dtype=bool)
    counts: npt.NDArray[Any] = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(flags)])
    return np.diff(counts[bounds]) > 0
