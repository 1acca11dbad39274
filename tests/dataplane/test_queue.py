"""``tq://`` alone: what it refuses to join, what it shares with the queue's other users, and slow answers."""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from spanwise.dataplane import (
    CapacityExceeded,
    Field,
    GetTimeout,
    NotSupported,
    PartitionConflict,
    materialize,
    open_client,
)
from spanwise.dataplane.transports import queue_process
from tests.dataplane.conftest import QUEUE_ROWS, QueueKeeper

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


def test_a_queue_whose_claims_block_is_refused_and_left_to_its_owner(queue_keeper: QueueKeeper) -> None:
    import transfer_queue

    queue_keeper.stop()
    settings = queue_process._settings(1, 10)
    settings.controller.polling_mode = False
    transfer_queue.init(settings)
    try:
        with pytest.raises(PartitionConflict, match=r"max_rows.*Fix:"):
            open_client("tq://auto", max_rows=11)
        with pytest.raises(NotSupported, match=r"polling_mode=False.*Fix:"):
            open_client("tq://auto")
        assert transfer_queue.kv_list() == {}
    finally:
        transfer_queue.close()


def test_the_queue_is_refused_where_it_would_hang_or_differ(queue_keeper: QueueKeeper) -> None:
    queue_keeper.stop()
    with pytest.raises(PartitionConflict, match=r"192\.0\.2\.1.*one cluster.*Fix:"):
        open_client("tq://192.0.2.1:6379")
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


def test_columns_are_shared_with_other_users_of_the_queue(queue_keeper: QueueKeeper) -> None:
    """What they put we claim and read, declared or not; what we put they read."""
    import transfer_queue

    queue_keeper.running()
    client, name = open_client("tq://auto", layout="columns"), f"p-{uuid.uuid4().hex[:12]}"
    fields = [Field("ids", torch.int64, (), ragged=True), Field("box", torch.float32, (2,), ragged=False)]
    client.register_partition(name, [*fields, "bare", "uniform", "reward", "info"], 3, ["t"])
    rows: list[Any] = [torch.arange(3), torch.arange(1)]
    theirs = {
        "ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "box": torch.arange(4.0).view(2, 2),
        "bare": torch.nested.as_nested_tensor([row.float() for row in rows], layout=torch.jagged),
        "uniform": torch.arange(6).view(2, 3),
        "reward": torch.tensor([0.5, 1.5]),
        "info": NonTensorStack(NonTensorData(data="x", batch_size=[]), NonTensorData(data={"k": 1}, batch_size=[])),
        "foreign": torch.tensor([7, 8]),
    }
    transfer_queue.kv_batch_put(["a", "b"], name, TensorDict(theirs, batch_size=[2]))
    claimed = client.claim_meta(name, "t", ["ids", "reward"], 2)
    assert claimed is not None
    got = client.get_samples(["b", "a"], name, list(theirs))
    assert [row.tolist() for row in got["ids"].unbind()] == [[0], [0, 1, 2]]
    assert [row.tolist() for row in got["bare"].unbind()] == [[0], [0, 1, 2]]
    assert got["box"].tolist() == [[2, 3], [0, 1]]
    assert got["uniform"].tolist() == [[3, 4, 5], [0, 1, 2]]
    assert (got["reward"].tolist(), got["foreign"].tolist()) == ([1.5, 0.5], [8, 7])
    assert got["info"].tolist() == [{"k": 1}, "x"]
    ours = {"ids": torch.nested.as_nested_tensor([torch.arange(4)], layout=torch.jagged), "info": ["ü"]}
    client.put_samples(["c"], name, ours)
    back = transfer_queue.kv_batch_get(["c"], name, ["ids", "info"])
    assert back["ids"].unbind()[0].tolist() == [0, 1, 2, 3]
    assert materialize(back)["info"].tolist() == ["ü"]
    client.clear_samples(None, name)
    client.close()


def test_a_queue_that_is_slow_to_answer_is_a_time_out(queue_keeper: QueueKeeper) -> None:
    process = queue_keeper.running().process
    started = time.monotonic()
    with pytest.raises(GetTimeout, match="Fix:"):
        process.call(lambda: time.sleep(20), time.monotonic() + 0.3, GetTimeout)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1:6379", "10.0.0.1:6379", True),
        ("127.0.0.1:6379", "10.0.0.1:6379", True),
        ("10.0.0.1:6379", "127.0.0.1:6380", False),
        ("10.0.0.2:6379", "10.0.0.1:6379", False),
        ("no..host:6379", "10.0.0.1:6379", False),
    ],
)
def test_addresses_of_one_cluster(one: str, other: str, same: bool) -> None:
    assert queue_process._is_same_place(one, other) == same
