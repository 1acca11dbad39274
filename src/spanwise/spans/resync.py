"""What two streams still have in common when no canonical form makes them equal.

The streams are matched where nothing else can be meant: along windows of ``ANCHOR`` bytes that occur exactly once in
each and in the same order on both. Where a run of such windows ends, the bytes may go on agreeing by accident, so a
window's length at either edge is not believed. All of it is sorting and comparing: O(N log N).

Shapes: N bytes of one stream, M of the other, K matched blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spanwise.spans.fold import joins_what_precedes

Positions = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

ANCHOR = 16
# The shortest block that is believed beyond the windows at its edges.
SHORTEST = 16


@dataclass(frozen=True)
class Blocks:
    """Matched blocks, ascending and disjoint on both sides: int64 [K] each."""

    student_start: Positions
    teacher_start: Positions
    length: Positions


def matched_blocks(student: bytes, teacher: bytes) -> Blocks:
    """Blocks of bytes that the two streams certainly share."""
    left, right = np.frombuffer(student, dtype=np.uint8), np.frombuffer(teacher, dtype=np.uint8)
    blocks = [_believed(student, teacher, run) for run in _runs(left, right)]
    kept = np.array([block for block in blocks if block[2] > 0], dtype=np.int64).reshape(-1, 3)
    return Blocks(kept[:, 0], kept[:, 1], kept[:, 2])


def common_prefix(first: bytes, second: bytes) -> int:
    """Number of equal bytes from the start.

    >>> common_prefix(b"abcd", b"abX")
    2
    """
    size = min(len(first), len(second))
    if first[:size] == second[:size]:
        return size
    a, b = np.frombuffer(first, dtype=np.uint8, count=size), np.frombuffer(second, dtype=np.uint8, count=size)
    return int(np.argmax(a != b))


def _runs(left: Bytes, right: Bytes) -> list[tuple[int, int, int]]:
    """Maximal runs of anchors over agreeing bytes: first and last anchor of the student, shift to the teacher."""
    x, y = _anchors(left, right)
    if not len(x):
        return []
    runs: list[tuple[int, int, int]] = []
    new = np.ones(len(x), dtype=bool)
    new[1:] = (np.diff(x) > 1) | (np.diff(x) != np.diff(y))
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(x)) - 1
    for begin, end, shift in zip(x[first].tolist(), x[last].tolist(), (y - x)[first].tolist(), strict=True):
        if runs and runs[-1][2] == shift:
            before = runs[-1][1]
            if np.array_equal(left[before:begin], right[before + shift : begin + shift]):
                runs[-1] = (runs[-1][0], end, shift)
                continue
        runs.append((begin, end, shift))
    return runs


def _anchors(left: Bytes, right: Bytes) -> tuple[Positions, Positions]:
    """Where windows lie that occur once in each stream, in one increasing order on both."""
    mine, mine_at = _once(left)
    theirs, theirs_at = _once(right)
    _, i, j = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
    order = np.argsort(mine_at[i])
    x, y = mine_at[i][order], theirs_at[j][order]
    if not len(x):
        return x, y
    same = np.lib.stride_tricks.sliding_window_view(left, ANCHOR)[x]
    equal = (same == np.lib.stride_tricks.sliding_window_view(right, ANCHOR)[y]).all(axis=1)
    x, y = x[equal], y[equal]
    if not len(x):
        return x, y
    # Anchors that cross others prove that text was moved or lost and repeated: none of a crossing is believed.
    highest_before = np.concatenate([[-1], np.maximum.accumulate(y)[:-1]])
    lowest_after = np.concatenate([np.minimum.accumulate(y[::-1])[::-1][1:], [np.iinfo(np.int64).max]])
    straight = (y > highest_before) & (y < lowest_after)
    return x[straight], y[straight]


def _once(stream: Bytes) -> tuple[npt.NDArray[np.uint64], Positions]:
    """Hashes of the windows that occur exactly once, ascending, and where."""
    if len(stream) < ANCHOR:
        return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)
    size = len(stream) - ANCHOR + 1
    hashes = np.zeros(size, dtype=np.uint64)
    for shift in range(ANCHOR):
        hashes = hashes * np.uint64(0x100000001B3) + stream[shift : shift + size]
    values, where, counts = np.unique(hashes, return_index=True, return_counts=True)
    return values[counts == 1], where[counts == 1].astype(np.int64)


def _believed(student: bytes, teacher: bytes, run: tuple[int, int, int]) -> tuple[int, int, int]:
    """What is certain of a run of anchors: start on both sides, and length; 0 where too little is.

    The bytes just inside an edge may agree by accident: what was lost there may begin as its successor does. An
    accident as long as a window would repeat the window, which occurs once; so a window's length at either edge is
    given up, and the units there with it. Nothing can be lost before a run that agrees from the very start.
    """
    first, last, shift = run
    from_start = shift == 0 and student[:first] == teacher[:first]
    x, end = (0, last) if from_start else (first + ANCHOR, last)
    text = student[x:end].decode("utf-8", "surrogateescape")
    low, high = 0 if from_start else 1, len(text) - 1
    while low < high and _is_loose(text[low]):
        low += 1
    while high > low and _is_loose(text[high]):
        high -= 1
    before = len(text[:low].encode("utf-8", "surrogateescape"))
    length = len(text[low:high].encode("utf-8", "surrogateescape")) if high > low else 0
    return x + before, x + before + shift, length if from_start or length >= SHORTEST else 0


def _is_loose(character: str) -> bool:
    """The character belongs to what precedes it, or is a stray byte."""
    return bool(joins_what_precedes()[ord(character)]) or 0xDC80 <= ord(character) <= 0xDCFF
