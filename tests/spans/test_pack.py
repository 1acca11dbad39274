"""Packing loses nothing and overfills nothing; what follows from segments equals a loop over tokens."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spanwise.spans.pack import (
    balanced_shards,
    block_causal_mask,
    cumulative_lengths,
    pack_documents,
    segment_positions,
)

PAIRS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 15)), max_size=20)
SEGMENTS = st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=3)


@given(sizes=PAIRS, room=st.tuples(st.integers(1, 10), st.integers(1, 12)))
def test_every_document_is_in_one_row_that_has_room_on_both_sides(
    sizes: list[tuple[int, int]], room: tuple[int, int]
) -> None:
    bins = pack_documents(sizes, room)
    assert sorted([*bins.too_long, *(document for row in bins.rows for document in row)]) == list(range(len(sizes)))
    assert bins.too_long == [place for place, (a, b) in enumerate(sizes) if a > room[0] or b > room[1]]
    for row in bins.rows:
        assert row == sorted(row)
        assert all(sum(sizes[document][side] for document in row) <= room[side] for side in (0, 1))
    assert bins.rows == sorted(bins.rows)


@given(sizes=st.lists(st.integers(1, 10), min_size=1, max_size=30))
def test_no_two_rows_could_be_one(sizes: list[int]) -> None:
    totals = sorted(sum(sizes[document] for document in row) for row in pack_documents(sizes, 10).rows)
    assert all(a + b > 10 for a, b in itertools.pairwise(totals))


@pytest.mark.parametrize(
    ("lengths", "room"), [([1, 2], 0), ([(1, 2), (3,)], (4, 4)), ([(1,), (-1,)], (4,)), ([1, 2], (4, -1))]
)
def test_lengths_and_widths_that_make_no_sense_are_refused(lengths: list[int], room: int) -> None:
    with pytest.raises(ValueError, match=r"(?s)expected.*probably.*Fix:"):
        pack_documents(lengths, room)


@given(lengths=st.lists(st.integers(0, 50), max_size=20), count=st.integers(1, 5))
def test_shards_hold_every_row_once(lengths: list[int], count: int) -> None:
    shards = balanced_shards(lengths, count)
    assert sorted(row for shard in shards for row in shard) == list(range(len(lengths)))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    with pytest.raises(ValueError, match=r"expected at least 1.*probably.*Fix:"):
        balanced_shards(lengths, 0)


@given(rows=SEGMENTS)
def test_positions_masks_and_offsets_equal_loops_over_tokens(rows: list[list[int]]) -> None:
    width = max(1, *(sum(sizes) for sizes in rows)) + 1
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    places, seen, offsets = torch.zeros_like(ids), torch.zeros(len(rows), width, width, dtype=torch.bool), [0]
    for row, sizes in enumerate(rows):
        at = 0
        for number, size in enumerate(sizes, start=1):
            for place in range(size):
                ids[row, at + place], places[row, at + place] = number, place
                seen[row, at + place, at : at + place + 1] = True
            at += size
            offsets.append(offsets[-1] + size)
    assert segment_positions(ids).equal(places)
    assert block_causal_mask(ids)[:, 0].equal(seen)
    assert cumulative_lengths(ids).tolist() == offsets
    assert cumulative_lengths(ids).dtype == torch.int32
