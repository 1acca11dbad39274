"""What is lost when a plane is used badly: put twice, read early, filled, outrun, damaged. Deaths: test_faults.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch

from spanwise.dataplane import (
    CapacityExceeded,
    ClaimTimeout,
    CorruptFrame,
    DataPlaneError,
    FieldNotReady,
    PartitionConflict,
    PartitionExhausted,
    PartitionNotFound,
    PutTimeout,
    SampleConflict,
    SampleNotFound,
    SchemaMismatch,
    TaskNotFound,
)
from spanwise.dataplane.frame_writer import FrameWriter
from tests.dataplane.conftest import QUEUE_ROWS, PlaneUnderTest
from tests.dataplane.faults import TQ, cells, passed, prepared
from tests.dataplane.victim import rollout

pytestmark = pytest.mark.xdist_group("ray")  # one worker: the cells are counted in one process


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


@cells("one-id-twice", "memory", "shm", *TQ)
def test_one_id_twice_in_a_put_is_refused(arena: PlaneUnderTest, cell: tuple[str, str]) -> None:
    client, name = prepared(arena)
    for columns in (rollout(), {"reward": torch.tensor([1.0, 2.0])}):
        with pytest.raises(SampleConflict, match="twice"):
            client.put_samples(["a", "a"], name, columns)
    assert client.stats()["partitions"][name]["samples"] == 0
    client.put_samples(["a", "b"], name, rollout())
    assert sorted(client.claim_meta(name, "train", ["ids"], 2).ids) == ["a", "b"]
    passed(cell)


@cells("unknown-names", "memory", "shm", *TQ)
def test_unknown_partitions_tasks_samples_and_fields_are_named_at_once(
    arena: PlaneUnderTest, cell: tuple[str, str]
) -> None:
    client, name = prepared(arena)
    client.put_samples(["a"], name, {"reward": torch.ones(1)})
    calls: list[tuple[type[DataPlaneError], Callable[[], Any]]] = [
        (PartitionNotFound, lambda: client.claim_meta("nowhere", "train", ["ids"], 1)),
        (PartitionNotFound, lambda: client.put_samples(["a"], "nowhere", {"reward": torch.ones(1)})),
        (TaskNotFound, lambda: client.claim_meta(name, "nobody", ["ids"], 1)),
        (SchemaMismatch, lambda: client.claim_meta(name, "train", ["idz"], 1)),
        (SchemaMismatch, lambda: client.put_samples(["a"], name, {"idz": torch.ones(1)})),
        (SampleNotFound, lambda: client.get_samples(["z"], name, ["reward"])),
        (FieldNotReady, lambda: client.get_samples(["a"], name, ["idz"])),
    ]
    started = time.monotonic()
    for error, call in calls:
        with pytest.raises(error):
            call()
    assert time.monotonic() - started < 30
    assert client.stats()["partitions"][name]["samples"] == 1
    passed(cell)


@cells("damaged-frame", "memory", "shm", "tq-frame")
def test_a_damaged_frame_is_named_and_a_new_put_heals(
    arena: PlaneUnderTest, monkeypatch: pytest.MonkeyPatch, cell: tuple[str, str]
) -> None:
    client, name = prepared(arena)
    with monkeypatch.context() as patched:
        whole = FrameWriter._build

        def damaged(writer: FrameWriter) -> bytes:
            header = bytearray(whole(writer))
            writer.pieces = [memoryview(bytes(len(piece))) for piece in writer.pieces]  # what a lost page reads as
            return bytes(header)

        patched.setattr(FrameWriter, "_build", damaged)
        client.put_samples(["a", "b"], name, rollout())
    with pytest.raises(CorruptFrame, match="Fix: write the samples again"):
        client.get_samples(["a", "b"], name, ["ids"])
    client.put_samples(["a", "b"], name, rollout())
    assert client.get_samples(["a", "b"], name, ["ids"])["ids"].values().tolist() == [1] * 4
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
