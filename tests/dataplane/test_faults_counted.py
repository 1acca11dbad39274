"""The cells of the fault suites, counted when all of them have run: this file comes behind theirs."""

from __future__ import annotations

import sys

import pytest

from tests.dataplane import test_faults, test_faults_by_use
from tests.dataplane.conftest import REPOSITORY
from tests.dataplane.faults import CELLS, TQ

pytestmark = pytest.mark.xdist_group("ray")  # one worker: the cells are counted in one process
EXPECTED_CELLS = 58


def test_the_guide_lists_every_cell() -> None:
    """The table of docs/guides/transport.md says the same as the tests do, or gives a reason for a gap."""
    tested: dict[str, set[str]] = {}
    for test in [*vars(test_faults).values(), *vars(test_faults_by_use).values()]:
        for mark in getattr(test, "pytestmark", ()):
            if mark.name == "parametrize" and mark.args[0] == "cell":
                for parameter in mark.args[1]:
                    fault, kind = parameter.values[0]
                    tested.setdefault(fault, set()).add(kind)
    listed: dict[str, set[str]] = {}
    for line in (REPOSITORY / "docs" / "guides" / "transport.md").read_text().splitlines():
        entries = [entry.strip() for entry in line.strip("|").split("|")]
        if len(entries) == 5 and entries[0].startswith("`"):
            fault, memory, shm, queue, reason = entries
            listed[fault.strip("`")] = {kind for kind, ran in (("memory", memory), ("shm", shm)) if ran == "yes"} | {
                kind for kind in TQ if queue in ("yes", kind.removeprefix("tq-"))
            }
            assert reason or "–" not in entries, f"{fault}: a gap without a reason"
    assert listed == tested


def test_every_cell_ran(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    """Reports how many fault × transport cells ran, and fails when fewer did than there are."""
    chosen = [item for item in request.session.items if "arena" in getattr(item, "fixturenames", ())]
    with capsys.disabled():
        print(f"\nfault × transport cells: {len(CELLS)} of {EXPECTED_CELLS} ran", file=sys.stderr)
    assert len(CELLS) == len(chosen)
    if request.config.option.markexpr in ("", "not full and not gpu") and not request.config.option.keyword:
        assert len(CELLS) == EXPECTED_CELLS
