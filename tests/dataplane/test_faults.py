"""What is lost when something dies: real processes, real SIGKILL, every fault against every transport it applies to."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spanwise.dataplane import (
    FieldNotReady,
    GetTimeout,
    PartitionExhausted,
    PutTimeout,
    SampleNotFound,
    TransportDown,
)
from spanwise.dataplane.transports.shared_memory import ROOT
from tests.dataplane.conftest import PlaneUnderTest, QueueKeeper, Spawn
from tests.dataplane.faults import TQ, cells, kill, passed, prepared, ready, shm_files
from tests.dataplane.victim import rollout

pytestmark = pytest.mark.xdist_group("ray")  # one worker: the cells are counted in one process


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param((point, kind), marks=pytest.mark.ray if kind in TQ else (), id=f"{point}-{kind}")
        for point, kinds in {
            "before-data": ["shm", *TQ],
            "after-data": ["shm"],
            "before-publish": ["shm", *TQ],
        }.items()
        for kind in kinds
    ],
)
def test_a_writer_killed_in_a_put_leaves_all_or_nothing(
    arena: PlaneUnderTest, spawn: Spawn, cell: tuple[str, str]
) -> None:
    client, name = prepared(arena)
    victim = spawn(cell[0], name)
    assert victim.wait(120) == -signal.SIGKILL
    with pytest.raises((SampleNotFound, FieldNotReady)):
        client.get_samples(["a", "b"], name, ["ids"])
    assert client.claim_meta(name, "train", ["ids"], 1, blocking=False) is None
    client.put_samples(["a", "b"], name, rollout())
    meta = client.claim_meta(name, "train", ["ids", "reward"], 2)
    assert meta is not None
    assert sorted(meta.ids) == ["a", "b"]
    assert client.get_data(meta)["ids"].values().tolist() == [1] * 4
    if cell[1] == "shm":
        client.clear_samples(None, name)
        assert shm_files(arena) == ["index", "lock"]
        assert client.stats()["bytes"] == 0
    passed(cell)


@cells("reader-killed", "shm", *TQ)
def test_a_reader_killed_with_a_view_harms_nobody(arena: PlaneUnderTest, spawn: Spawn, cell: tuple[str, str]) -> None:
    client, name = prepared(arena)
    client.put_samples(["a", "b"], name, rollout())
    victim = spawn("hold-view", name)
    assert ready(victim) == "4"
    mine = client.get_samples(["a", "b"], name, ["ids"])["ids"]
    kill(victim)
    client.clear_samples(["a", "b"], name)
    assert mine.values().tolist() == [1] * 4
    with pytest.raises(SampleNotFound):
        client.get_samples(["a"], name, ["ids"])
    client.put_samples(["a"], name, {"reward": torch.ones(1)})
    passed(cell)


@cells("claimer-killed", "shm")
def test_a_killed_claimers_lease_returns_its_samples(
    arena: PlaneUnderTest, spawn: Spawn, cell: tuple[str, str]
) -> None:
    client, name = prepared(arena)
    client.put_samples(["a", "b"], name, rollout())
    victim = spawn("hold-claim", name)
    assert json.loads(ready(victim)) == ["a", "b"]
    kill(victim)
    meta = client.claim_meta(name, "train", ["ids"], 2, timeout_s=30, lease_s=30)
    assert meta is not None
    assert meta.ids == ["a", "b"]
    client.ack(meta)
    assert client.check_consumption_status(name, ["train"])
    passed(cell)


@cells("claimer-gone", "memory")
def test_a_thread_that_never_acknowledges_loses_its_lease(arena: PlaneUnderTest, cell: tuple[str, str]) -> None:
    client, name = prepared(arena)
    client.put_samples(["a", "b"], name, rollout())
    worker = threading.Thread(target=lambda: client.claim_meta(name, "train", ["ids"], 2, lease_s=0.2))
    worker.start()
    worker.join()
    meta = client.claim_meta(name, "train", ["ids"], 2, timeout_s=30)
    assert meta is not None
    assert meta.ids == ["a", "b"]
    passed(cell)


@cells("exactly-once", "shm", *TQ)
def test_four_processes_claim_a_thousand_samples_exactly_once(
    arena: PlaneUnderTest, spawn: Spawn, cell: tuple[str, str]
) -> None:
    client, name = prepared(arena, 1000)
    claimers = [spawn("claim", name) for _ in range(4)]
    for claimer in claimers:
        ready(claimer)
    for claimer in claimers:
        assert claimer.stdin is not None
        claimer.stdin.write("go\n")
        claimer.stdin.flush()
    for start in range(0, 1000, 100):
        client.put_samples([f"s{i}" for i in range(start, start + 100)], name, {"reward": torch.ones(100)})
    had: list[str] = []
    for claimer in claimers:
        out, _ = claimer.communicate(timeout=120)
        assert claimer.returncode == 0
        had += json.loads(out)
    assert len(had) == 1000
    assert len(set(had)) == 1000
    passed(cell)


@cells("exactly-once", "memory")
def test_four_threads_claim_a_thousand_samples_exactly_once(arena: PlaneUnderTest, cell: tuple[str, str]) -> None:
    client, name = prepared(arena, 1000)
    had: list[str] = []

    def claim() -> None:
        mine = arena.open()
        while True:
            try:
                meta = mine.claim_meta(name, "train", ["reward"], 7, timeout_s=60)
            except PartitionExhausted:
                return
            assert meta is not None
            had.extend(meta.ids)

    claimers = [threading.Thread(target=claim) for _ in range(4)]
    for claimer in claimers:
        claimer.start()
    for start in range(0, 1000, 100):
        client.put_samples([f"s{i}" for i in range(start, start + 100)], name, {"reward": torch.ones(100)})
    for claimer in claimers:
        claimer.join()
    assert len(had) == len(set(had)) == 1000
    passed(cell)


@cells("lock-holder-killed", "shm")
def test_the_kernel_frees_the_lock_of_a_dead_holder(arena: PlaneUnderTest, spawn: Spawn, cell: tuple[str, str]) -> None:
    client, name = prepared(arena)
    victim = spawn("hold-lock", name)
    ready(victim)
    with pytest.raises(GetTimeout):
        client.get_samples(["a"], name, ["ids"], timeout_s=0.2)
    with pytest.raises(PutTimeout):
        client.put_samples(["a", "b"], name, rollout(), timeout_s=0.2)
    kill(victim)
    client.put_samples(["a", "b"], name, rollout(), timeout_s=5)  # its child lives on for longer
    assert client.get_samples(["a"], name, ["reward"])["reward"].tolist() == [1]
    passed(cell)


@cells("all-killed", "shm")
def test_a_plane_whose_clients_all_died_is_swept(arena: PlaneUnderTest, spawn: Spawn, cell: tuple[str, str]) -> None:
    other = spawn("stay", "-")
    ready(other)
    client, name = prepared(arena)
    client.put_samples(["a", "b"], name, rollout())
    orphan = Path(ROOT / f"spanwise-{os.getuid()}-{arena.url.removeprefix('shm://')}") / "seg-1-gone"
    orphan.write_bytes(b"left behind")
    client.close()
    kill(other)
    fresh = arena.open()
    assert fresh.stats()["partitions"] == {}
    assert shm_files(arena) == ["index", "lock"]
    fresh.close()
    assert shm_files(arena) == []
    passed(cell)


@cells("plane-removed", "shm")
def test_a_plane_that_vanished_is_down(arena: PlaneUnderTest, cell: tuple[str, str]) -> None:
    import shutil

    client, name = prepared(arena)
    shutil.rmtree(ROOT / f"spanwise-{os.getuid()}-{arena.url.removeprefix('shm://')}")
    with pytest.raises(TransportDown):
        client.put_samples(["a", "b"], name, rollout())
    client.close()
    passed(cell)


@cells("close-in-a-worker", "shm", *TQ)
def test_a_worker_that_closes_leaves_the_others_working(
    arena: PlaneUnderTest, spawn: Spawn, cell: tuple[str, str]
) -> None:
    client, name = prepared(arena)
    worker = spawn("close", name)
    ready(worker)
    assert worker.wait(60) == 0
    assert client.get_samples(["w"], name, ["reward"])["reward"].tolist() == [1]
    client.put_samples(["a"], name, {"reward": torch.ones(1)})
    passed(cell)


@cells("close-in-a-worker", "memory")
def test_a_thread_that_closes_leaves_the_others_working(arena: PlaneUnderTest, cell: tuple[str, str]) -> None:
    client, name = prepared(arena)
    other = arena.open()
    other.put_samples(["w"], name, {"reward": torch.ones(1)})
    other.close()
    other.close()
    assert client.get_samples(["w"], name, ["reward"])["reward"].tolist() == [1]
    passed(cell)


@cells("last-close", "shm")
def test_nothing_is_left_in_shared_memory(arena: PlaneUnderTest, cell: tuple[str, str]) -> None:
    client, name = prepared(arena)
    other = arena.open()
    client.put_samples(["a", "b"], name, rollout())
    view = other.get_samples(["a", "b"], name, ["ids"])["ids"]
    client.close()
    assert shm_files(arena) != []
    other.close()
    assert shm_files(arena) == []
    assert view.values().tolist() == [1] * 4
    passed(cell)


def kill_actors(actors: list[Any]) -> None:
    """SIGKILL to the processes of Ray actors, and wait until the kernel has no such processes any more (they are
    children of Ray's, whose exit status only Ray can read)."""
    import ray

    victims = [ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30) for actor in actors]
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    until = time.monotonic() + 30
    while any(Path(f"/proc/{victim}").exists() for victim in victims):
        assert time.monotonic() < until, f"{victims} live on after SIGKILL"
        time.sleep(0.01)


@cells("storage-killed", *TQ)
def test_a_killed_storage_unit_is_down_within_the_deadline(
    arena: PlaneUnderTest, queue_keeper: QueueKeeper, cell: tuple[str, str]
) -> None:
    client, name = prepared(arena)
    client.put_samples(["a", "b"], name, rollout())
    kill_actors(list(client.process.interface._TQ_STORAGE["SimpleStorage"].values()))
    calls: list[Callable[[], Any]] = [
        lambda: client.get_samples(["a", "b"], name, ["ids"], timeout_s=15),
        lambda: client.put_samples(["a", "b"], name, rollout(), timeout_s=15),
    ]
    down_then_up_again(calls, arena, queue_keeper, client, name)
    passed(cell)


@cells("controller-killed", "tq-frame")  # both layouts ask it in the same words
def test_a_killed_controller_is_down_within_the_deadline(
    arena: PlaneUnderTest, queue_keeper: QueueKeeper, cell: tuple[str, str]
) -> None:
    client, name = prepared(arena)
    client.put_samples(["a", "b"], name, rollout())
    kill_actors([client.process.interface._TQ_CONTROLLER])
    calls: list[Callable[[], Any]] = [
        lambda: client.get_samples(["a", "b"], name, ["ids"], timeout_s=15),
        lambda: client.put_samples(["a", "b"], name, rollout(), timeout_s=15),
        lambda: client.claim_meta(name, "train", ["ids"], 1, timeout_s=5),
    ]
    down_then_up_again(calls, arena, queue_keeper, client, name)
    passed(cell)


def down_then_up_again(
    calls: list[Callable[[], Any]], arena: PlaneUnderTest, queue_keeper: QueueKeeper, client: Any, name: str
) -> None:
    """Every call is TransportDown, together within 30 s; a queue that is started again takes the samples again."""
    started = time.monotonic()
    for call in calls:
        with pytest.raises(TransportDown):
            call()
    assert time.monotonic() - started < 30
    client.close()
    queue_keeper.stop()
    queue_keeper.running()
    again = arena.open()
    again.register_partition(name, ["ids", "reward"], 2, ["train"])
    again.put_samples(["a", "b"], name, rollout())
    assert again.get_samples(["a"], name, ["ids"])["ids"].values().tolist() == [1, 1, 1]
