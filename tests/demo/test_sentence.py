"""The sentence says what the numbers say, also when they say that nothing was gained."""

from __future__ import annotations

import pytest

from spanwise.demo import arms as a
from spanwise.demo.sentence import (
    PROVES_NOTHING,
    equal_wall_clock,
    lead,
    share_closed,
    student_sentence,
    student_verdict,
    swap_sentence,
)
from tests.demo.handmade import arm, result


def test_a_gain_in_every_seed_is_said_and_leads():
    found = result(2.3)
    assert student_verdict(found).helped
    assert student_verdict(found).gains == pytest.approx([0.2, 0.19])
    assert "better in each of 2 seeds" in student_sentence(found)
    assert lead(found).startswith("A teacher")


@pytest.mark.parametrize(("taught", "doubled"), [(2.6, 2.4), (2.495, 2.4), (2.3, 2.2)])
def test_no_gain_is_said_plainly(taught, doubled):
    """Worse; better in one seed of two; no better than doubled cross entropy."""
    found = result(taught, doubled)
    assert not student_verdict(found).helped
    assert "did not reliably help" in student_sentence(found)
    assert lead(found).startswith("After")


def test_the_swap_is_told_with_its_control():
    sentence = swap_sentence(result(2.3))
    assert "1.09 / 1.23" in sentence
    assert "down from 1.27 / 1.36" in sentence
    assert "0.93 / 1.06 trained the same way" in sentence
    assert share_closed(result(2.3)) == pytest.approx(((1.27 - 1.09) / (1.27 - 0.93), (1.36 - 1.23) / (1.36 - 1.06)))


def test_a_swap_that_got_worse_is_not_called_down():
    found = [x for x in result(2.3) if x["name"] != a.SWAPPED_TRAINED] + [arm(a.SWAPPED_TRAINED, 0, 1.4, 1.5)]
    assert "against 1.27 / 1.36" in swap_sentence(found)
    assert "down from" not in swap_sentence(found)


def test_equal_wall_clock_reads_the_curve():
    found = result(2.3, seeds=1)
    slow = next(x for x in found if x["name"] == a.DISTILLED)
    slow["curve_seconds"] = [[40.0, 3.0], [80.0, 2.0]]
    assert equal_wall_clock(found) == [(0, 2.0, pytest.approx(2.75))]


def test_one_seed_is_no_verdict_however_large_the_gain():
    found = result(2.0, seeds=1)
    assert not student_verdict(found).helped
    sentence = student_sentence(found)
    assert sentence.startswith("One seed is no verdict")
    assert "2.500 → 2.000" in sentence
    assert "a difference of +0.500, against doubled cross entropy +0.400" in sentence
    assert "each of" not in sentence
    assert "help" not in sentence
    assert lead(found).startswith("After")


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_a_quick_run_says_first_that_it_proves_nothing(seeds):
    found = result(2.3, seeds=seeds)
    assert lead(found, quick=True) == f"{PROVES_NOTHING} {lead(found)}"
    assert "proves nothing" in PROVES_NOTHING
    assert "proves nothing" not in lead(found)
