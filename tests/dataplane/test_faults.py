"""What is lost when something dies: real processes, real SIGKILL, every fault against every transport it applies to.

Each test records its cell (fault × transport) when it has passed; the last one fails when cells are missing, so that a
fault that silently stopped being tested is seen. Threads cannot be killed, so some cells do not exist for memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from spanwise.dataplane import (
    CapacityExceeded,
    ClaimTimeout,
    DataPlaneClient,
    FieldNotReady,
    GetTimeout,
    PartitionConflict,
    PartitionExhausted,
    PutTimeout,
    SampleNotFound,
    TransportDown,
)
from spanwise.dataplane.transports.shared_memory import ROOT
from tests.dataplane.conftest import QUEUE_ROWS, PlaneUnderTest, QueueKeeper, make_plane
from tests.dataplane.victim import rollout

pytestmark = pytest.mark.xdist_group("ray")  # one worker: the cells are counted in one process
REPOSITORY = Path(__file__).resolve().parents[2]
EXPECTED_CELLS = 47
CELLS: set[str] = set()

TQ = ["tq-columns", "tq-frame"]
Spawn = Callable[..., subprocess.Popen[str]]


def cells(fault: str, *kinds: str) -> pytest.MarkDecorator:
    """Run a test once per transport named."""
    params = [
        pytest.param((fault, kind), marks=pytest.mark.ray if kind in TQ else (), id=f"{fault}-{kind}") for kind in kinds
    ]
    return pytest.mark.parametrize("cell", params)


@pytest.fixture
def arena(cell: tuple[str, str], request: pytest.FixtureRequest) -> Iterator[PlaneUnderTest]:
    """The plane of the cell; records the cell when its test passes."""
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


@cells("duplicate-put", "memory", "shm", *TQ)
def test_putting_twice_replaces_and_keeps_the_cursor(arena: PlaneUnderTest, cell: tuple[str, str]) -> None:
    client, name = prepared(arena)
    client.put_samples(["a", "b"], name, rollout())
    assert client.claim_meta(name, "train", ["ids"], 2) is not None
    client.put_samples(["a", "b"], name, rollout())
    client.put_samples(["a", "b"], name, {"reward": torch.tensor([5.0, 6.0])})
    with pytest.raises(PartitionExhausted):
        client.claim_meta(name, "train", ["ids"], 1)
    got = client.get_samples(["b", "a"], name, ["ids", "reward"])
    assert got["reward"].tolist() == [6, 5]
    assert got["ids"].values().tolist() == [1] * 4
    passed(cell)


@cells("partial-fetch", "memory", "shm", *TQ)
def test_a_partial_fetch_is_refused_whole(arena: PlaneUnderTest, cell: tuple[str, str]) -> None:
    client, name = prepared(arena)
    client.put_samples(["a", "b"], name, {"reward": torch.ones(2)})
    client.put_samples(["b"], name, {"ids": _one_row()})
    with pytest.raises(FieldNotReady) as error:
        client.get_samples(["a", "b"], name, ["reward", "ids"])
    assert error.value.missing == {"a": ["ids"]}
    assert client.claim_meta(name, "train", ["ids", "reward"], 2, blocking=False) is None
    passed(cell)


def _one_row() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, dtype=torch.int64)], layout=torch.jagged)


@cells("capacity-block", "memory", "shm")
def test_a_full_plane_blocks_until_there_is_room(arena: PlaneUnderTest, cell: tuple[str, str]) -> None:
    client = arena.open(max_bytes=100_000)
    name = arena.partition()
    client.register_partition(name, ["reward"], 10, ["train"])
    column = {"reward": torch.ones(1, 15_000)}
    client.put_samples(["a"], name, column)
    before = client.stats()
    started = time.monotonic()
    with pytest.raises(PutTimeout):
        client.put_samples(["b"], name, column, timeout_s=0.3)
    assert time.monotonic() - started < 10
    with pytest.raises(CapacityExceeded):
        client.put_samples(["b", "c"], name, {"reward": torch.ones(2, 15_000)})
    assert client.stats() == before
    waiter = threading.Thread(target=lambda: client.put_samples(["b"], name, column, timeout_s=30))
    waiter.start()
    time.sleep(0.1)
    client.clear_samples(["a"], name)
    waiter.join(30)
    assert client.get_samples(["b"], name, ["reward"])["reward"].shape == (1, 15_000)
    with pytest.raises(PartitionConflict):
        arena.open(max_bytes=5)
    passed(cell)


@cells("capacity-raise", "memory", "shm")
def test_a_full_plane_raises_when_asked_to(arena: PlaneUnderTest, cell: tuple[str, str]) -> None:
    client = arena.open(max_rows=2, when_full="raise")
    name = arena.partition()
    client.register_partition(name, ["ids", "reward"], 10, ["train"])
    client.put_samples(["a", "b"], name, rollout())
    before = client.stats()
    with pytest.raises(CapacityExceeded):
        client.put_samples(["c"], name, {"reward": torch.ones(1)})
    assert client.stats() == before
    client.put_samples(["a"], name, {"reward": torch.zeros(1)})
    passed(cell)


@cells("capacity-raise", *TQ)
def test_a_full_queue_raises_and_keeps_no_phantom_keys(arena: PlaneUnderTest, cell: tuple[str, str]) -> None:
    client, name = prepared(arena, 2 * QUEUE_ROWS)
    ids = [f"s{i}" for i in range(QUEUE_ROWS + 1)]
    with pytest.raises(CapacityExceeded):
        client.put_samples(ids, name, {"reward": torch.ones(len(ids))})
    assert client.stats()["partitions"][name]["samples"] == 0
    assert client.claim_meta(name, "train", ["reward"], 1, blocking=False) is None
    client.put_samples(ids[:2], name, {"reward": torch.ones(2)})
    with pytest.raises(CapacityExceeded):
        client.put_samples(ids[2:], name, {"reward": torch.ones(len(ids) - 2)})
    assert client.stats()["partitions"][name]["samples"] == 2
    client.put_samples(ids[:2], name, {"ids": rollout()["ids"]})
    assert client.get_samples(ids[:2], name, ["reward"])["reward"].tolist() == [1, 1]
    client.clear_samples(None, name)
    passed(cell)


@cells("slow-reader", "memory", "shm")
def test_a_fast_writer_cannot_outrun_memory(arena: PlaneUnderTest, cell: tuple[str, str]) -> None:
    limit = 300_000
    client = arena.open(max_bytes=limit)
    name = arena.partition()
    client.register_partition(name, ["reward"], 40, ["train"])
    most = 0

    def write() -> None:
        for i in range(40):
            client.put_samples([f"s{i}"], name, {"reward": torch.full((1, 15_000), float(i))}, timeout_s=60)

    writer = threading.Thread(target=write)
    writer.start()
    seen: list[float] = []
    while len(seen) < 40:
        meta = client.claim_meta(name, "train", ["reward"], 1, timeout_s=60)
        assert meta is not None
        most = max(most, client.stats()["bytes"])
        seen.append(float(client.get_data(meta)["reward"][0, 0]))
        client.clear_samples(meta.ids, name)
    writer.join()
    assert seen == [float(i) for i in range(40)]
    assert 0 < most <= limit
    passed(cell)


@cells("slow-reader", *TQ)
def test_a_fast_writer_is_refused_until_the_queue_is_read(arena: PlaneUnderTest, cell: tuple[str, str]) -> None:
    """The queue refuses and does not wait: a writer that tries again never has more than max_rows samples in it."""
    each, rounds = QUEUE_ROWS // 3, 5
    client, name = prepared(arena, each * rounds)
    refused, held, most = threading.Event(), 0, 0
    count = threading.Lock()

    def write() -> None:
        nonlocal held, most
        for start in range(0, each * rounds, each):
            ids = [f"s{i}" for i in range(start, start + each)]
            while True:
                try:
                    client.put_samples(ids, name, {"reward": torch.ones(each)})
                    break
                except CapacityExceeded:
                    refused.set()
                    time.sleep(0.05)
            with count:
                held += each
                most = max(most, held)

    writer = threading.Thread(target=write)
    writer.start()
    assert refused.wait(60)
    for _ in range(rounds):
        meta = client.claim_meta(name, "train", ["reward"], each, timeout_s=60)
        assert meta is not None
        assert int(client.get_data(meta)["reward"].sum()) == each
        with count:
            held -= each
        client.clear_samples(meta.ids, name)
    writer.join(60)
    assert client.check_consumption_status(name, ["train"])
    assert 0 < most <= QUEUE_ROWS
    passed(cell)


@cells("late-claim", *TQ)
def test_a_claimer_that_times_out_and_tries_again_loses_nothing(
    arena: PlaneUnderTest, monkeypatch: pytest.MonkeyPatch, cell: tuple[str, str]
) -> None:
    """The controller consumes what a claim asks for, whether or not the claimer still waits for its answer."""
    samples = 16
    client, name = prepared(arena, samples)
    writing = arena.open()

    def dribble() -> None:
        for i in range(samples):
            writing.put_samples([f"s{i}"], name, {"reward": torch.ones(1)})
            time.sleep(0.03)

    writer = threading.Thread(target=dribble)
    queue = client.process.client
    answers = {"get_meta": queue.get_meta, "kv_retrieve_keys": queue.kv_retrieve_keys}
    delays = cycle([0.0, 0.15])
    for method, answer in answers.items():  # every other answer comes when the deadline has passed

        def late(*arguments: Any, answer: Any = answer, **named: Any) -> Any:
            found = answer(*arguments, **named)
            time.sleep(next(delays))
            return found

        monkeypatch.setattr(queue, method, late)
    writer.start()
    had: list[str] = []
    late_answers = 0
    until = time.monotonic() + 60
    while time.monotonic() < until:
        asked = time.monotonic()
        try:
            meta = client.claim_meta(name, "train", ["reward"], 1, timeout_s=0.1)
        except ClaimTimeout:
            meta = None
        except PartitionExhausted:
            break
        late_answers += time.monotonic() - asked > 0.1
        had += meta.ids if meta else []
    writer.join()
    assert sorted(had) == sorted(f"s{i}" for i in range(samples))
    assert late_answers > 0
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
    client.put_samples(["a", "b"], name, rollout())
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


def test_the_guide_lists_every_cell() -> None:
    """The table of docs/guides/transport.md says the same as the tests do, or gives a reason for a gap."""
    tested: dict[str, set[str]] = {}
    for test in globals().values():
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
