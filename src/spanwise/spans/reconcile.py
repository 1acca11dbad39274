"""Place the tokens of one row of both sides on one byte axis, when their bytes are not simply equal.

The ladder: bytes as they are, ▁ as a space, NFC, NFKC; equal first, then one a beginning (or end) of the other, as cut
texts are; then blocks that match beyond doubt (:mod:`spanwise.spans.resync`); else nothing. On every rung it is asked
which control tokens at the row's edges were inserted and which spell out text: the reading that makes the bytes equal.
Tokens with unknown bytes stand for a mark that no text contains.

One row in O(N) per rung and reading; a reading is only tried if the rows have control tokens at their edges.

Shapes: n tokens of one side of the row, N bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from spanwise.spans.fold import (
    Flags,
    Fold,
    Positions,
    composed,
    last_unit,
    marks_to_spaces,
    unfinished,
    without_blanks_beside,
    without_spaces_at,
)
from spanwise.spans.placing import CANONICAL, EXACT, FAILED, RESYNC, PlacedRow, Reconciled, gather
from spanwise.spans.profile import LEFT, RIGHT, Profile
from spanwise.spans.resync import common_prefix, matched_blocks

# Bytes that UTF-8 never has, different on the two sides: an unknown token agrees with nothing.
UNKNOWN_MARKS = (b"\xff\xfe\xfd\xfc", b"\xfe\xff\xfc\xfd")
# How many control tokens at an edge may be text; more are taken for inserted ones.
_MOST_LITERALS = 3
Step = Callable[[bytes, Positions], Fold]
_LADDER: tuple[Step, ...] = (
    lambda stream, _: marks_to_spaces(stream),
    lambda stream, _: composed(stream, "NFC"),
    lambda stream, _: composed(stream, "NFKC"),
)
_RESYNC_FORM = 2
_CONTINUATIONS = bytes(range(0x80, 0xC0))


@dataclass(frozen=True)
class Reading:
    """Which tokens of a side are text: the first ``lead`` and the last ``trail`` are inserted; so are, if
    ``hollow``, all control tokens in between."""

    lead: int
    trail: int
    hollow: bool = False


@dataclass(eq=False)
class RowSide:
    """One side of one row: ids [n] of real tokens, and what is needed to read them."""

    ids: Positions
    profile: Profile
    unknown_mark: bytes
    other_dummy: str = "none"
    other_specials: tuple[bytes, ...] = ()
    other_strips: dict[bytes, tuple[bool, bool]] = field(default_factory=dict)
    keep_first_space: bool = False
    _folds: dict[tuple[Reading, int, bool], Folded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.special = self.profile.special[self.ids]
        self.unknown = ~self.profile.known[self.ids]
        ordinary = np.flatnonzero(~self.special)
        size = len(self.ids)
        self.lead = int(ordinary[0]) if len(ordinary) else size
        self.trail = size - 1 - int(ordinary[-1]) if len(ordinary) else 0

    def readings(self) -> Iterator[Reading]:
        """Everything at the edges inserted; then ever more of it text; then all."""
        leads, trails = (
            [
                *range(edge, max(edge - _MOST_LITERALS, 0), -1),
                max(edge - _MOST_LITERALS, 0),
                *([0] * (edge > _MOST_LITERALS)),
            ]
            for edge in (self.lead, self.trail)
        )
        yield from (Reading(lead, trail) for lead in leads for trail in trails)

    def forget(self) -> None:
        """Read the row anew, with a first space that may be a dummy prefix."""
        self.keep_first_space = False
        self._folds.clear()

    def spaced(self) -> bool:
        """Whether the first token that is no control token begins with a space."""
        return self.lead < len(self.ids) and self.profile.table.bytes_of(int(self.ids[self.lead])).startswith(b" ")

    def contents(self) -> tuple[bytes, ...]:
        """The distinct spellings of the row's control tokens."""
        return tuple({self.profile.table.bytes_of(i) for i in np.unique(self.ids[self.special]).tolist()} - {b""})

    def begins(self, content: bytes, reading: Reading, form: int) -> bool:
        """Whether ``content`` may just as well be how a text begins of which more control tokens are part."""
        fewer = {other.lead for other in self.readings() if other.lead < reading.lead} if content else ()
        longer = [self.folded(Reading(lead, reading.trail), form).content for lead in fewer]
        return any(other != content and other.startswith(content) for other in longer)

    def stripping(self) -> dict[bytes, tuple[bool, bool]]:
        """The spellings of the row's tokens that swallow blanks beside them, and on which sides."""
        strips = self.profile.strips[self.ids]
        return {
            self.profile.table.bytes_of(token): (bool(sides & LEFT), bool(sides & RIGHT))
            for token, sides in zip(self.ids[strips > 0].tolist(), strips[strips > 0].tolist(), strict=True)
        }

    def folded(self, reading: Reading, form: int, spelled: bool = True) -> Folded:
        """The row's canonical bytes under one reading; unknown tokens as their spelling or as the unknown mark."""
        key = (reading, form, spelled)
        if key not in self._folds:
            self._folds[key] = self._fold(reading, form, spelled)
        return self._folds[key]

    def _fold(self, reading: Reading, form: int, spelled: bool) -> Folded:
        inserted = np.zeros(len(self.ids), dtype=bool)
        inserted[: reading.lead] = True
        inserted[len(self.ids) - reading.trail :] = True
        if reading.hollow:
            inserted |= self.special
        stream, bounds = self._stream(inserted, spelled)
        exact = np.ones(len(bounds), dtype=bool)
        same = np.ones(len(bounds) - 1, dtype=bool)
        changed = False
        # A literal ▁ at the start spares a text its dummy prefix as a space does, so it becomes one first.
        marks = _LADDER[: min(form, 1)]
        steps: list[Step] = [self._without_blanks, *marks, self._without_optional_spaces, *_LADDER[1:form]]
        for step in steps:
            fold = step(stream, bounds)
            same &= ~fold.touches(bounds)
            stream = fold.content
            bounds, kept = fold.move(bounds)
            exact &= kept
            changed |= len(fold.start) > 0
        return Folded(stream, bounds, exact, inserted, same, changed)

    def _stream(self, inserted: Flags, spelled: bool) -> tuple[bytes, Positions]:
        lengths = self.profile.lengths[self.ids]
        lengths[inserted] = 0
        marked = self.unknown & ~inserted
        if marked.any() and not spelled:
            pieces = [
                b"" if skip else self.unknown_mark if unknown else self.profile.table.bytes_of(token)
                for token, skip, unknown in zip(self.ids.tolist(), inserted.tolist(), marked.tolist(), strict=True)
            ]
            lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
            stream = b"".join(pieces)
        else:
            stream = gather(self.profile.flat, self.profile.offsets[self.ids], lengths).tobytes()
        return stream, np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])

    def _without_blanks(self, stream: bytes, bounds: Positions) -> Fold:
        """Take out blanks that a control token of the other side swallowed."""
        return without_blanks_beside(stream, self.other_strips)

    def _without_optional_spaces(self, stream: bytes, bounds: Positions) -> Fold:
        """Take out spaces that a dummy prefix on one side may have put in: at the start and after control tokens."""
        own = self.profile.dummy
        if own == "none" and self.other_dummy == "none":
            return without_spaces_at(stream, bounds[:0], bounds[:0])
        mine = {0, *bounds[1:][self.special].tolist()} if own != "none" else set()
        theirs = {0}
        if self.keep_first_space:
            mine, theirs = mine - {0}, set()
        for content in self.other_specials if self.other_dummy != "none" else ():
            for spelling in {content, content.replace("▁".encode(), b" ")}:
                at = stream.find(spelling)
                while at >= 0:
                    theirs.add(at + len(spelling))
                    at = stream.find(spelling, at + 1)
        starts, lengths = [], []
        for place in sorted(mine | theirs):
            size = int(own == "always" and place in mine and stream[place : place + 1] == b" ")
            if (own == "unless_space" and place in mine) or (self.other_dummy == "unless_space" and place in theirs):
                size += stream[place + size : place + size + 1] == b" "
            if size and (not starts or place >= starts[-1] + lengths[-1]):
                starts.append(place)
                lengths.append(size)
        return without_spaces_at(stream, np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Folded:
    """Canonical bytes, where the n + 1 token bounds lie in them, which bounds are exact, which tokens are inserted."""

    content: bytes
    bounds: Positions
    exact: Flags
    inserted: Flags
    same: Flags
    changed: bool

    def placed(self, agreed: tuple[int, int], shift: int = 0) -> PlacedRow:
        """On an axis that starts ``shift`` bytes earlier; bounds outside ``agreed`` (axis positions) are inexact."""
        bounds = self.bounds + shift
        exact = self.exact & (bounds >= agreed[0]) & (bounds <= agreed[1])
        return PlacedRow(
            bounds[:-1], np.where(exact[1:], bounds[1:], -1), self.inserted, int(max(shift, agreed[0])), self.same
        )


def reconcile(student: RowSide, teacher: RowSide) -> Reconciled:
    """Place both sides of a row on one axis."""
    student.other_dummy, teacher.other_dummy = teacher.profile.dummy, student.profile.dummy
    student.other_specials, teacher.other_specials = teacher.contents(), student.contents()
    student.other_strips, teacher.other_strips = teacher.stripping(), student.stripping()
    if "always" not in (student.profile.dummy, teacher.profile.dummy) and student.spaced() and teacher.spaced():
        # Where both sides begin with a space, the text may do so too; first see whether it is no difference.
        student.keep_first_space = teacher.keep_first_space = True
        found = _equal(student, teacher)
        if found is not None:
            return found
        student.forget()
        teacher.forget()
    found = _equal(student, teacher) or _hollow(student, teacher) or _cut(student, teacher)
    return found or _resynchronised(student, teacher)


def _equal(student: RowSide, teacher: RowSide) -> Reconciled | None:
    """The first rung and reading on which both sides have the same bytes."""
    if student.unknown.any() and teacher.unknown.any():
        return None  # two unknown tokens that look alike need not be: nothing is proven
    for form in range(len(_LADDER) + 1):
        theirs: dict[bytes, Reading] = {}
        for reading in teacher.readings():
            theirs.setdefault(teacher.folded(reading, form).content, reading)
        for reading in student.readings():
            mine = student.folded(reading, form)
            if mine.content in theirs:
                their_reading = theirs[mine.content]
                if student.begins(mine.content, reading, form) or teacher.begins(mine.content, their_reading, form):
                    return None
                return _whole(mine, teacher.folded(their_reading, form), form)
    return None


def _hollow(student: RowSide, teacher: RowSide) -> Reconciled | None:
    """Equal once no control token is text: two chat templates around the same words."""
    if not (student.special.any() and teacher.special.any()) or student.unknown.any() or teacher.unknown.any():
        return None
    for form in range(len(_LADDER) + 1):
        mine = student.folded(Reading(student.lead, student.trail, hollow=True), form)
        other = teacher.folded(Reading(teacher.lead, teacher.trail, hollow=True), form)
        if mine.content and mine.content == other.content:
            return _whole(mine, other, form)
    return None


def _whole(mine: Folded, other: Folded, form: int) -> Reconciled:
    size = len(mine.content)
    agreed = (0, size - unfinished(mine.content))
    quality = EXACT if form == 0 and mine.changed == other.changed else CANONICAL
    return Reconciled(mine.placed(agreed), other.placed(agreed), size, [], quality)


def _cut(student: RowSide, teacher: RowSide) -> Reconciled | None:
    """One side's bytes are where the other's begin, or end: a text cut at different bytes."""
    for form in range(len(_LADDER) + 1):
        # In repetitive text the end of a row is often its beginning, too: what the tokenizer cuts off decides.
        found = _common_end(student, teacher, form) or _common_beginning(student, teacher, form)
        if found is not None:
            return found
    return None


def _common_beginning(student: RowSide, teacher: RowSide, form: int) -> Reconciled | None:
    """The shorter side is the beginning of the longer one, under the readings with which most is."""
    agreed, found = 0, dict[tuple[int, int], tuple[Folded, Folded]]()
    for reading in student.readings():
        mine = student.folded(reading, form, spelled=False)
        for their_reading in teacher.readings():
            other = teacher.folded(their_reading, form, spelled=False)
            common = _agreed_beginning(mine.content, other.content)
            if common > agreed:
                agreed, found = common, {}
            if common and common == agreed:
                place = int(mine.bounds[student.lead]), int(other.bounds[teacher.lead])
                found.setdefault(place, (mine, other))
    if len(found) != 1:  # where two readings explain as much, the first words may stand in either place
        return None
    ((mine, other),) = found.values()
    length = max(len(mine.content), len(other.content))
    quality = EXACT if form == 0 and mine.changed == other.changed else CANONICAL
    return Reconciled(mine.placed((0, agreed)), other.placed((0, agreed)), length, [], quality)


def _agreed_beginning(mine: bytes, other: bytes) -> int:
    """How many bytes are common if the shorter one ends there, else 0. What the cut may have split is not counted."""
    shorter = min(mine, other, key=len)
    common = common_prefix(mine, other)
    if common == len(shorter):
        return common - unfinished(shorter)
    unit = last_unit(shorter)
    return unit if common >= unit else 0


def _common_end(student: RowSide, teacher: RowSide, form: int) -> Reconciled | None:
    """The shorter side is the end of the longer one, where its tokenizer cuts beginnings."""
    mine = student.folded(Reading(student.lead, student.trail), form, spelled=False)
    other = teacher.folded(Reading(teacher.lead, teacher.trail), form, spelled=False)
    size, other_size = len(mine.content), len(other.content)
    shorter_profile = student.profile if size <= other_size else teacher.profile
    least = min(size, other_size)
    if not shorter_profile.truncates_left or not least:
        return None
    if mine.content[size - least :] != other.content[other_size - least :]:
        return None
    length = max(size, other_size)
    # A character of which only the end is there proves as little as one of which only the beginning is.
    shorter = mine.content[size - least :]
    begun = len(shorter) - len(shorter.lstrip(_CONTINUATIONS))
    agreed = (length - least + begun, length)
    quality = EXACT if form == 0 and mine.changed == other.changed else CANONICAL
    return Reconciled(
        mine.placed(agreed, length - size), other.placed(agreed, length - other_size), length, [], quality
    )


def _resynchronised(student: RowSide, teacher: RowSide) -> Reconciled:
    """Only what matches beyond doubt; the axis has one position for everything between two blocks."""
    mine = student.folded(Reading(student.lead, student.trail), _RESYNC_FORM, spelled=False)
    other = teacher.folded(Reading(teacher.lead, teacher.trail), _RESYNC_FORM, spelled=False)
    blocks = matched_blocks(mine.content, other.content)
    axis_start, gaps, length = [], [], 0
    reached = (0, 0)
    for x, y, size in zip(blocks.student_start, blocks.teacher_start, blocks.length, strict=True):
        if (x, y) != reached:
            gaps.append(length)
            length += 1
        axis_start.append(length)
        length += int(size)
        reached = (x + size, y + size)
    if reached != (len(mine.content), len(other.content)):
        gaps.append(length)
        length += 1
    at = np.array(axis_start, dtype=np.int64)
    return Reconciled(
        _on_blocks(mine, blocks.student_start, blocks.length, at, length),
        _on_blocks(other, blocks.teacher_start, blocks.length, at, length),
        length,
        gaps,
        RESYNC if len(at) else FAILED,
    )


def _on_blocks(side: Folded, starts: Positions, sizes: Positions, at: Positions, length: int) -> PlacedRow:
    """Bounds of a side on the axis of blocks and gaps."""
    bounds = side.bounds
    block = np.searchsorted(starts, bounds, side="right") - 1
    here = np.maximum(block, 0)
    if len(starts):
        within = (block >= 0) & (bounds <= starts[here] + sizes[here])
        inside = at[here] + bounds - starts[here]
        position = np.where(within, inside, np.where(block >= 0, at[here] + sizes[here], 0))
    else:
        within, position = np.zeros(len(bounds), dtype=bool), np.zeros(len(bounds), dtype=np.int64)
    exact = side.exact & (within | (bounds == 0))
    at_end = ~within & (bounds == len(side.content)) & (bounds > 0)
    position = np.where(at_end, length, position)
    exact |= at_end
    start, end = position[:-1], np.where(exact[1:], position[1:], -1)
    return PlacedRow(start, end, side.inserted, 0, side.same)
