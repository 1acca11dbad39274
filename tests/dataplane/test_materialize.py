"""``materialize``: layouts, pad values, what is widened, buffers of the caller's, nested inputs of any kind."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from spanwise.batch import BatchedDataDict
from spanwise.dataplane.codec import materialize, to_nested_by_length
from spanwise.dataplane.schema import DTYPES
from tests.dataplane.test_codec import random_tensor, same


def test_materialize_layouts_and_storage() -> None:
    nested = to_nested_by_length(torch.ones(2, 3), torch.tensor([3, 1]))
    flat = torch.ones(2)
    batch = materialize(TensorDict({"x": nested, "y": flat}, batch_size=[2]))
    assert isinstance(batch, BatchedDataDict)
    assert batch["y"].data_ptr() == flat.data_ptr()
    jagged = materialize({"x": nested, "r": torch.ones(2, 3)}, layout="jagged", pad_to_seqlen=9)
    assert jagged["x"].is_nested
    assert jagged["r"].shape == (2, 3)
    with pytest.raises(ValueError, match="layout is 'diagonal'"):
        materialize({"x": nested}, layout="diagonal")
    with pytest.raises(TypeError, match="'inner'"):
        materialize(TensorDict({"inner": TensorDict({"a": torch.ones(2)}, batch_size=[2])}, batch_size=[2]))


def test_pad_values_are_exact() -> None:
    nested = to_nested_by_length(torch.ones(2, 2, dtype=torch.int64), torch.tensor([2, 1]))
    for value in (2**53 + 1, -(2**63), 2**63 - 1, -100):
        assert materialize({"x": nested}, pad_value_dict={"x": value})["x"][1, 1].item() == value
    for value in (0.5, float("nan"), 2**63, float("inf")):
        with pytest.raises(ValueError, match="'x'"):
            materialize({"x": nested}, pad_value_dict={"x": value})
    mask = to_nested_by_length(torch.zeros(2, 2, dtype=torch.bool), torch.tensor([2, 1]))
    assert materialize({"x": mask}, pad_value_dict={"x": 1})["x"].tolist() == [[False, False], [False, True]]
    scores = to_nested_by_length(torch.zeros(2, 2), torch.tensor([2, 1]))
    assert materialize({"x": scores}, pad_value_dict={"x": float("-inf")})["x"][1, 1] == float("-inf")


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float32, 1e39), (torch.float16, -1e6), (torch.float8_e5m2fnuz, 1e6), (torch.int8, 10**400)],
)
def test_a_pad_value_beyond_the_dtype_is_refused(dtype: torch.dtype, value: float) -> None:
    nested = to_nested_by_length(torch.zeros(2, 2).to(dtype), torch.tensor([2, 1]))
    with pytest.raises(ValueError, match=r"'x'.*cannot hold.*Fix:"):
        materialize({"x": nested}, pad_value_dict={"x": value})


def test_pad_to_seqlen_reaches_the_fields_it_should() -> None:
    nested = to_nested_by_length(torch.ones(2, 3), torch.tensor([3, 1]))
    batch = {"ids": nested, "aligned": torch.ones(2, 3), "topk": torch.ones(2, 2, 2), "reward": torch.ones(2)}
    everything = materialize(batch, pad_to_seqlen=5, pad_value_dict={"aligned": 7})
    assert {name: tuple(column.shape) for name, column in everything.items()} == {
        "ids": (2, 5),
        "aligned": (2, 5),
        "topk": (2, 5, 2),
        "reward": (2,),
    }
    assert everything["aligned"][0].tolist() == [1, 1, 1, 7, 7]
    named = materialize(batch, pad_to_seqlen=5, seq_fields={"ids"})
    assert (named["ids"].shape[1], named["aligned"].shape[1], named["topk"].shape[1]) == (5, 3, 2)
    spared = materialize(batch, pad_to_seqlen=5, no_pad_fields={"topk"})
    assert (spared["aligned"].shape[1], spared["topk"].shape[1]) == (5, 2)
    assert materialize(batch, pad_to_seqlen=2)["ids"].shape == (2, 3)


def test_out_refuses_a_buffer_that_does_not_fit() -> None:
    nested = to_nested_by_length(torch.ones(2, 3), torch.tensor([3, 1]))
    for wrong in (torch.empty(2, 2), torch.empty(1, 3), torch.empty(2, 3, 1), torch.empty(2, 3).long()):
        with pytest.raises(ValueError, match=r"out\['x'\]"):
            materialize({"x": nested}, out={"x": wrong})
    rectangle = torch.ones(2, 3)
    reused = materialize({"x": rectangle}, out={"x": torch.empty(2, 3)})["x"]
    assert reused.data_ptr() != rectangle.data_ptr()
    assert torch.equal(reused, rectangle)


def test_out_takes_columns_without_a_second_dimension() -> None:
    buffer = torch.zeros(3)
    reused = materialize({"reward": torch.tensor([1.0, 2.0])}, out={"reward": buffer})["reward"]
    assert reused.tolist() == [1, 2]
    assert buffer.tolist() == [1, 2, 0]
    for wrong in (torch.zeros(1), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"out\['reward'\]"):
            materialize({"reward": torch.tensor([1.0, 2.0])}, out={"reward": wrong})


def test_a_batch_may_be_read_into_its_own_buffer() -> None:
    buffer = {"x": torch.zeros(3, 6)}
    first = materialize({"x": torch.arange(6.0).view(2, 3)}, out=buffer)
    again = materialize(first, pad_to_seqlen=4, pad_value_dict={"x": -1}, out=buffer)
    assert again["x"].tolist() == [[0, 1, 2, -1], [3, 4, 5, -1]]


@pytest.mark.gpu
def test_out_on_another_device() -> None:
    nested = to_nested_by_length(torch.arange(6.0).view(2, 3), torch.tensor([3, 1]))
    expected = materialize({"x": nested}, pad_value_dict={"x": -1})["x"]
    there = materialize({"x": nested}, pad_value_dict={"x": -1}, out={"x": torch.zeros(2, 3, device="cuda")})["x"]
    back = materialize({"x": nested.cuda()}, pad_value_dict={"x": -1}, out={"x": torch.zeros(2, 3)})["x"]
    assert there.is_cuda
    assert not back.is_cuda
    assert torch.equal(there.cpu(), expected)
    assert torch.equal(back, expected)


def test_every_dtype_that_may_travel_packs() -> None:
    for dtype in DTYPES.values():
        padded = random_tensor((2, 3), dtype)
        back = materialize({"x": to_nested_by_length(padded, torch.tensor([3, 3]))})["x"]
        assert same(back, padded)


def test_nested_inputs_of_other_layouts_read_back() -> None:
    rows = [torch.arange(3), torch.arange(1)]
    strided = torch.nested.nested_tensor(rows, layout=torch.strided)
    assert materialize({"x": strided})["x"].tolist() == [[0, 1, 2], [0, 0, 0]]
    narrowed = torch.nested.narrow(
        torch.arange(8).view(2, 4), 1, torch.tensor([1, 0]), torch.tensor([2, 3]), layout=torch.jagged
    )
    assert materialize({"x": narrowed})["x"].tolist() == [[1, 2, 0], [4, 5, 6]]


def test_a_ragged_dimension_in_another_place_is_refused() -> None:
    rows: list[Any] = [torch.ones(2, 3), torch.ones(4, 3)]
    turned = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ValueError, match=r"row 1.*transposed.*Fix:"):
        materialize({"x": turned})
