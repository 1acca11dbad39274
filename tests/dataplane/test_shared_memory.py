"""``shm://`` alone: forks, the log and its compaction, a full /dev/shm, a damaged index, an interrupted client."""

from __future__ import annotations

import itertools
import os
import random
import re
import resource
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from spanwise.dataplane import (
    BatchMeta,
    CapacityExceeded,
    ClientClosed,
    DataPlaneClient,
    DataPlaneError,
    TransportDown,
    materialize,
    open_client,
)
from spanwise.dataplane.transports import shared_log, shared_memory
from tests.dataplane.samples import ragged


def test_a_client_does_not_survive_a_fork() -> None:
    client = open_client(f"shm://{uuid.uuid4().hex}")
    child = os.fork()
    if child == 0:
        try:
            client.stats()
        except ClientClosed:
            client.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert client.stats()["rows"] == 0
    client.close()


def test_nobody_else_may_look() -> None:
    client = open_client(f"shm://{uuid.uuid4().hex}")
    client.register_partition("p", ["x"], 1, ["t"])
    client.put_samples(["a"], "p", {"x": torch.ones(1)})
    modes = {path.stat().st_mode & 0o777 for path in client.plane.folder.iterdir()}
    assert (client.plane.folder.stat().st_mode & 0o777, modes) == (0o700, {0o600})
    client.close()


def test_the_log_is_compacted_and_late_comers_read_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_log, "COMPACT_BYTES", 2000)
    url = f"shm://{uuid.uuid4().hex}"
    client, other = open_client(url), open_client(url)
    for plane in (client.plane, other.plane):
        plane.log.compact_at = 2000
    client.register_partition("p", ["reward"], 1000, ["t"])
    for round_number in range(60):
        client.put_samples(
            ["a", "b"], "p", {"reward": torch.full((2,), float(round_number))}, [{"r": round_number}] * 2
        )
        if round_number % 20 == 10:
            assert other.get_samples(["b"], "p", ["reward"])["reward"].tolist() == [float(round_number)]
    assert other.claim_meta("p", "t", ["reward"], 1, lease_s=60.0) is not None
    for _ in range(60):
        client.put_samples(["c"], "p", {"reward": torch.zeros(1)})
    assert client.plane.log.position < 20_000
    late = open_client(url)
    assert late.get_samples(["a"], "p", ["reward"])["reward"].tolist() == [59.0]
    assert late.stats() == client.stats() == other.stats()
    assert late.stats()["partitions"]["p"]["tasks"]["t"]["leased"] == 1
    for each in (client, other, late):
        each.close()
    assert not client.plane.folder.exists()


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """No file of this process may grow beyond ``size`` bytes: writes stop there as they do where a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def put_until_refused(client: DataPlaneClient) -> tuple[int, CapacityExceeded]:
    """How many samples found room, and what the next one was told."""
    for put in itertools.count():
        try:
            client.put_samples([f"s{put}"], "p", {"x": torch.ones(1)}, [{"note": "n" * 100}])
        except CapacityExceeded as refusal:
            return put, refusal
    raise AssertionError("the counter does not end")


def test_a_full_shared_memory_refuses_puts_and_stays_usable() -> None:
    url = f"shm://{uuid.uuid4().hex}"
    client, other = open_client(url), open_client(url)
    client.register_partition("p", ["x", "y"], 10_000, ["t"])
    index = client.plane.folder / "index"
    with files_end_at(index.stat().st_size):
        put, refusal = put_until_refused(client)
        assert re.search(r"no room for .* of the index .*Fix: clear samples", str(refusal))
        with pytest.raises(CapacityExceeded):
            client.register_partition("q" * shared_log.RESERVE_BYTES, ["x"], 1, ["t"])
        with pytest.raises(CapacityExceeded):
            client.put_samples(["large"], "p", {"y": torch.ones(1, index.stat().st_size)})
        assert other.stats() == client.stats()
        assert client.stats()["rows"] == put > 0
        assert len(list(client.plane.folder.glob("seg-*"))) == put
        assert not list(client.plane.folder.glob("new-*"))
        client.clear_samples([f"s{place}" for place in range(put)], "p")  # what frees something finds its room
        assert other.stats()["rows"] == 0
    other.put_samples(["again"], "p", {"x": torch.ones(1)})
    assert client.get_samples(["again"], "p", ["x"])["x"].tolist() == [1.0]
    other.close()
    client.close()
    assert not client.plane.folder.exists()


def test_a_record_that_is_cut_short_is_not_published() -> None:
    url = f"shm://{uuid.uuid4().hex}"
    client, other = open_client(url), open_client(url)
    client.register_partition("p", ["x"], 1, ["t"])
    client.put_samples(["a"], "p", {"x": torch.ones(1)})
    with files_end_at(client.plane.log.position + 10), pytest.raises(CapacityExceeded, match="nothing was changed"):
        client.clear_samples(["a"], "p")
    with files_end_at(client.plane.log.position + 10):
        other.close()  # without room for its last word, which only its process's end can say now
    assert client.get_samples(["a"], "p", ["x"])["x"].tolist() == [1.0]
    client.clear_samples(["a"], "p")
    late = open_client(url)
    assert late.stats() == client.stats()
    for each in (late, client):
        each.close()
    shutil.rmtree(client.plane.folder)


def test_a_full_shared_memory_refuses_a_new_plane_and_leaves_nothing() -> None:
    name = uuid.uuid4().hex
    for size in (0, shared_log.HEAD_BYTES):
        with files_end_at(size), pytest.raises(CapacityExceeded, match="no room"):
            open_client(f"shm://{name}")
        assert not (shared_memory.ROOT / f"spanwise-{os.getuid()}-{name}").exists()


def test_a_log_that_cannot_be_compacted_grows_on() -> None:
    client = open_client(f"shm://{uuid.uuid4().hex}")
    client.register_partition("p", ["x"], 1000, ["t"])
    for place in range(100):
        client.put_samples([f"s{place}"], "p", {"x": torch.ones(1)})
    log = client.plane.log
    log.compact, kept = lambda: log.begin(["x" * 10**6]), log.compact
    log.compact_at = 1
    with files_end_at((client.plane.folder / "index").stat().st_size):
        client.put_samples(["last"], "p", {"x": torch.ones(1)})
    log.compact = kept
    assert client.get_samples(["last"], "p", ["x"])["x"].tolist() == [1.0]
    assert not (client.plane.folder / "index.new").exists()
    client.close()


@pytest.mark.parametrize(
    "damage", ["a record", "its size", "the magic", "cut short", "a length beyond the end", "a length before the start"]
)
def test_a_damaged_index_is_down_and_says_where_it_lies(damage: str) -> None:
    url = f"shm://{uuid.uuid4().hex}"
    client, other = open_client(url), open_client(url)
    client.register_partition("p", ["x"], 1, ["t"])
    index = client.plane.folder / "index"
    whole, committed = index.read_bytes(), client.plane.log.position
    damaged = {
        "a record": whole[: committed - 3] + b"\xff" + whole[committed - 2 :],
        "its size": whole[: shared_log.HEAD_BYTES] + b"\xff" * 4 + whole[shared_log.HEAD_BYTES + 4 :],
        "the magic": b"?" + whole[1:],
        "cut short": whole[:30],
        "a length beyond the end": whole[:8] + (2**62).to_bytes(8, "little") + whole[16:],
        "a length before the start": whole[:8] + bytes(8) + whole[16:],
    }[damage]
    fresh = index.with_name("index.damaged")
    fresh.write_bytes(damaged)
    fresh.replace(index)
    for call in (lambda: open_client(url), other.stats, other.stats):
        with pytest.raises(TransportDown, match=f"{client.plane.folder} is damaged.*Fix:"):
            call()
    (index.parent / "index.whole").write_bytes(whole)
    (index.parent / "index.whole").replace(index)  # the lock was let go each time
    assert open_client(url).stats() == client.stats() == other.stats()
    for each in (client, other):
        each.close()
    shutil.rmtree(client.plane.folder)


def test_an_interrupted_client_hears_the_log_again(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"shm://{uuid.uuid4().hex}"
    client, other = open_client(url), open_client(url)
    client.register_partition("p", ["x"], 2, ["t"])
    client.put_samples(["a", "b"], "p", {"x": torch.ones(2)})

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(client.plane.ledger, "_let_go", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.clear_samples(["a"], "p")  # published, and applied here by half
    assert client.stats() == other.stats()
    assert client.stats()["rows"] == 1
    for each in (client, other):
        each.close()
    assert not client.plane.folder.exists()


FIELDS_OF_A_HISTORY = ["ids", "reward", "info"]


def outcome(client: DataPlaneClient, kind: str, ids: list[str], step: int, leased: dict[int, BatchMeta]) -> Any:
    """What one call gives, or the name of its error; the same for every transport. ``leased`` is the client's own."""
    try:
        if kind in FIELDS_OF_A_HISTORY:
            columns = {
                "ids": ragged(*[[step] * (step % (row + 2)) for row in range(len(ids))]),
                "reward": torch.full((len(ids),), float(step)),
                "info": [(step, row) for row in range(len(ids))],
            }
            meta = client.put_samples(ids, "p", {kind: columns[kind]}, [{f"tag{step % 3}": (step, None)}] * len(ids))
            return meta.ids, meta.lengths, meta.tags
        if kind in ("claim", "lease"):
            lease_s = 1000 if kind == "lease" else None
            required = [FIELDS_OF_A_HISTORY[step % 3]]
            claimed = client.claim_meta("p", "t", required, 3, min_batch=1, blocking=False, lease_s=lease_s)
            if claimed is None:
                return None
            leased |= {step: claimed} if lease_s else {}
            return claimed.ids, claimed.lengths, claimed.tags
        if kind == "clear":
            return client.clear_samples(ids[:1], "p")
        if kind == "get":
            got = materialize(client.get_samples(ids, "p", FIELDS_OF_A_HISTORY[: 1 + step % 3]))
            return {name: column.tolist() for name, column in got.items()}
        lease = sorted(leased)[step % len(leased)] if leased else None
        return lease is not None and (client.ack if kind == "ack" else client.release)(leased[lease])
    except DataPlaneError as error:
        return type(error).__name__


@pytest.mark.parametrize("seed", range(3))
def test_any_history_is_the_same_in_memory_and_in_shared_memory(seed: int) -> None:
    """One client of memory:// against two of one shm:// that take turns, and so read one another's records."""
    chance = random.Random(seed)
    url = f"shm://{uuid.uuid4().hex}"
    memory, shared = open_client("memory://"), [open_client(url), open_client(url)]
    for client in (memory, shared[0]):
        client.register_partition("p", FIELDS_OF_A_HISTORY, 12, ["t"])
    mine: dict[int, BatchMeta] = {}
    theirs: dict[int, BatchMeta] = {}
    kinds = [*FIELDS_OF_A_HISTORY * 2, "claim", "lease", "ack", "release", "clear", "get"]
    seen = set()
    for step in range(120):
        kind, ids = chance.choice(kinds), chance.sample([f"s{place}" for place in range(12)], chance.randint(1, 4))
        expected = outcome(memory, kind, ids, step, mine)
        assert outcome(chance.choice(shared), kind, ids, step, theirs) == expected, (step, kind)
        seen.add((kind, type(expected).__name__))
        stats = [client.stats()["partitions"] for client in (memory, *shared)]
        assert stats[0] == stats[1] == stats[2]
    assert len(seen) > 12
    for client in (memory, *shared):
        client.close()
