"""One suite for every transport: what a client promises, whoever carries it."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from spanwise.dataplane import (
    BatchMeta,
    CapacityExceeded,
    ClaimTimeout,
    ClientClosed,
    DataPlaneClient,
    DataPlaneError,
    Field,
    FieldNotReady,
    LeaseExpired,
    NotSupported,
    PartitionConflict,
    PartitionExhausted,
    PartitionNotFound,
    SampleConflict,
    SampleNotFound,
    SchemaMismatch,
    TaskNotFound,
    UnsafeObject,
    kv_first_write,
    materialize,
    read_columns,
    shard_meta_for_ranks,
    stack_or_nest,
    to_nested_by_length,
    write_columns,
)
from tests.dataplane.conftest import PlaneUnderTest

FIELDS = [Field("ids", torch.int64, (), ragged=True), "reward", "info", "logp"]


def ragged(*rows: list[int]) -> torch.Tensor:
    return to_nested_by_length(
        torch.tensor([row + [0] * (8 - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])
    )


@pytest.fixture
def ready(plane: PlaneUnderTest) -> tuple[DataPlaneClient, str]:
    """A client and a registered, empty partition of four samples with two tasks."""
    client, name = plane.open(), plane.partition()
    client.register_partition(name, FIELDS, 4, ["train", "score"])
    return client, name


def fill(client: DataPlaneClient, name: str, ids: list[str], start: int = 0) -> BatchMeta:
    """Ids and rewards: sample i has i + 1 tokens of value i."""
    rows = [[start + row] * (start + row + 1) for row in range(len(ids))]
    rewards = torch.arange(start, start + len(ids), dtype=torch.float32)
    return client.put_samples(ids, name, {"ids": ragged(*rows), "reward": rewards}, [{"n": i} for i in ids])


def test_a_rollout_becomes_a_training_batch_and_comes_back(plane: PlaneUnderTest) -> None:
    producer, trainer, name = plane.open(), plane.open(), plane.partition()
    producer.register_partition(name, ["ids", "logp", "reward", "info"], 3, ["train", "score"])
    padded = torch.tensor([[1, 2, 3], [4, 0, 0], [5, 6, 0]])
    info = np.array([{"a": 1}, None, "x"], dtype=object)
    written = kv_first_write(
        producer, name, {"ids": padded, "reward": torch.ones(3), "info": info}, lengths=torch.tensor([3, 1, 2])
    )
    assert len(set(written.ids)) == 3
    assert written.lengths == [3, 1, 2]
    assert [tag["input_lengths"] for tag in written.tags] == [3, 1, 2]
    claimed = trainer.claim_meta(name, "train", ["ids", "info"], 3)
    assert claimed is not None
    assert (claimed.ids, claimed.lengths, claimed.tags) == (written.ids, written.lengths, written.tags)
    batch = read_columns(trainer, claimed, pad_value_dict={"ids": -1}, pad_to_seqlen=5)
    assert batch["ids"].tolist() == [[1, 2, 3, -1, -1], [4, -1, -1, -1, -1], [5, 6, -1, -1, -1]]
    assert batch["info"].tolist() == [{"a": 1}, None, "x"]
    assert trainer.claim_meta(name, "score", ["logp"], 3, blocking=False) is None
    back = write_columns(trainer, claimed, {"logp": padded.float()})
    assert back.fields == ["logp"]
    scored = producer.claim_meta(name, "score", ["logp", "reward"], 3)
    assert scored is not None
    assert [row.tolist() for row in producer.get_data(scored)["logp"].unbind()] == [[1, 2, 3], [4], [5, 6]]
    assert producer.check_consumption_status(name, ["train", "score"])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.int32])
def test_columns_keep_dtype_shape_and_values(plane: PlaneUnderTest, dtype: torch.dtype) -> None:
    client, name = plane.open(), plane.partition()
    fields = ["ragged", "tailed", "uniform", "scalar", "matrix"]
    client.register_partition(name, [*fields, "declared"], 3, ["t"])
    rows = torch.arange(24).view(3, 4, 2).to(dtype)
    lengths = torch.tensor([4, 0, 2])
    columns = {
        "ragged": to_nested_by_length(rows[..., 0], lengths),
        "tailed": to_nested_by_length(rows, lengths),
        "uniform": to_nested_by_length(rows[..., 0], torch.tensor([4, 4, 4])),
        "scalar": rows[:, 0, 0],
        "matrix": rows,
    }
    client.put_samples(["a", "b", "c"], name, columns)
    back = client.get_samples(["c", "a", "b"], name, fields)
    order = torch.tensor([2, 0, 1])
    expected = materialize(columns)
    for key, column in materialize(back).items():
        assert column.dtype == dtype
        assert torch.equal(column, expected[key][order]), key
    for key in ("ragged", "tailed", "uniform"):
        assert back[key].is_nested
    assert not back["matrix"].is_nested


def test_objects_come_back_one_per_row(plane: PlaneUnderTest) -> None:
    client, name = plane.open(), plane.partition()
    client.register_partition(name, ["info"], 5, ["t"])
    items: list[Any] = [None, [1, 2], {"k": None}, "ü", 3]
    column = np.empty(5, dtype=object)
    column[:] = items
    ids = [f"s{row}" for row in range(5)]
    client.put_samples(ids, name, {"info": column})
    back = client.get_samples(ids, name, ["info"])["info"]
    assert back.shape == (5,)
    assert back.dtype == object
    assert back.tolist() == items


def test_rows_from_several_puts_come_in_the_order_asked(ready: tuple[DataPlaneClient, str]) -> None:
    client, name = ready
    fill(client, name, ["a", "b"])
    fill(client, name, ["c", "d"], start=2)
    got = client.get_samples(["d", "a", "c", "d"], name, ["ids", "reward"])
    assert [row.tolist() for row in got["ids"].unbind()] == [[3] * 4, [0], [2] * 3, [3] * 4]
    assert got["reward"].tolist() == [3, 0, 2, 3]


def test_what_was_read_is_the_readers_own(ready: tuple[DataPlaneClient, str]) -> None:
    client, name = ready
    fill(client, name, ["a", "b"])
    got = client.get_samples(["a", "b"], name, ["ids", "reward"])
    got["ids"].values().fill_(99)
    got["reward"].fill_(99)
    again = client.get_samples(["a", "b"], name, ["ids", "reward"])
    assert again["ids"].values().tolist() == [0, 1, 1]
    assert again["reward"].tolist() == [0, 1]


def test_a_put_does_not_see_later_changes(ready: tuple[DataPlaneClient, str]) -> None:
    client, name = ready
    reward = torch.zeros(1)
    client.put_samples(["a"], name, {"reward": reward})
    reward.fill_(5)
    assert client.get_samples(["a"], name, ["reward"])["reward"].tolist() == [0]


def test_missing_fields_are_listed(ready: tuple[DataPlaneClient, str]) -> None:
    client, name = ready
    fill(client, name, ["a", "b"])
    client.put_samples(["b"], name, {"logp": torch.ones(1)})
    with pytest.raises(FieldNotReady) as error:
        client.get_samples(["a", "b"], name, ["ids", "logp"])
    assert error.value.missing == {"a": ["logp"]}
    with pytest.raises(FieldNotReady) as error:
        client.get_samples(["a", "b"], name, ["never"])
    assert error.value.missing == {"a": ["never"], "b": ["never"]}


def test_unknown_names(ready: tuple[DataPlaneClient, str]) -> None:
    client, name = ready
    fill(client, name, ["a"])
    with pytest.raises(PartitionNotFound):
        client.get_samples(["a"], "nowhere", ["ids"])
    with pytest.raises(PartitionNotFound):
        client.put_samples(["a"], "nowhere", {"ids": ragged([1])})
    with pytest.raises(PartitionNotFound):
        client.claim_meta("nowhere", "train", ["ids"], 1)
    with pytest.raises(TaskNotFound):
        client.claim_meta(name, "nobody", ["ids"], 1)
    with pytest.raises(TaskNotFound):
        client.check_consumption_status(name, ["nobody"])
    with pytest.raises(SampleNotFound):
        client.get_samples(["a", "ghost"], name, ["ids"])
    with pytest.raises(SampleNotFound):
        client.clear_samples(["ghost"], name)


@pytest.mark.parametrize(
    ("ids", "columns", "error"),
    [
        (["a", "a"], {"reward": torch.ones(2)}, SampleConflict),
        (["a", "b"], {"reward": torch.ones(3)}, SchemaMismatch),
        (["a", "b"], {"typo": torch.ones(2)}, SchemaMismatch),
        (["a", "b"], {"reward": torch.ones(2, dtype=torch.int64)}, SchemaMismatch),
        (["a", "b"], {"reward": torch.ones(2, 3)}, SchemaMismatch),
        (["a", "b"], {"ids": torch.ones(2)}, SchemaMismatch),
        (["a", "b"], {"reward": 3}, SchemaMismatch),
        ([], {"reward": torch.ones(0)}, SchemaMismatch),
        (["a", ""], {"reward": torch.ones(2)}, SchemaMismatch),
        (["a", "b"], None, SchemaMismatch),
        (["a", "b"], {"info": [1, object()]}, UnsafeObject),
        (["p", "q", "r", "s"], {"reward": torch.ones(4)}, CapacityExceeded),
    ],
    ids=range(12),
)
def test_a_refused_put_changes_nothing(
    ready: tuple[DataPlaneClient, str], ids: list[str], columns: Any, error: type[DataPlaneError]
) -> None:
    client, name = ready
    fill(client, name, ["x"])
    before = client.stats()["partitions"][name]
    with pytest.raises(error) as refused:
        client.put_samples(ids, name, columns)
    assert "Fix:" in str(refused.value)
    assert client.stats()["partitions"][name] == before


def test_duplicate_puts(ready: tuple[DataPlaneClient, str]) -> None:
    client, name = ready
    fill(client, name, ["a", "b"])
    assert client.claim_meta(name, "train", ["ids"], 1).ids == ["a"]
    fill(client, name, ["a", "b"])
    client.put_samples(["a"], name, {"reward": torch.tensor([9.0])})
    assert client.get_samples(["a", "b"], name, ["reward"])["reward"].tolist() == [9, 1]
    assert client.get_samples(["a"], name, ["ids"])["ids"].values().tolist() == [0]
    assert client.claim_meta(name, "train", ["ids"], 1).ids == ["b"]
    with pytest.raises(SampleConflict, match="a"):
        client.put_samples(["c", "a"], name, {"reward": torch.zeros(2)}, on_conflict="error")
    with pytest.raises(SampleNotFound):
        client.get_samples(["c"], name, ["reward"])
    client.put_samples(["a"], name, {"logp": torch.zeros(1)}, on_conflict="error")
    with pytest.raises(ValueError, match="on_conflict"):
        client.put_samples(["a"], name, {"logp": torch.zeros(1)}, on_conflict="merge")


def test_tags_travel_and_merge(ready: tuple[DataPlaneClient, str]) -> None:
    client, name = ready
    fill(client, name, ["a", "b"])
    meta = client.put_samples(["a", "b"], name, tags=[{"m": 1}, {"n": "new"}])
    assert meta.tags == [{"n": "a", "m": 1}, {"n": "new"}]
    claimed = client.claim_meta(name, "train", ["ids"], 2)
    assert claimed is not None
    assert claimed.tags == meta.tags
    assert claimed.lengths == [1, 2]
    with pytest.raises(SchemaMismatch):
        client.put_samples(["a"], name, tags=[{}, {}])
    with pytest.raises(UnsafeObject):
        client.put_samples(["a"], name, tags=[{"f": print}])


def test_claims_give_up_to_a_batch_and_at_least_the_minimum(ready: tuple[DataPlaneClient, str]) -> None:
    client, name = ready
    fill(client, name, ["a", "b", "c"])
    assert client.claim_meta(name, "train", ["ids"], 4, blocking=False) is None
    started = time.monotonic()
    with pytest.raises(ClaimTimeout):
        client.claim_meta(name, "train", ["ids"], 4, timeout_s=0.2)
    assert time.monotonic() - started < 10
    got = client.claim_meta(name, "train", ["ids"], 4, min_batch=2)
    assert got is not None
    assert got.ids == ["a", "b", "c"]
    assert client.claim_meta(name, "score", ["ids", "reward"], 2).ids == ["a", "b"]
    assert client.claim_meta(name, "train", ["ids"], 1, blocking=False) is None
    fill(client, name, ["d"], start=3)
    assert client.claim_meta(name, "train", ["ids"], 3).ids == ["d"]
    for blocking in (True, False):
        with pytest.raises(PartitionExhausted):
            client.claim_meta(name, "train", ["ids"], 1, blocking=blocking)
    assert client.check_consumption_status(name, ["train"])
    assert not client.check_consumption_status(name, ["train", "score"])


@pytest.mark.parametrize(
    "arguments",
    [{"batch_size": 0}, {"min_batch": 0}, {"min_batch": 3}, {"lease_s": 0.0}, {"required_fields": "ids"}],
    ids=str,
)
def test_bad_claims_are_refused(ready: tuple[DataPlaneClient, str], arguments: dict[str, Any]) -> None:
    client, name = ready
    with pytest.raises(ValueError, match="claim_meta was given"):
        client.claim_meta(name, "train", **{"required_fields": ["ids"], "batch_size": 2, **arguments})


def test_a_waiting_claim_wakes_when_the_field_is_produced(plane: PlaneUnderTest) -> None:
    client, other, name = plane.open(), plane.open(), plane.partition()
    client.register_partition(name, FIELDS, 4, ["train"])
    got: list[BatchMeta | None] = []
    waiter = threading.Thread(
        target=lambda: got.append(other.claim_meta(name, "train", ["ids", "logp"], 2, timeout_s=30))
    )
    waiter.start()
    fill(client, name, ["a", "b", "c"])
    client.put_samples(["c", "b"], name, {"logp": torch.ones(2)})
    waiter.join(30)
    assert got[0] is not None
    assert sorted(got[0].ids) == ["b", "c"]


def test_clearing(ready: tuple[DataPlaneClient, str]) -> None:
    client, name = ready
    fill(client, name, ["a", "b", "c", "d"])
    client.claim_meta(name, "train", ["ids"], 2)
    client.clear_samples(["a", "c"], name)
    with pytest.raises(SampleNotFound):
        client.get_samples(["a"], name, ["ids"])
    assert client.get_samples(["b"], name, ["ids"])["ids"].values().tolist() == [1, 1]
    assert client.claim_meta(name, "train", ["ids"], 4).ids == ["d"]
    with pytest.raises(PartitionExhausted):
        client.claim_meta(name, "train", ["ids"], 1)
    client.clear_samples(None, name)
    assert client.stats()["partitions"][name]["samples"] == 0
    fill(client, name, ["a"])
    assert client.claim_meta(name, "train", ["ids"], 1).ids == ["a"]
    assert client.get_samples([], name, ["ids"]) == {}


def test_what_was_cleared_is_not_waited_for(ready: tuple[DataPlaneClient, str]) -> None:
    client, name = ready
    fill(client, name, ["a", "b", "c", "d"])
    claimed = client.claim_meta(name, "train", ["ids"], 3)
    client.clear_samples([sample for sample in "abcd" if sample not in claimed.ids], name)
    assert client.check_consumption_status(name, ["train"])
    assert not client.check_consumption_status(name, ["train", "score"])
    with pytest.raises(PartitionExhausted):
        client.claim_meta(name, "train", ["ids"], 1)
    client.clear_samples(claimed.ids, name)
    assert client.check_consumption_status(name, ["train", "score"])


def test_registering(ready: tuple[DataPlaneClient, str]) -> None:
    client, name = ready
    client.register_partition(name, FIELDS, 4, ["train", "score"])
    fill(client, name, ["a"])
    client.register_partition(name, FIELDS, 4, ["train", "score"])
    with pytest.raises(PartitionConflict):
        client.register_partition(name, FIELDS, 5, ["train", "score"])
    with pytest.raises(PartitionConflict):
        client.register_partition(name, FIELDS, 4, ["train"])
    for arguments in ((["a", "a"], 1, ["t"]), ([], 1, ["t"]), (["a"], 0, ["t"]), (["a"], 1, ["t", "t"])):
        with pytest.raises(SchemaMismatch):
            client.register_partition("bad", *arguments)
    with pytest.raises(ValueError, match="dtype"):
        client.register_partition("bad", [Field("a", "float12")], 1, ["t"])


def test_close_is_local_and_final(plane: PlaneUnderTest) -> None:
    client, other, name = plane.open(), plane.open(), plane.partition()
    client.register_partition(name, FIELDS, 4, ["train"])
    fill(client, name, ["a"])
    client.close()
    client.close()
    for call in (
        lambda: client.register_partition(name, FIELDS, 4, ["train"]),
        lambda: client.put_samples(["b"], name, {"reward": torch.ones(1)}),
        lambda: client.get_samples(["a"], name, ["ids"]),
        lambda: client.claim_meta(name, "train", ["ids"], 1),
        lambda: client.check_consumption_status(name, ["train"]),
        lambda: client.clear_samples(None, name),
        lambda: client.stats(),
    ):
        with pytest.raises(ClientClosed):
            call()
    assert other.get_samples(["a"], name, ["ids"])["ids"].values().tolist() == [0]


def test_leases(plane: PlaneUnderTest) -> None:
    client, name = plane.open(), plane.partition()
    client.register_partition(name, FIELDS, 4, ["train"])
    fill(client, name, ["a", "b", "c", "d"])
    if not plane.has_leases:
        with pytest.raises(NotSupported, match="lease"):
            client.claim_meta(name, "train", ["ids"], 2, lease_s=1.0)
        for call in (client.ack, client.release):
            with pytest.raises(NotSupported, match="lease"):
                call(BatchMeta(["a"], name))
        return
    first = client.claim_meta(name, "train", ["ids"], 2, lease_s=60.0)
    second = client.claim_meta(name, "train", ["ids"], 2, lease_s=0.05)
    assert first is not None
    assert second is not None
    assert (first.ids, second.ids) == (["a", "b"], ["c", "d"])
    client.ack(first.subset(["a"]))
    client.release(first.drop(["a"]))
    with pytest.raises(LeaseExpired):
        client.ack(first)
    time.sleep(0.1)  # the second lease runs out
    again = client.claim_meta(name, "train", ["ids"], 3, timeout_s=20, lease_s=60.0)
    assert again is not None
    assert sorted(again.ids) == ["b", "c", "d"]
    for call in (client.ack, client.release):
        with pytest.raises(LeaseExpired):
            call(second)
    assert not client.check_consumption_status(name, ["train"])
    with pytest.raises(ClaimTimeout):
        client.claim_meta(name, "train", ["ids"], 1, timeout_s=0.05)
    client.ack(again)
    assert client.check_consumption_status(name, ["train"])
    with pytest.raises(PartitionExhausted):
        client.claim_meta(name, "train", ["ids"], 1)
    with pytest.raises(LeaseExpired):
        client.release(BatchMeta(["a"], name))


def test_ranks_share_a_batch_and_their_results_come_back_in_order(ready: tuple[DataPlaneClient, str]) -> None:
    client, name = ready
    fill(client, name, ["a", "b", "c", "d"])
    claimed = client.claim_meta(name, "train", ["ids"], 4)
    assert claimed is not None
    shards, inverse = shard_meta_for_ranks(claimed, 2)
    sums = torch.cat([torch.stack([row.sum() for row in client.get_data(shard)["ids"].unbind()]) for shard in shards])
    assert sums[inverse].tolist() == [0, 2, 6, 12]
    for shard in shards:
        write_columns(client, shard, {"logp": stack_or_nest([torch.ones(n) for n in shard.lengths])})
    assert client.claim_meta(name, "score", ["logp"], 4) is not None


def test_every_client_is_a_data_plane_client(plane: PlaneUnderTest) -> None:
    assert isinstance(plane.open(), DataPlaneClient)
