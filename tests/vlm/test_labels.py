"""Labels of real processors on the stress set: none wrong, at least 99 % labelled; and the table of families."""

from __future__ import annotations

import pytest

from spanwise.vlm import FAMILIES
from tests.vlm import processors
from tests.vlm.stress import Outcome, run

pytestmark = pytest.mark.xdist_group("vlm_labels")  # the table sums up the tests before it
outcomes: dict[str, Outcome] = {}


@pytest.mark.parametrize("name", processors.REAL)
def test_no_label_is_wrong(name: str) -> None:
    outcome = run(name, 5)
    outcomes[outcome.family] = outcome
    assert outcome.wrong == 0
    assert outcome.labelled >= 0.99 * outcome.total
    assert outcome.total == 50


def test_the_table_of_families(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed for people: which families were run on their real class, and what became of their conversations."""
    assert outcomes, "run this file as a whole: the table sums up the tests before it"
    with capsys.disabled():
        print(f"\n{'family':20} {'class':42} {'labelled':>9} {'refused':>8}")
        for family in FAMILIES:
            seen = outcomes.get(family.name)
            kind = "real" if seen else "stand-in here; real class under test_torchvision"
            if family.name in ("Kimi-VL", "Nemotron-Parse"):
                kind = "stand-in, never run on the real class"
            if family.name == "default":
                kind = "any (see LLaVA, Gemma 3)"
            rates = (f"{seen.labelled / seen.total:.1%}", f"{seen.refused / seen.total:.1%}") if seen else ("-", "-")
            print(f"{family.name:20} {kind:50} {rates[0]:>9} {rates[1]:>8}")
    assert len(FAMILIES) == 17
