"""BatchedDataDict: every transform, over every kind of column, and how a batch becomes a trainer's arguments."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spanwise.batch import IGNORE_INDEX, BatchedDataDict, for_trainer, is_column, model_inputs


def columns(rows: int = 4) -> BatchedDataDict:
    info = np.empty(rows, dtype=object)
    info[:] = [{"row": row} for row in range(rows)]
    return BatchedDataDict(
        {
            "ids": torch.arange(rows * 3).view(rows, 3),
            "ragged": torch.nested.nested_tensor([torch.full((row,), row) for row in range(rows)], layout=torch.jagged),
            "info": info,
            "names": [f"n{row}" for row in range(rows)],
            "labels_shifted": False,
            "scale": torch.tensor(2.0),
        }
    )


def rows_of(batch: BatchedDataDict) -> list[Any]:
    return [
        (ids.tolist(), ragged.tolist(), info["row"], name)
        for ids, ragged, info, name in zip(
            batch["ids"], batch["ragged"].unbind(), batch["info"], batch["names"], strict=True
        )
    ]


def test_size_and_columns() -> None:
    assert columns().size == 4
    assert BatchedDataDict().size == 0
    assert columns().data["labels_shifted"] is False
    assert [is_column(value) for value in (torch.tensor(1), torch.ones(1), [], np.ones(1), "text", 3)] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(ValueError, match="different numbers of rows"):
        _ = BatchedDataDict({"a": torch.ones(2), "b": [1]}).size


@given(start=st.integers(-5, 5), end=st.integers(-5, 5))
def test_slice_agrees_with_lists(start: int, end: int) -> None:
    batch = columns()
    part = batch.slice(start, end)
    assert rows_of(part) == rows_of(batch)[start:end]
    assert part["labels_shifted"] is False
    assert part["scale"] == 2.0


@given(rows=st.lists(st.integers(-4, 3), max_size=6))
def test_select_agrees_with_lists(rows: list[int]) -> None:
    batch = columns()
    for wanted in (rows, torch.tensor(rows, dtype=torch.long)):
        assert rows_of(batch.select(wanted)) == [rows_of(batch)[row] for row in rows]


def test_select_outside_is_refused() -> None:
    with pytest.raises(IndexError, match="rows \\[4\\]"):
        columns().select([0, 4])


def test_concat_undoes_slicing_and_pads_where_asked() -> None:
    batch = columns()
    parts = [batch.slice(0, 1), batch.slice(1, 1), batch.slice(1, 4)]
    joined = BatchedDataDict.concat([part for part in parts if part.size])
    assert rows_of(joined) == rows_of(batch)
    assert BatchedDataDict.concat([]) == {}
    narrow, wide = {"x": torch.ones(1, 2)}, {"x": torch.ones(2, 3)}
    assert BatchedDataDict.concat([narrow, wide], {"x": -1})["x"].tolist() == [[1, 1, -1], [1, 1, 1], [1, 1, 1]]
    with pytest.raises(ValueError, match="pad_values"):
        BatchedDataDict.concat([narrow, wide])
    with pytest.raises(ValueError, match="batch 1 has keys"):
        BatchedDataDict.concat([narrow, {"y": torch.ones(1)}])
    with pytest.raises(ValueError, match="'flag'"):
        BatchedDataDict.concat([{"flag": True}, {"flag": False}])


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=9), count=st.integers(1, 4))
def test_shards_are_balanced_and_lose_nothing(lengths: list[int], count: int) -> None:
    batch = BatchedDataDict({"row": torch.arange(len(lengths)), "input_lengths": torch.tensor(lengths)})
    shards = batch.shard(count)
    assert sorted(row for shard in shards for row in shard["row"].tolist()) == list(range(len(lengths)))
    sizes = [shard.size for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    assert [shard["row"].tolist() for shard in batch.shard(count, lengths)] == [s["row"].tolist() for s in shards]
    with pytest.raises(ValueError, match="lengths were given"):
        batch.shard(count, [1] * (len(lengths) + 1))


def test_micro_batches_cover_the_batch() -> None:
    batch = columns()
    parts = list(batch.micro_batches(3))
    assert [part.size for part in parts] == [3, 1]
    assert [row for part in parts for row in rows_of(part)] == rows_of(batch)
    assert list(BatchedDataDict().micro_batches(2)) == []
    with pytest.raises(ValueError, match="micro-batch size is 0"):
        list(batch.micro_batches(0))


def test_rows_of_a_packed_batch_do_not_stand_alone() -> None:
    """With one document a row nothing else gives it away, and a part's pairs would name another part's documents."""
    packed = BatchedDataDict(
        {
            "input_ids": torch.ones(2, 3),
            "sample_mask": torch.ones(2),
            "alignment_pair_document": torch.tensor([[0], [1]]),
        }
    )
    for split in (
        lambda: packed.slice(1, 2),
        lambda: packed.select([1]),
        lambda: packed.shard(2),
        lambda: list(packed.micro_batches(1)),
        lambda: BatchedDataDict.concat([packed, packed]),
    ):
        with pytest.raises(ValueError, match=r"packed batch.*expected.*probably.*Fix:"):
            split()
    assert packed.to("cpu").size == 2


def test_to_moves_tensors_and_shares_the_rest() -> None:
    batch = columns()
    moved = batch.to("meta")
    assert moved["ids"].device.type == "meta"
    assert moved["info"] is batch["info"]
    assert batch["ids"].device.type == "cpu"


def test_transforms_do_not_change_their_input() -> None:
    batch, again = columns(), columns()
    batch.slice(0, 2)
    batch.select([1])
    batch.shard(2)
    BatchedDataDict.concat([batch, again])
    assert rows_of(batch) == rows_of(again)
    assert set(batch) == set(again)


def test_model_inputs_leaves_bookkeeping_out() -> None:
    batch = {
        "input_ids": torch.ones(1, 3, dtype=torch.long),
        "token_mask": torch.tensor([[1, 1, 0]]),
        "labels": torch.ones(1, 3),
        "teacher_ids": torch.ones(1, 2),
        "alignment_pair_valid": torch.ones(1),
        "labels_shifted": False,
        "idx": [0],
    }
    inputs = model_inputs(batch)
    assert set(inputs) == {"input_ids", "attention_mask"}
    packed = model_inputs({**batch, "segment_ids": torch.tensor([[1, 2, 0]])})
    assert packed["attention_mask"].shape == (1, 1, 3, 3)


def ids_and_mask(rows: list[dict[str, Any]]) -> BatchedDataDict:
    ids = torch.tensor([row["ids"] for row in rows])
    return BatchedDataDict({"input_ids": ids, "token_mask": (ids > 0).long(), "labels_shifted": False})


def shifted(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ids = torch.tensor([row["ids"] for row in rows])
    return {"input_ids": ids, "labels": ids.roll(-1, 1), "labels_shifted": True}


def test_for_trainer_makes_labels_and_stays_picklable() -> None:
    collator = pickle.loads(pickle.dumps(for_trainer(ids_and_mask)))
    batch = collator([{"ids": [5, 6, 0]}])
    assert batch["labels"].tolist() == [[5, 6, IGNORE_INDEX]]
    assert "shift_labels" not in batch
    assert "labels_shifted" not in batch
    moved = for_trainer(shifted)([{"ids": [5, 6, 7]}])
    assert moved["labels"] is moved["shift_labels"]


def test_for_trainer_masks_seams_samples_and_unmasked_positions() -> None:
    def packed(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {**ids_and_mask(rows), "segment_ids": torch.tensor([[1, 1, 2, 2]])}

    assert for_trainer(packed)([{"ids": [1, 2, 3, 4]}])["labels"].tolist() == [[IGNORE_INDEX, 2, IGNORE_INDEX, 4]]

    def gated(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {**ids_and_mask(rows), "sample_mask": torch.tensor([1.0, 0.0])}

    both = for_trainer(gated)([{"ids": [1, 2]}, {"ids": [3, 4]}])
    assert both["labels"].tolist() == [[1, 2], [IGNORE_INDEX, IGNORE_INDEX]]

    def packed_and_gated(rows: list[dict[str, Any]]) -> dict[str, Any]:
        segments = torch.tensor([[1, 1, 2, 2, 0], [1, 1, 1, 0, 0]])
        return {**ids_and_mask(rows), "segment_ids": segments, "sample_mask": torch.tensor([0.0, 1.0, 0.5])}

    some = for_trainer(packed_and_gated)([{"ids": [1, 2, 3, 4, 0]}, {"ids": [5, 6, 7, 0, 0]}])
    none = IGNORE_INDEX
    assert some["labels"].tolist() == [[none, none, none, 4, none], [none, 6, 7, none, none]]

    def masked(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"input_ids": torch.tensor([[1, 9]]), "target_ids": torch.tensor([[1, 2]])}

    with pytest.raises(ValueError, match="mask_token_id"):
        for_trainer(masked)([{}])
