"""The sentence says what the numbers say, also when they say that nothing was gained."""

from __future__ import annotations

import pytest

from spanwise.demo import arms as a
from spanwise.demo.page import write_demo_page
from spanwise.demo.sentence import (
    equal_wall_clock,
    lead,
    share_closed,
    student_sentence,
    student_verdict,
    swap_sentence,
)


def arm(name, seed, docs, tales=2.0, seconds=50.0, curve=((10, 3.0), (20, 2.0))):
    return {
        "name": name,
        "seed": seed,
        "bits_per_byte": docs,
        "other_domain_bits_per_byte": tales,
        "seconds": seconds,
        "memory_mb": 700.0,
        "curve": [list(point) for point in curve],
        "curve_seconds": [[x / 20 * seconds, y] for x, y in curve],
    }


def result(taught, doubled=2.4, seeds=2):
    swaps = [
        arm(a.ORIGINAL, None, 1.03, 1.13),
        arm(a.SWAPPED, None, 1.27, 1.36),
        arm(a.SWAPPED_TRAINED, 0, 1.09, 1.23, 70.0),
        arm(a.ORIGINAL_TRAINED, 0, 0.93, 1.06, 72.0),
    ]
    students = [
        arm(name, seed, value)
        for seed in range(seeds)
        for name, value in ((a.CROSS_ENTROPY, 2.5), (a.DISTILLED, taught + seed * 0.01), (a.DOUBLED, doubled))
    ]
    return swaps + students


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


def test_the_page_holds_the_sentence_and_no_network(tmp_path):
    facts = {
        "exact_share": 0.78,
        "seconds": 280.0,
        "cache": {"seconds": 60.0, "tokens": 1000, "bytes_per_token": 140.0},
    }
    page = write_demo_page(tmp_path / "report.html", result(2.3), facts, quick=True).read_text()
    assert "prove nothing" in page
    assert "better in each of 2 seeds" in page
    assert "4-bit quantised" in page or "4-bit" in page
    assert "http://" not in page
    assert "https://" not in page
