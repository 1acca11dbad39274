"""One suite for every transport: what a client promises about claims, leases, consumption and clearing."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from spanwise.dataplane import (
    BatchMeta,
    ClaimTimeout,
    DataPlaneClient,
    LeaseExpired,
    NotSupported,
    PartitionExhausted,
    SampleNotFound,
    shard_meta_for_ranks,
    stack_or_nest,
    write_columns,
)
from tests.dataplane.conftest import PlaneUnderTest
from tests.dataplane.samples import FIELDS, fill


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
    [
        {"batch_size": 0},
        {"min_batch": 0},
        {"min_batch": 3},
        {"lease_s": 0.0},
        {"required_fields": "ids"},
        {"required_fields": []},
    ],
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
    nobody = claimed.subset([])
    assert write_columns(client, nobody, {"logp": torch.ones(0, 4)}).fields == ["logp"]  # a rank without samples
    for shard in shards:
        write_columns(client, shard, {"logp": stack_or_nest([torch.ones(n) for n in shard.lengths])})
    assert client.claim_meta(name, "score", ["logp"], 4) is not None
