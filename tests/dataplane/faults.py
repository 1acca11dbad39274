"""What the fault suites share: the cells (fault × transport) that ran, and processes that may be killed.

A test records its cell when it has passed; test_faults_counted.py comes last and fails when cells are missing, so that
a fault that silently stopped being tested is seen. Threads cannot be killed, so some cells do not exist for memory.
"""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from spanwise.dataplane import DataPlaneClient
from spanwise.dataplane.transports.shared_memory import ROOT
from tests.dataplane.conftest import PlaneUnderTest

CELLS: set[str] = set()

TQ = ["tq-columns", "tq-frame"]


def cells(fault: str, *kinds: str) -> pytest.MarkDecorator:
    """Run a test once per transport named."""
    params = [
        pytest.param((fault, kind), marks=pytest.mark.ray if kind in TQ else (), id=f"{fault}-{kind}") for kind in kinds
    ]
    return pytest.mark.parametrize("cell", params)


def ready(victim: subprocess.Popen[str]) -> str:
    """Wait for the victim's word, and return what it said."""
    assert victim.stdout is not None
    for line in victim.stdout:
        if line.startswith("READY"):
            return line.removeprefix("READY").strip()
    raise AssertionError(f"the victim died early, with {victim.wait()}")


def kill(victim: subprocess.Popen[str]) -> None:
    victim.kill()
    assert victim.wait(30) == -signal.SIGKILL


def prepared(plane: PlaneUnderTest, samples: int = 2) -> tuple[DataPlaneClient, str]:
    client, name = plane.open(), plane.partition()
    client.register_partition(name, ["ids", "reward"], samples, ["train"])
    return client, name


def passed(cell: tuple[str, str]) -> None:
    CELLS.add(" × ".join(cell))


def shm_files(plane: PlaneUnderTest) -> list[str]:
    name = plane.url.removeprefix("shm://")
    return sorted(path.name for path in (ROOT / f"spanwise-{os.getuid()}-{name}").glob("*"))
