"""One suite for every transport: what a client promises about columns, tags and partitions. Claims: next door."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
import torch

from spanwise.dataplane import (
    CapacityExceeded,
    ClientClosed,
    DataPlaneClient,
    DataPlaneError,
    Field,
    FieldNotReady,
    PartitionConflict,
    PartitionNotFound,
    SampleConflict,
    SampleNotFound,
    SchemaMismatch,
    TaskNotFound,
    UnsafeObject,
    kv_first_write,
    materialize,
    read_columns,
    to_nested_by_length,
    write_columns,
)
from tests.dataplane.conftest import PlaneUnderTest
from tests.dataplane.samples import FIELDS, fill, ragged


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
    started = time.monotonic()
    with pytest.raises(SchemaMismatch, match="'idz'"):  # nobody can ever produce it: there is nothing to wait for
        client.claim_meta(name, "train", ["ids", "idz"], 1)
    assert time.monotonic() - started < 30
    with pytest.raises(SchemaMismatch, match="select_fields"):
        client.get_samples(["a"], name, "ids")
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
        (["a", "\ud800"], {"reward": torch.ones(2)}, SchemaMismatch),
        (["a", "b"], {"reward": torch.eye(2).to_sparse()}, SchemaMismatch),
        (["a", "b"], {"reward": torch.ones(2, device="meta")}, SchemaMismatch),
        (["a", "b"], None, SchemaMismatch),
        (["a", "b"], {"info": [1, object()]}, UnsafeObject),
        (["p", "q", "r", "s"], {"reward": torch.ones(4)}, CapacityExceeded),
    ],
    ids=range(15),
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


AWKWARD_TAGS: dict[str, Any] = {
    "pair": (1, [2, None]),
    "when": datetime(2026, 1, 2, tzinfo=UTC),
    "large": 2**70,
    "text": "ü",
    "scores": torch.tensor([1.5, -2.0]),
    "array": np.arange(3),
}


def test_tags_of_every_kind_reach_every_client(plane: PlaneUnderTest) -> None:
    writer, reader, name = plane.open(), plane.open(), plane.partition()
    writer.register_partition(name, FIELDS, 4, ["train"])
    mine = {"list": [1], **AWKWARD_TAGS}
    written = writer.put_samples(["a"], name, {"ids": ragged([1])}, [mine])
    mine["list"].append(2)  # neither a later change of what was put,
    written.tags[0]["list"].append(3)  # nor one of what was returned is seen by others
    claimed = reader.claim_meta(name, "train", ["ids"], 1)
    assert claimed is not None
    for found in (written.tags[0], claimed.tags[0]):
        assert {key: repr(value) for key, value in found.items() if key != "list"} == {
            key: repr(value) for key, value in AWKWARD_TAGS.items()
        }
    assert claimed.tags[0]["list"] == [1]


def test_a_column_that_comes_later_does_not_change_how_long_a_sample_is(plane: PlaneUnderTest) -> None:
    client, name = plane.open(), plane.partition()
    client.register_partition(name, ["input_ids", "teacher_ids", "response"], 5, ["train"])
    padded = torch.tensor([[1, 2, 3], [4, 0, 0]])
    meta = kv_first_write(client, name, {"input_ids": padded}, lengths=torch.tensor([3, 1]))
    later = client.put_samples(meta.ids, name, {"teacher_ids": ragged([1] * 5, [2] * 4)})
    client.put_samples(meta.ids, name, {"response": ragged([], [7])})
    assert later.lengths == [3, 1]
    claimed = client.claim_meta(name, "train", ["input_ids", "teacher_ids", "response"], 2)
    assert claimed is not None
    assert dict(zip(claimed.ids, claimed.lengths, strict=True)) == dict(zip(meta.ids, [3, 1], strict=True))
    assert client.put_samples(["u"], name, {"teacher_ids": ragged([1] * 6)}).lengths == [6]
    assert client.put_samples(["u"], name, {"input_ids": ragged([1] * 2)}).lengths == [2]
    assert client.put_samples(["v"], name, tags=[{"n": 1}]).lengths == [0]


@pytest.mark.parametrize(
    "tags", [[{"input_lengths": "3"}], [{"input_lengths": -1}], [{"input_lengths": None}]], ids=range(3)
)
def test_bad_tags_are_refused(ready: tuple[DataPlaneClient, str], tags: list[Any]) -> None:
    client, name = ready
    with pytest.raises(SchemaMismatch, match="Fix:"):
        client.put_samples(["a"], name, {"ids": ragged([1, 2, 3])}, tags)
    assert client.stats()["partitions"][name]["samples"] == 0


def test_registering(ready: tuple[DataPlaneClient, str]) -> None:
    client, name = ready
    client.register_partition(name, FIELDS, 4, ["train", "score"])
    fill(client, name, ["a"])
    client.register_partition(name, FIELDS, 4, ["train", "score"])
    with pytest.raises(PartitionConflict):
        client.register_partition(name, FIELDS, 5, ["train", "score"])
    with pytest.raises(PartitionConflict):
        client.register_partition(name, FIELDS, 4, ["train"])
    for arguments in (
        (["a", "a"], 1, ["t"]),
        ([], 1, ["t"]),
        ("ab", 1, ["t"]),
        (["a"], 0, ["t"]),
        (["a"], 1, ["t"] * 2),
    ):
        with pytest.raises(SchemaMismatch):
            client.register_partition("bad", *arguments)
    for dtype in ("float12", torch.quint8):
        with pytest.raises(ValueError, match="dtype"):
            client.register_partition("bad", [Field("a", dtype)], 1, ["t"])


def test_a_field_may_be_declared_in_part(plane: PlaneUnderTest) -> None:
    client, name = plane.open(), plane.partition()
    fields = [Field("ids", ragged=True), Field("box", torch.float32, torch.Size([4])), Field("logp", torch.float32)]
    client.register_partition(name, fields, 2, ["t"])
    with pytest.raises(SchemaMismatch, match="'ids'"):
        client.put_samples(["a", "b"], name, {"ids": torch.ones(2)})
    with pytest.raises(SchemaMismatch, match="'box'"):
        client.put_samples(["a", "b"], name, {"box": torch.ones(2, 3)})
    client.put_samples(["a", "b"], name, {"ids": torch.ones(2, 3), "box": torch.ones(2, 4), "logp": torch.ones(2)})
    got = client.get_samples(["b"], name, ["ids", "box", "logp"])
    assert got["ids"].is_nested
    assert got["box"].shape == (1, 4)
    with pytest.raises(SchemaMismatch, match="'logp'"):
        client.put_samples(["a", "b"], name, {"logp": torch.ones(2, 3)})  # the first put said what it is


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


def test_every_client_is_a_data_plane_client(plane: PlaneUnderTest) -> None:
    assert isinstance(plane.open(), DataPlaneClient)
