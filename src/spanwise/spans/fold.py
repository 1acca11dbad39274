"""Canonical forms of a byte stream, and where every position goes.

Two tokenizers may give back different bytes of one text: one composes characters (NFC, NFKC), one writes a space for a
literal ▁, one starts with a space that was not there. Folding both streams to one form makes them comparable; a
:class:`Fold` is that form plus the list of places where it differs from the stream, so that token boundaries can be
moved across. A boundary strictly inside a changed place has no counterpart: it is moved to the start of the place and
marked inexact.

Text is cut into *units*: a new one starts before every character that no normalisation form joins to what stands
before it. Units are normalised independently of one another, so only changed ones count as places. NFC, ▁ and removed
spaces are vectorised; NFKC visits the units that it may change one by one. O(N) time and memory for N bytes.

Shapes: N bytes of a stream, E edited places, n positions.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
CodePoints = npt.NDArray[np.uint32]

_NONE: Positions = np.zeros(0, dtype=np.int64)
# The last code point with a decomposition or a combining class lies below; planes 3 to 16 have none.
_END_OF_DECOMPOSITIONS = 0x30000
# What a tokenizer's lstrip and rstrip take: Unicode's white space.
_BLANKS = frozenset(
    "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
)
# Longer heaps of marks are cut no further than here: trying every cut is quadratic.
_LONGEST_UNIT = 32


@dataclass(frozen=True, eq=False)
class Fold:
    """A canonical form of a stream.

    Attributes:
        content: the folded bytes.
        start, end: int64 [E], the edited places in the stream, ascending and disjoint.
        new_start, new_end: int64 [E], the same places in ``content``.
    """

    content: bytes
    start: Positions
    end: Positions
    new_start: Positions
    new_end: Positions

    def move(self, positions: Positions) -> tuple[Positions, Flags]:
        """Where positions of the stream lie in ``content``, and whether each has an exact counterpart.

        Args:
            positions: int64 [n], from 0 to N inclusive.
        """
        if not len(self.start):
            return positions, np.ones(len(positions), dtype=bool)
        place = np.searchsorted(self.start, positions, side="right") - 1
        before = place < 0
        place = np.maximum(place, 0)
        beyond = positions >= self.end[place]
        moved = np.where(beyond, self.new_end[place] + positions - self.end[place], self.new_start[place])
        exact = beyond | (positions == self.start[place])
        return np.where(before, positions, moved), exact | before

    def touches(self, bounds: Positions) -> Flags:
        """Which of the n tokens between n + 1 ascending bounds reach into an edited place."""
        if not len(self.start):
            return np.zeros(len(bounds) - 1, dtype=bool)
        started = np.searchsorted(self.start, bounds[1:], side="left")
        ended = np.searchsorted(self.end, bounds[:-1], side="right")
        return started > ended


def unchanged(stream: bytes) -> Fold:
    """The stream as it is."""
    return Fold(stream, _NONE, _NONE, _NONE, _NONE)


def marks_to_spaces(stream: bytes) -> Fold:
    """▁ (U+2581) becomes a space.

    >>> marks_to_spaces("a▁b".encode()).content
    b'a b'
    """
    if b"\xe2\x96\x81" not in stream:
        return unchanged(stream)
    byte = np.frombuffer(stream, dtype=np.uint8)
    start = np.flatnonzero((byte[:-2] == 0xE2) & (byte[1:-1] == 0x96) & (byte[2:] == 0x81)).astype(np.int64)
    new_start = start - 2 * np.arange(len(start), dtype=np.int64)
    return Fold(stream.replace(b"\xe2\x96\x81", b" "), start, start + 3, new_start, new_start + 1)


def without_spaces_at(stream: bytes, starts: Positions, lengths: Positions) -> Fold:
    """The stream with ``lengths`` bytes taken out at ``starts`` (ascending, disjoint)."""
    if not len(starts):
        return unchanged(stream)
    keep = np.ones(len(stream) + 1, dtype=np.int64)
    np.add.at(keep, starts, -1)
    np.add.at(keep, starts + lengths, 1)
    byte = np.frombuffer(stream, dtype=np.uint8)
    inside = (np.cumsum(keep - 1) + 1)[:-1] > 0
    new = starts - np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    return Fold(byte[inside].tobytes(), starts, starts + lengths, new, new)


Words = Mapping[bytes, tuple[bool, bool]]


def swallowed_blanks(stream: bytes, words: Words) -> Positions:
    """Where words stand that take the blanks on their left, or on their right, with them.

    Returns:
        int64 [4, E]: first blank or word, end of the last, the word's start and end; words without blanks left out.
    """
    if not words:
        return np.zeros((4, 0), dtype=np.int64)
    text = stream.decode("utf-8", "surrogateescape")
    sides = {word.decode("utf-8", "surrogateescape"): taken for word, taken in words.items()}
    places, reached = [], 0
    for found in re.finditer("|".join(map(re.escape, sorted(sides, key=len, reverse=True))), text):
        low, high = found.span()
        left, right = sides[found[0]]
        while left and low > reached and text[low - 1] in _BLANKS:
            low -= 1
        while right and high < len(text) and text[high] in _BLANKS:
            high += 1
        reached = high
        if (low, high) != found.span():
            places.append((low, high, *found.span()))
    return byte_offsets(text)[np.array(places, dtype=np.int64).reshape(-1, 4)].T


def without_blanks_beside(stream: bytes, words: Words) -> Fold:
    """Words swallow the blanks beside them: each becomes one place, from its first blank to its last, that spells it.

    >>> without_blanks_beside(b"a <end>  b", {b"<end>": (False, True)}).content
    b'a <end>b'
    """
    low, high, start, end = swallowed_blanks(stream, words)
    if not len(low):
        return unchanged(stream)
    pieces, at = [], 0
    for before, after, word, word_end in zip(low.tolist(), high.tolist(), start.tolist(), end.tolist(), strict=True):
        pieces += [stream[at:before], stream[word:word_end]]
        at = after
    new_end = high - np.cumsum((high - low) - (end - start))
    return Fold(b"".join([*pieces, stream[at:]]), low, high, new_end - (end - start), new_end)


def composed(stream: bytes, form: Literal["NFC", "NFKC"]) -> Fold:
    """The stream under a Unicode normalisation form; bytes that are no UTF-8 stay as they are.

    >>> fold = composed("e\u0301tude".encode(), "NFC")
    >>> fold.content.decode(), fold.move(np.array([1, 3, 4]))
    ('étude', (array([0, 2, 3]), array([False,  True,  True])))
    """
    if stream.isascii():
        return unchanged(stream)
    text = stream.decode("utf-8", "surrogateescape")
    if unicodedata.is_normalized(form, text):
        return unchanged(stream)
    folded = unicodedata.normalize(form, text)
    before, after = _code_points(text), _code_points(folded)
    starts, new_starts = _unit_starts(before), _unit_starts(after)
    if form == "NFC" and len(starts) == len(new_starts):
        changed = _changed_units(before, after, starts, new_starts)
    else:
        changed, new_starts = _units_one_by_one(text, before, starts, form)
    at, new_at = _byte_offsets(before), _byte_offsets(after)
    starts, new_starts = np.append(starts, len(before)), np.append(new_starts, len(after))
    places = np.stack([starts[changed], starts[changed + 1], new_starts[changed], new_starts[changed + 1]])
    start, end, new_start, new_end = _finer(places, text, form)
    return Fold(folded.encode("utf-8", "surrogateescape"), at[start], at[end], new_at[new_start], new_at[new_end])


def unfinished(content: bytes) -> int:
    """How many bytes at the end of a stream are the beginning of a character that does not end there.

    >>> unfinished("aé".encode()[:-1]), unfinished("aé".encode())
    (1, 0)
    """
    for back in range(1, min(4, len(content)) + 1):
        byte = content[-back]
        if byte & 0xC0 != 0x80:
            needed = 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
            return back if back < needed else 0
    return 0


def last_unit(content: bytes) -> int:
    """Where the last unit of a stream begins: what a cut may have separated from its continuation."""
    tail = content[-256:]
    skip = next((i for i, byte in enumerate(tail) if byte & 0xC0 != 0x80), 0) if len(tail) < len(content) else 0
    points = _code_points(tail[skip:].decode("utf-8", "surrogateescape"))
    if not len(points):
        return len(content)
    starts = _unit_starts(points)
    # An unfinished character at the very end belongs to nothing yet; so does the unit before it, which it may extend.
    last = len(starts) - 1
    while last > 0 and 0xDC80 <= points[starts[last]] <= 0xDCFF:
        last -= 1
    return len(content) - len(tail) + skip + int(_byte_offsets(points)[starts[last]])


def _code_points(text: str) -> CodePoints:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def byte_offsets(text: str) -> Positions:
    """Where every character of a text begins in UTF-8, and the end: int64 [characters + 1]."""
    return _byte_offsets(_code_points(text))


def _byte_offsets(points: CodePoints) -> Positions:
    """Where every character begins in UTF-8, and the end; an escaped byte (U+DC80…) is one byte."""
    width = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    width[(points >= 0xDC80) & (points <= 0xDCFF)] = 1
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(width)])


def _unit_starts(points: CodePoints) -> Positions:
    starts = ~joins_what_precedes()[points]
    starts[:1] = True
    return np.flatnonzero(starts).astype(np.int64)


def _changed_units(before: CodePoints, after: CodePoints, starts: Positions, new_starts: Positions) -> Positions:
    """Indices of the units whose characters differ."""
    sizes = np.diff(np.append(starts, len(before)))
    new_sizes = np.diff(np.append(new_starts, len(after)))
    opposite = np.arange(len(before)) + np.repeat(new_starts - starts, sizes)
    differs = before != after[np.minimum(opposite, len(after) - 1)]
    return np.flatnonzero(np.logical_or.reduceat(differs, starts) | (sizes != new_sizes))


def _finer(places: Positions, text: str, form: Literal["NFC", "NFKC"]) -> Positions:
    """Changed units, cut further where the parts normalise on their own: marks that only follow a composed letter.

    ``places`` is int64 [4, E]: start and end in the text, start and end in its normal form. Only units that end as two
    characters or more are visited; few do.
    """
    several = np.flatnonzero((places[3] - places[2] > 1) & (places[1] - places[0] > 1))
    if not len(several):
        return places
    parts = [places[:, [column]] for column in range(places.shape[1])]
    for unit in several.tolist():
        low, high, new_low, _ = places[:, unit].tolist()
        old = text[low:high][:_LONGEST_UNIT]
        whole = unicodedata.normalize(form, text[low:high])
        cuts = [(0, 0)]
        for size in range(1, len(old)):
            left = unicodedata.normalize(form, old[:size])
            if whole.startswith(left) and left + unicodedata.normalize(form, text[low + size : high]) == whole:
                cuts.append((size, len(left)))
        cuts.append((high - low, len(whole)))
        bounds = np.array(cuts, dtype=np.int64).T
        columns = np.stack(
            [bounds[0][:-1] + low, bounds[0][1:] + low, bounds[1][:-1] + new_low, bounds[1][1:] + new_low]
        )
        moved = [text[a:b] != whole[c - new_low : d - new_low] for a, b, c, d in columns.T.tolist()]
        parts[unit] = columns[:, moved]
    return np.concatenate(parts, axis=1)


def _units_one_by_one(
    text: str, before: CodePoints, starts: Positions, form: Literal["NFC", "NFKC"]
) -> tuple[Positions, Positions]:
    """Indices of the changed units, and where every unit begins after normalisation."""
    sizes = np.diff(np.append(starts, len(before)))
    new_sizes = sizes.copy()
    suspects = np.flatnonzero((sizes > 1) | (before[starts] >= 0x80))
    changed = []
    for unit in suspects.tolist():
        old = text[starts[unit] : starts[unit] + sizes[unit]]
        new = unicodedata.normalize(form, old)
        if new != old:
            changed.append(unit)
            new_sizes[unit] = len(new)
    return np.array(changed, dtype=np.int64), np.concatenate([[0], np.cumsum(new_sizes)[:-1]]).astype(np.int64)


@cache
def joins_what_precedes() -> Flags:
    """bool [0x110000]: the character may be reordered with or composed into what stands before it.

    Combining marks, second halves of canonical pairs, medial and final jamo, and whatever decomposes into one of them
    first. About 50 ms, once.
    """
    joins = np.zeros(0x110000, dtype=bool)
    joins[0x1161:0x1176] = True
    joins[0x11A8:0x11C3] = True
    decomposing = []
    for point in range(0x300, _END_OF_DECOMPOSITIONS):
        character = chr(point)
        if unicodedata.combining(character):
            joins[point] = True
        parts = unicodedata.decomposition(character)
        if parts:
            decomposing.append(character)
            pair = parts.split()
            if parts[0] != "<" and len(pair) == 2:
                joins[int(pair[1], 16)] = True
    for character in decomposing:
        if joins[ord(unicodedata.normalize("NFKD", character)[0])]:
            joins[ord(character)] = True
    joins.setflags(write=False)
    return joins
