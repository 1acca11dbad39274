"""What belongs to one transport or to none: URLs, settings, the log of shared memory, CPUs for the queue, imports."""

from __future__ import annotations

import itertools
import os
import re
import resource
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spanwise.dataplane import (
    BatchMeta,
    CapacityExceeded,
    ClientClosed,
    DataPlaneClient,
    Field,
    NotSupported,
    PartitionConflict,
    TransportDown,
    open_client,
    shard_meta_for_ranks,
)
from spanwise.dataplane.errors import DataPlaneError
from spanwise.dataplane.ledger import Ledger
from spanwise.dataplane.ledger_state import from_record, to_record
from spanwise.dataplane.transports import shared_memory
from tests.dataplane.conftest import QUEUE_ROWS, QueueKeeper
from tests.ray_cluster import RayCluster

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "url", ["", "memory", "memory:/x", "redis://x", "shm://", "tq://", "shm://a/b", "shm://" + "x" * 65]
)
def test_a_bad_url_says_what_is_possible(url: str) -> None:
    with pytest.raises(ValueError, match="Fix:"):
        open_client(url)


@pytest.mark.parametrize("scheme", ["memory", "shm"])
@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"max_rows": -1}, {"when_full": "drop"}], ids=str)
def test_bad_limits_are_refused(scheme: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Fix:"):
        open_client(f"{scheme}://{uuid.uuid4().hex}", **options)


@pytest.mark.parametrize("scheme", ["memory", "shm"])
def test_a_second_client_with_other_limits_is_refused(scheme: str) -> None:
    url = f"{scheme}://{uuid.uuid4().hex}"
    first = open_client(url, max_rows=3)
    with pytest.raises(PartitionConflict):
        open_client(url, max_rows=4)
    second = open_client(url)
    third = open_client(url, max_rows=3)
    for client in (first, second, third):
        client.close()
    open_client(url, max_rows=4).close()


def test_memory_planes_are_private_or_shared_by_name() -> None:
    private, other = open_client("memory://"), open_client("memory://")
    private.register_partition("p", ["x"], 1, ["t"])
    assert other.stats()["partitions"] == {}
    name = uuid.uuid4().hex
    left, right = open_client(f"memory://{name}"), open_client(f"memory://{name}")
    left.register_partition("p", ["x"], 1, ["t"])
    assert "p" in right.stats()["partitions"]
    for client in (private, other, left, right):
        client.close()
    fresh = open_client(f"memory://{name}")
    assert fresh.stats()["partitions"] == {}
    fresh.close()


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


def test_the_log_is_compacted_and_late_comers_read_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "COMPACT_BYTES", 2000)
    url = f"shm://{uuid.uuid4().hex}"
    client, other = open_client(url), open_client(url)
    for plane in (client.plane, other.plane):
        plane.compact_at = 2000
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
    assert client.plane.position < 20_000
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
            client.register_partition("q" * shared_memory.RESERVE_BYTES, ["x"], 1, ["t"])
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
    with files_end_at(client.plane.position + 10), pytest.raises(CapacityExceeded, match="nothing was changed"):
        client.clear_samples(["a"], "p")
    with files_end_at(client.plane.position + 10):
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
    for size in (0, shared_memory.HEAD_BYTES):
        with files_end_at(size), pytest.raises(CapacityExceeded, match="no room"):
            open_client(f"shm://{name}")
        assert not (shared_memory.ROOT / f"spanwise-{os.getuid()}-{name}").exists()


def test_a_log_that_cannot_be_compacted_grows_on() -> None:
    client = open_client(f"shm://{uuid.uuid4().hex}")
    client.register_partition("p", ["x"], 1000, ["t"])
    for place in range(100):
        client.put_samples([f"s{place}"], "p", {"x": torch.ones(1)})
    client.plane._compact, kept = lambda: client.plane._replace_log(["x" * 10**6]), client.plane._compact
    client.plane.compact_at = 1
    with files_end_at((client.plane.folder / "index").stat().st_size):
        client.put_samples(["last"], "p", {"x": torch.ones(1)})
    client.plane._compact = kept
    assert client.get_samples(["last"], "p", ["x"])["x"].tolist() == [1.0]
    assert not (client.plane.folder / "index.new").exists()
    client.close()


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "claim", "lease", "ack", "release", "clear", "tags"]), st.integers(0, 7)),
        max_size=25,
    )
)
def test_a_snapshot_says_everything_the_ledger_knows(steps: list[tuple[str, int]]) -> None:
    """Any history: the ledger, and the ledger rebuilt from its own record, agree on everything that follows."""
    ledger = Ledger()
    fields = [Field("x", "int64", (), ragged=True), Field("y", "float32", (), ragged=False)]
    ledger.apply(["register", "p", [entry.to_wire() for entry in fields], 8, ["t"]])
    lease = 0
    for number, (kind, entry) in enumerate(steps):
        sample = f"s{entry}"
        try:
            record = next_record(ledger, kind, sample, number, lease, fields)
        except DataPlaneError:
            continue
        if record is not None:
            ledger.apply(record)
            lease = number if kind == "lease" else lease
        copy = from_record(to_record(ledger))
        assert to_record(copy) == to_record(ledger)
        assert (copy.bytes, copy.rows) == (ledger.bytes, ledger.rows)
        held = {segment for s in ledger.partition("p").samples.values() for segment, _ in s.cells.values()}
        assert held == set(ledger.segments)
        cursor = ledger.cursor("p", "t")
        lent = {s for entry in cursor.leases.values() for s in entry.ids}
        assert not lent & set(cursor.pending)
        assert set(ledger.partition("p").samples) <= lent | set(cursor.pending) | cursor.consumed


def next_record(
    ledger: Ledger, kind: str, sample: str, number: int, lease: int, fields: list[Field]
) -> list[Any] | None:
    if kind in ("put", "tags"):
        columns = fields[: 1 + number % 2] if kind == "put" else []
        ledger.check_put("p", [sample], columns, "replace")
        wire = [entry.to_wire() for entry in columns]
        return ["put", "p", f"seg{number}", 64, [sample], wire, [number], [{"n": number}]]
    if kind in ("claim", "lease"):
        ids = ledger.plan_claim("p", "t", ["x"], 2, 1)
        return None if ids is None else ["claim", "p", "t", ids, str(number) if kind == "lease" else None, 1e9]
    if kind == "clear":
        ledger.check_cells("p", [sample], [])
        return ["clear", "p", [sample]]
    ledger.check_lease("p", "t", str(lease), [sample], 0.0)
    return [kind, "p", "t", str(lease), [sample]]


def test_meta_transforms_are_pure() -> None:
    meta = BatchMeta(["a", "b", "c"], "p", [3, 1, 2], [{"n": 0}, {"n": 1}, {"n": 2}], ["x", "y"])
    assert meta.subset(["c", "a"]).lengths == [2, 3]
    assert meta.subset([2, 0]).tags == [{"n": 2}, {"n": 0}]
    assert meta.slice(1, 9).ids == ["b", "c"]
    assert meta.drop([1]).ids == ["a", "c"]
    assert meta.with_fields(["z"]).fields == ["z"]
    assert meta.stamp_tags({"k": 1}).tags[2] == {"n": 2, "k": 1}
    assert meta.stamp_tags([{"n": 9}, {}, {}]).tags[0] == {"n": 9}
    both = BatchMeta.concat([meta.slice(0, 1), meta.slice(1, 3).with_fields(["y"])])
    assert (both.ids, both.fields) == (meta.ids, ["y"])
    assert meta.tags == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert len(meta) == meta.size == 3
    for wrong in (lambda: meta.subset(["z"]), lambda: meta.subset([3]), lambda: meta.drop([-1])):
        with pytest.raises(IndexError):
            wrong()
    for bad in (
        lambda: BatchMeta(["a"], "p", [1, 2]),
        lambda: meta.stamp_tags([{}]),
        lambda: BatchMeta.concat([]),
        lambda: BatchMeta.concat([meta, BatchMeta(["d"], "q")]),
    ):
        with pytest.raises(ValueError, match="Fix:"):
            bad()


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=12), ranks=st.integers(1, 4))
def test_shards_lose_nothing_and_invert(lengths: list[int], ranks: int) -> None:
    meta = BatchMeta([f"s{i}" for i in range(len(lengths))], "p", lengths)
    shards, inverse = shard_meta_for_ranks(meta, ranks)
    assert len(shards) == ranks
    laid = [sample for shard in shards for sample in shard.ids]
    assert [laid[place] for place in inverse] == meta.ids


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_the_queue_is_refused_where_it_would_hang_or_differ(queue_keeper: QueueKeeper) -> None:
    queue_keeper.stop()
    with pytest.raises(CapacityExceeded, match=r"needs \d+ free CPUs"):
        open_client("tq://auto", storage_units=64)
    queue_keeper.running()
    for options in ({"storage_units": 2}, {"max_rows": QUEUE_ROWS + 1}):
        with pytest.raises(PartitionConflict):
            open_client("tq://auto", **options)
    with pytest.raises(PartitionConflict):
        open_client("tq://192.0.2.1:6379", max_rows=1)
    with pytest.raises(ValueError, match="layout"):
        open_client("tq://auto", layout="rows")
    joined = open_client("tq://auto")
    with pytest.raises(NotSupported):
        joined.claim_meta("p", "t", ["x"], 1, lease_s=1)
    joined.close()


def test_imports_stay_light() -> None:
    code = (
        "import sys, spanwise.dataplane as d\n"
        "assert not {'ray', 'tensordict', 'transformers', 'transfer_queue'} & set(sys.modules)\n"
        "c = d.open_client('memory://'); c.close()\n"
        "assert 'tensordict' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


def test_the_worked_example_moves_everything_between_processes() -> None:
    the_example_moves_everything("shm", {"OMP_NUM_THREADS": "1"})  # memory:// runs in tests/examples


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_the_worked_example_moves_everything_over_a_cluster(ray_cluster: RayCluster, queue_keeper: QueueKeeper) -> None:
    queue_keeper.running()
    the_example_moves_everything("tq", ray_cluster.environment)


def the_example_moves_everything(transport: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "examples/rollout_to_trainer.py", "--transport", transport, "--samples", "20"]
    run = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )
    assert run.returncode == 0, run.stderr
    assert "trainer: 20 of 20 samples" in run.stdout
    assert "report: 20 of 20 samples" in run.stdout
    assert "consumed by both tasks: True" in run.stdout


def test_a_missing_extra_names_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("spanwise.dataplane.transports.queue_process._joined", None)
    with pytest.raises(TransportDown, match=r"pip install 'spanwise\[ray\]'"):
        open_client("tq://auto")
