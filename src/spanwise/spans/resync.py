"""What two streams still have in common when no canonical form makes them equal.

The streams are matched where nothing else can be meant: windows of ``ANCHOR`` bytes that occur exactly once in each
and in the same order on both, extended in both directions while the bytes agree. Where a piece extended forwards meets
the next one extended backwards, the cut between them could lie anywhere in the overlap, so the overlap belongs to
neither. Blocks keep away from the characters at their edges. All of it is sorting and comparing: O(N log N).

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
# The shortest block that is believed: an anchor and as much again.
SHORTEST = 32


@dataclass(frozen=True)
class Blocks:
    """Matched blocks, ascending and disjoint on both sides: int64 [K] each."""

    student_start: Positions
    teacher_start: Positions
    length: Positions


def matched_blocks(student: bytes, teacher: bytes) -> Blocks:
    """Blocks of bytes that the two streams certainly share.

    The common beginning counts as one, since both streams start where the text does; so do anchored blocks after it.
    """
    left, right = np.frombuffer(student, dtype=np.uint8), np.frombuffer(teacher, dtype=np.uint8)
    runs = [(0, 0, common_prefix(student, teacher))]
    for x, y in _anchors(left, right):
        last_x, last_y, size = runs[-1]
        if x + ANCHOR <= last_x + size and x - y == last_x - last_y:
            continue  # inside the run that is already there
        back = _agreeing_backwards(left[:x], right[:y])
        ahead = common_prefix(student[x:], teacher[y:])
        runs.append((x - back, y - back, back + ahead))
    blocks = [_trimmed(student, run) for run in _disjoint(runs)]
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


def _agreeing_backwards(left: Bytes, right: Bytes) -> int:
    size = min(len(left), len(right))
    if not size:
        return 0
    differs = left[len(left) - size :][::-1] != right[len(right) - size :][::-1]
    return int(np.argmax(differs)) if differs.any() else size


def _anchors(left: Bytes, right: Bytes) -> list[tuple[int, int]]:
    """Positions of windows that occur once in each stream, in one increasing order on both, one per run."""
    mine, mine_at = _once(left)
    theirs, theirs_at = _once(right)
    _, i, j = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
    order = np.argsort(mine_at[i])
    x, y = mine_at[i][order], theirs_at[j][order]
    if not len(x):
        return []
    same = np.lib.stride_tricks.sliding_window_view(left, ANCHOR)[x]
    equal = (same == np.lib.stride_tricks.sliding_window_view(right, ANCHOR)[y]).all(axis=1)
    x, y = x[equal], y[equal]
    if not len(x):
        return []
    # Anchors that cross others prove that text was moved or lost and repeated: none of a crossing is believed.
    highest_before = np.concatenate([[-1], np.maximum.accumulate(y)[:-1]])
    lowest_after = np.concatenate([np.minimum.accumulate(y[::-1])[::-1][1:], [np.iinfo(np.int64).max]])
    straight = (y > highest_before) & (y < lowest_after)
    x, y = x[straight], y[straight]
    first = np.ones(len(x), dtype=bool)
    first[1:] = (np.diff(x) != np.diff(y)) | (np.diff(x) > 1)
    return list(zip(x[first].tolist(), y[first].tolist(), strict=True))


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


def _disjoint(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Runs without what two neighbours both claim on either side."""
    cut = [list(run) for run in runs]
    for (x, y, size), (next_x, next_y, _), mine, following in zip(runs, runs[1:], cut, cut[1:], strict=False):
        overlap = max(x + size - next_x, y + size - next_y, 0)
        if overlap:
            mine[2] -= overlap
            for side in (0, 1):
                following[side] += overlap
            following[2] -= overlap
    ordered: list[tuple[int, int, int]] = []
    for x, y, size in cut:
        if size > 0 and (
            not ordered or (x >= ordered[-1][0] + ordered[-1][2] and y >= ordered[-1][1] + ordered[-1][2])
        ):
            ordered.append((x, y, size))
    return ordered


def _trimmed(student: bytes, run: tuple[int, int, int]) -> tuple[int, int, int]:
    """A run without the units at its edges, which something just outside may have changed."""
    x, y, size = run
    piece = student[x : x + size]
    text = piece.decode("utf-8", "surrogateescape")
    first, last = (0 if x == 0 and y == 0 else 1), len(text)
    joins = joins_what_precedes()
    loose = [ord(character) for character in text[:64]]
    while first < len(loose) and (joins[loose[first]] or 0xDC80 <= loose[first] <= 0xDCFF):
        first += 1
    while last > 0 and (joins[ord(text[last - 1])] or 0xDC80 <= ord(text[last - 1]) <= 0xDCFF):
        last -= 1
    last -= 1
    start = len(text[:first].encode("utf-8", "surrogateescape"))
    length = len(text[first:last].encode("utf-8", "surrogateescape")) if last > first else 0
    if (x or y) and length < SHORTEST:
        length = 0
    return x + start, y + start, length
