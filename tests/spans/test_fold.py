"""Canonical forms: content, and where every position goes, against trying every prefix."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.spans.fold import composed, joins_what_precedes, last_unit, marks_to_spaces, without_spaces_at
from tests.reference.alignment import to_nfc

MARKED = st.text(
    st.one_of(
        st.sampled_from("aeqo \u0301\u0323\u0307\u0302\u0344\u1100\u1161\u11a8\uac00é\u2126\u0958\u0f43"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=16,
)


@settings(max_examples=150)
@given(text=MARKED)
def test_nfc_moves_exactly_the_positions_that_have_a_counterpart(text: str) -> None:
    stream = text.encode()
    fold = composed(stream, "NFC")
    assert fold.content == unicodedata.normalize("NFC", text).encode()
    moved, exact = fold.move(np.arange(len(stream) + 1))
    for position, (place, sure) in enumerate(zip(moved.tolist(), exact.tolist(), strict=True)):
        expected = to_nfc(text, position)
        if sure:
            assert place == expected
        elif expected is not None:
            # Finer than needed: allowed only strictly inside something that changed.
            assert unicodedata.normalize("NFC", text) != text
    assert (np.diff(moved) >= 0).all()


@settings(max_examples=100)
@given(text=MARKED, form=st.sampled_from(["NFC", "NFKC"]))
def test_every_exact_position_cuts_the_text_into_parts_that_normalise_alone(text: str, form: str) -> None:
    stream = text.encode()
    fold = composed(stream, form)
    whole = unicodedata.normalize(form, text).encode()
    assert fold.content == whole
    starts = np.cumsum([0, *(len(character.encode()) for character in text)])
    moved, exact = fold.move(starts)
    for size in np.flatnonzero(exact).tolist():
        left, right = (unicodedata.normalize(form, part).encode() for part in (text[:size], text[size:]))
        assert left + right == whole
        assert len(left) == moved[size]


def test_units_never_interact() -> None:
    joins = joins_what_precedes()
    for before in ("a", "\u1100", "\uac00", "\u0915", "\u0b47", "\u05d9"):
        for point in range(0x20, 0x30000, 7):
            character = chr(point)
            if 0xD800 <= point < 0xE000 or joins[point]:
                continue
            for form in ("NFC", "NFKC"):
                apart = unicodedata.normalize(form, before) + unicodedata.normalize(form, character)
                assert unicodedata.normalize(form, before + character) == apart, hex(point)


def test_bytes_that_are_no_text_stay_as_they_are() -> None:
    fold = composed("e\u0301".encode() + b"\xff\xc3", "NFC")
    assert fold.content == "é".encode() + b"\xff\xc3"
    moved, exact = fold.move(np.arange(6))
    assert moved.tolist() == [0, 0, 0, 2, 3, 4]
    assert exact.tolist() == [True, False, False, True, True, True]


def test_marks_become_spaces_and_spaces_can_be_taken_out() -> None:
    fold = marks_to_spaces("▁a▁▁b".encode())
    assert fold.content == b" a  b"
    assert fold.move(np.array([0, 1, 3, 4, 7, 10, 11]))[0].tolist() == [0, 0, 1, 2, 3, 4, 5]
    taken = without_spaces_at(b" a  b", np.array([0, 2]), np.array([1, 2]))
    assert taken.content == b"ab"
    assert taken.move(np.array([0, 1, 2, 3, 4, 5]))[0].tolist() == [0, 0, 1, 1, 1, 2]
    assert taken.move(np.array([3]))[1].tolist() == [False]


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", 0), (b"ab", 1), ("ae\u0301".encode(), 1), ("aé".encode()[:-1], 0), (b"x" * 300, 299)],
)
def test_the_last_unit_is_what_a_cut_may_have_split(content: bytes, expected: int) -> None:
    assert last_unit(content) == expected
