"""The planes that the conformance and fault suites run against."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spanwise.dataplane import DataPlaneClient, open_client
from tests.dataplane.samples import FIELDS
from tests.ray_cluster import RayCluster

REPOSITORY = Path(__file__).resolve().parents[2]
QUEUE_ROWS = 6000
Spawn = Callable[..., subprocess.Popen[str]]


@dataclass
class PlaneUnderTest:
    """One plane that several parties open; ``kind`` is memory, shm, tq-columns or tq-frame."""

    kind: str
    url: str
    options: dict[str, Any] = field(default_factory=dict)
    clients: list[DataPlaneClient] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def open(self, **options: Any) -> DataPlaneClient:
        client = open_client(self.url, **{**self.options, **options})
        self.clients.append(client)
        return client

    @property
    def has_leases(self) -> bool:
        return not self.kind.startswith("tq")

    def partition(self) -> str:
        """A name nobody used before: the queue outlives a test."""
        return f"p-{uuid.uuid4().hex[:12]}"


class QueueKeeper:
    """Keeps one queue running for the tests of a session, and starts it again after a test has killed it."""

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster
        self.client: DataPlaneClient | None = None

    def running(self) -> DataPlaneClient:
        if self.client is None:
            self.client = open_client("tq://auto", max_rows=QUEUE_ROWS)
        return self.client

    def stop(self) -> None:
        if self.client is not None:
            self.client.close()
        self.client = None


@pytest.fixture(scope="session")
def queue_keeper(ray_cluster: RayCluster) -> Iterator[QueueKeeper]:
    keeper = QueueKeeper(ray_cluster)
    yield keeper
    keeper.stop()


RAY = [pytest.mark.ray, pytest.mark.xdist_group("ray")]
KINDS = ["memory", "shm", pytest.param("tq-columns", marks=RAY), pytest.param("tq-frame", marks=RAY)]


@pytest.fixture(params=KINDS)
def plane(request: pytest.FixtureRequest) -> Iterator[PlaneUnderTest]:
    yield from make_plane(request.param, request)


def make_plane(kind: str, request: pytest.FixtureRequest) -> Iterator[PlaneUnderTest]:
    scheme, _, layout = kind.partition("-")
    if scheme == "tq":
        keeper = request.getfixturevalue("queue_keeper")
        keeper.running()
        # "auto" here; the frame layout's other processes name the cluster that they join.
        url = "tq://auto" if layout == "columns" else f"tq://{keeper.cluster.address}"
        built = PlaneUnderTest(kind, url, {"layout": layout}, environment=keeper.cluster.environment)
    else:
        built = PlaneUnderTest(kind, f"{scheme}://{uuid.uuid4().hex}")
    yield built
    for client in built.clients:
        client.close()


@pytest.fixture
def ready(plane: PlaneUnderTest) -> tuple[DataPlaneClient, str]:
    """A client and a registered, empty partition of four samples with two tasks."""
    client, name = plane.open(), plane.partition()
    client.register_partition(name, FIELDS, 4, ["train", "score"])
    return client, name


@pytest.fixture
def arena(cell: tuple[str, str], request: pytest.FixtureRequest) -> Iterator[PlaneUnderTest]:
    """The plane that a cell (fault, transport) names."""
    yield from make_plane(cell[1], request)


@pytest.fixture
def spawn(arena: PlaneUnderTest) -> Iterator[Spawn]:
    """Start a victim on the same plane; whatever is left is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(role: str, partition: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "tests.dataplane.victim",
            role,
            arena.url,
            arena.options.get("layout", ""),
            partition,
        ]
        victim = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", **arena.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        started.append(victim)
        return victim

    yield start
    for victim in started:
        if victim.poll() is None:
            victim.kill()
        victim.communicate()
