"""What belongs to no single transport: URLs, settings, the ledger, metas, imports, the worked example."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwise.dataplane import (
    BatchMeta,
    Field,
    PartitionConflict,
    TransportDown,
    open_client,
    shard_meta_for_ranks,
)
from spanwise.dataplane.errors import DataPlaneError
from spanwise.dataplane.ledger import Ledger
from spanwise.dataplane.ledger_state import from_record, to_record
from tests.dataplane.conftest import REPOSITORY, QueueKeeper
from tests.ray_cluster import RayCluster


@pytest.mark.parametrize(
    "url", ["", "memory", "memory:/x", "redis://x", "shm://", "tq://", "shm://a/b", "shm://" + "x" * 65]
)
def test_a_bad_url_says_what_is_possible(url: str) -> None:
    with pytest.raises(ValueError, match="Fix:"):
        open_client(url)


@pytest.mark.parametrize(
    ("url", "option"), [("memory://", "layout"), ("shm://x", "timeout_s"), ("tq://auto", "when_full")]
)
def test_an_option_of_another_transport_is_named(url: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}.*Fix:"):
        open_client(url, **{option: 1})


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
        return ["put", "p", f"seg{number}", 64, [sample], wire, [number], [{"n": b"\x01"}]]
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
