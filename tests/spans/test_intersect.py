"""Chunks of random partitions against an obvious twin."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.spans.intersect import Placed, intersect

SIZES = st.lists(st.integers(min_value=1, max_value=4), min_size=1, max_size=12)


def placed(rows: list[list[int]]) -> Placed:
    row = np.repeat(np.arange(len(rows)), [len(sizes) for sizes in rows])
    end = np.concatenate([np.cumsum(sizes) for sizes in rows])
    start = end - np.concatenate(rows)
    return Placed(row, start, end, np.zeros(len(row), dtype=bool), np.zeros(len(rows), dtype=np.int64))


def twin(mine: list[int], theirs: list[int]) -> tuple[list[int], list[int]]:
    """Chunk of every token, one token and one boundary at a time."""
    ends = [np.cumsum(sizes).tolist() for sizes in (mine, theirs)]
    common = sorted(set(ends[0]) & set(ends[1]))
    chunks = [[next((place for place, edge in enumerate(common) if end <= edge), -1) for end in side] for side in ends]
    return chunks[0], chunks[1]


@settings(max_examples=100)
@given(rows=st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=3))
def test_random_partitions(rows: list[tuple[list[int], list[int]]]) -> None:
    mine, theirs = [row[0] for row in rows], [row[1] for row in rows]
    lengths = np.array([max(sum(a), sum(b)) for a, b in rows])
    student, teacher = placed(mine), placed(theirs)
    for side, others in ((student, theirs), (teacher, mine)):
        cut = np.array([sum(sizes) for sizes in others])[side.row]
        side.end[side.end > cut] = -1
    found = intersect(student, teacher, lengths, [], lambda left, right: False)
    for row, (left, right) in enumerate(rows):
        expected = twin(left, right)
        assert found.student[student.row == row].tolist() == expected[0]
        assert found.teacher[teacher.row == row].tolist() == expected[1]
        assert found.count[row] == max(expected[0]) + 1
    assert len(found.correct_row) == found.count.sum()


def test_a_gap_splits_its_chunk_by_sides() -> None:
    found = intersect(placed([[2, 3]]), placed([[1, 1, 2, 1]]), np.array([5]), [(0, 3)], lambda left, right: False)
    assert (found.student.tolist(), found.teacher.tolist()) == ([0, 1], [0, 0, 2, 2])
    assert found.correct_chunk.tolist() == [0]
    assert found.count.tolist() == [3]
