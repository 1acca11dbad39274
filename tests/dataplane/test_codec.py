"""The eight functions of the codec, against a per-row twin and row by row through the edges of their contract."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from spanwise.dataplane.codec import (
    materialize,
    maybe_pack_jagged,
    pack_jagged_fields,
    pack_per_token_field,
    response_from_nested,
    stack_or_nest,
    to_nested_by_length,
    unwrap_wire_stripped_payload,
)
from spanwise.dataplane.frame_writer import encode_frame
from tests.reference import dataplane_codec as twin

DTYPE_LIST = [torch.int64, torch.bool, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.complex64]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 120, shape, generator=generator)
    return values.to(torch.float32).to(dtype) if dtype.is_floating_point else values.to(dtype)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit for bit, for dtypes without an equality too."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
    )


@st.composite
def padded_batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = draw(st.integers(1, 6)), draw(st.integers(0, 7))
    tail = draw(st.lists(st.integers(1, 3), max_size=2))
    lengths = draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    dtype = draw(st.sampled_from(DTYPE_LIST))
    return random_tensor((rows, width, *tail), dtype, draw(st.integers(0, 99))), torch.tensor(lengths)


@given(batch=padded_batches(), extra=st.integers(0, 3))
def test_pack_and_materialize_agree_with_the_twin(batch: tuple[torch.Tensor, torch.Tensor], extra: int) -> None:
    padded, lengths = batch
    before = padded.clone()
    nested = to_nested_by_length(padded, lengths)
    rows = [padded[row, :length] for row, length in enumerate(lengths.tolist())]
    assert all(same(a, b) for a, b in zip(nested.unbind(), rows, strict=True))
    longest = max(lengths.tolist())
    assert nested.layout == torch.jagged
    assert nested.offsets().dtype == torch.int64
    assert (nested._min_seqlen, nested._max_seqlen) == (min(lengths.tolist()), longest)
    rectangle = materialize({"x": nested}, pad_to_seqlen=longest + extra)["x"]
    assert same(rectangle, twin.pad(rows, 0, longest + extra))
    buffer = random_tensor((len(rows) + 1, longest + extra + 2, *padded.shape[2:]), padded.dtype)
    reused = materialize({"x": nested}, pad_to_seqlen=longest + extra, out={"x": buffer})["x"]
    assert same(reused, rectangle)
    if buffer.numel() and rectangle.numel():
        assert reused.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert same(padded, before)


@pytest.mark.parametrize("dtype", DTYPE_LIST)
@pytest.mark.parametrize("view", ["plain", "column slice", "every second row", "transposed"])
def test_strided_inputs_keep_their_values(dtype: torch.dtype, view: str) -> None:
    base = random_tensor((6, 9, 2), dtype)
    padded = {
        "plain": base,
        "column slice": base[:, 2:7],
        "every second row": base[::2],
        "transposed": base.transpose(0, 1),
    }[view]
    lengths = torch.arange(padded.shape[0]) % (padded.shape[1] + 1)
    nested = to_nested_by_length(padded, lengths)
    for row, length in enumerate(lengths.tolist()):
        assert same(nested.unbind()[row], padded[row, :length])


def test_lazy_conjugates_are_carried_out() -> None:
    padded = torch.randn(2, 3, dtype=torch.complex64).conj()
    nested = to_nested_by_length(padded, torch.tensor([3, 1]))
    assert torch.equal(nested.unbind()[0], padded[0].resolve_conj())


def test_gradients_flow_through_pack_and_materialize() -> None:
    padded = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([2, 0, 4])

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        return materialize({"x": to_nested_by_length(x, lengths)}, pad_to_seqlen=6)["x"]

    (round_trip(padded) ** 2).sum().backward()
    expected = 2 * padded.detach()
    for row, length in enumerate(lengths.tolist()):
        expected[row, length:] = 0
    assert torch.equal(padded.grad, expected)
    assert torch.autograd.gradcheck(round_trip, (padded,))


def test_response_keeps_gradients() -> None:
    full = torch.randn(2, 5, requires_grad=True)
    nested = to_nested_by_length(full, torch.tensor([5, 3]))
    mask = to_nested_by_length(torch.ones(2, 2), torch.tensor([2, 1]))
    response_from_nested(nested, mask).values().sum().backward()
    assert full.grad.tolist() == [[0, 0, 1, 1, 0], [0, 1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("shape", "lengths", "words"),
    [
        ((4,), [1, 1, 1, 1], "(N, S"),
        ((2, 3), [1, 2, 3], "lengths shape"),
        ((2, 3), [[1], [2]], "lengths shape"),
        ((2, 3), [1, -1], "row 1 has length -1"),
        ((2, 3), [1, 4], "row 1 has length 4"),
    ],
)
def test_bad_lengths_are_named(shape: tuple[int, ...], lengths: list, words: str) -> None:
    with pytest.raises(ValueError) as error:
        to_nested_by_length(torch.zeros(shape), torch.tensor(lengths))
    assert words in str(error.value)
    assert "Fix:" in str(error.value)


@pytest.mark.parametrize("lengths", [[2.9, 1.0], [True, True], [1 + 0j, 1]])
def test_lengths_that_are_no_integers_are_refused(lengths: list[Any]) -> None:
    tensor, column = torch.tensor(lengths), torch.ones(2, 3)
    calls: list[Callable[[], Any]] = [
        lambda: to_nested_by_length(column, tensor),
        lambda: to_nested_by_length(column, tensor, strict=False),
        lambda: pack_jagged_fields({"ids": column}, lengths=tensor, token_aligned_fields={"ids"}),
        lambda: pack_per_token_field(to_nested_by_length(column, torch.tensor([2, 1])), tensor),
        lambda: encode_frame({"ids": column}, {"tok": tensor}, group_of={"ids": "tok"}),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"integer dtype.*Fix:"):
            call()


@pytest.mark.parametrize("lengths", [torch.tensor([[3], [1]]), torch.tensor(3)], ids=["a column", "one number"])
def test_lengths_that_are_no_row_of_numbers_are_refused_everywhere(lengths: torch.Tensor) -> None:
    column = torch.ones(2, 3)
    calls: list[Callable[[], Any]] = [
        lambda: maybe_pack_jagged(column, lengths),
        lambda: pack_jagged_fields({"ids": column}, lengths=lengths),
        lambda: pack_per_token_field(to_nested_by_length(column, torch.tensor([3, 1])), lengths),
        lambda: encode_frame({"ids": column}, {"tok": lengths}, group_of={"ids": "tok"}),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"lengths shape.*Fix:"):
            call()


def test_what_is_nested_already_is_not_packed_again() -> None:
    nested = to_nested_by_length(torch.ones(2, 3), torch.tensor([3, 1]))
    with pytest.raises(ValueError, match=r"nested tensor of .*\(N, S.*Fix:"):
        to_nested_by_length(nested, torch.tensor([3, 1]))


def test_lengths_beyond_the_width_clamp_only_when_asked() -> None:
    nested = to_nested_by_length(torch.arange(6).view(2, 3), torch.tensor([9, 1]), strict=False)
    assert [row.tolist() for row in nested.unbind()] == [[0, 1, 2], [3]]


@pytest.mark.parametrize("shape", [(0, 4), (0, 4, 2), (3, 4), (3, 0), (1, 1)])
def test_no_rows_and_empty_rows(shape: tuple[int, ...]) -> None:
    lengths = torch.zeros(shape[0], dtype=torch.long)
    nested = to_nested_by_length(torch.ones(shape), lengths)
    assert nested.shape[0] == shape[0]
    assert nested.values().shape == (0, *shape[2:])
    assert materialize({"x": nested})["x"].shape == (shape[0], 0, *shape[2:])
    assert materialize({"x": nested}, pad_to_seqlen=2)["x"].tolist() == torch.zeros(shape[0], 2, *shape[2:]).tolist()


@pytest.mark.gpu
def test_cuda_lengths_cost_one_copy_and_agree() -> None:
    padded = torch.randn(5, 7, 3, device="cuda", requires_grad=True)
    lengths = torch.tensor([7, 0, 3, 1, 5], device="cuda")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        nested = to_nested_by_length(padded, lengths)
    copies = [event for event in profile.events() if "Memcpy DtoH" in event.name]
    assert len(copies) == 1
    on_cpu = to_nested_by_length(padded.detach().cpu(), lengths.cpu())
    assert torch.equal(nested.values().cpu(), on_cpu.values())
    out = materialize({"x": nested}, pad_value_dict={"x": -1}, pad_to_seqlen=9)["x"]
    assert torch.equal(out.cpu(), materialize({"x": on_cpu}, pad_value_dict={"x": -1}, pad_to_seqlen=9)["x"])
    out.sum().backward()
    assert padded.grad.sum() == lengths.sum() * 3


def test_stack_or_nest() -> None:
    assert stack_or_nest([]).shape == (0,)
    assert stack_or_nest([torch.ones(2), torch.ones(2)]).shape == (2, 2)
    assert stack_or_nest([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    ragged = stack_or_nest([torch.ones(2, 3), torch.ones(1, 3)])
    assert ragged.is_nested
    assert ragged.values().shape == (3, 3)
    for odd in (torch.ones(2, 2), torch.ones(2, dtype=torch.int64), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"rows \[1\]"):
            stack_or_nest([torch.ones(2), odd])


def test_pack_decides_by_shape() -> None:
    lengths = torch.tensor([3, 1])
    assert maybe_pack_jagged(torch.ones(2, 3), lengths).is_nested
    assert not maybe_pack_jagged(torch.ones(2, 4), lengths).is_nested
    assert not maybe_pack_jagged(torch.ones(2), lengths).is_nested
    assert not maybe_pack_jagged(torch.ones(3, 3), lengths).is_nested
    wide = pack_per_token_field(torch.ones(2, 8), lengths)
    assert wide.values().shape == (4,)
    for narrow in (torch.ones(2, 2), torch.ones(2), torch.ones(3, 3)):
        assert not pack_per_token_field(narrow, lengths).is_nested
    graph = torch.ones(2, 4, requires_grad=True).t()
    passed = maybe_pack_jagged(graph, lengths)
    assert not passed.requires_grad
    assert passed.is_contiguous()


def test_pack_accepts_a_nested_input_of_these_lengths_only() -> None:
    nested = to_nested_by_length(torch.ones(2, 3), torch.tensor([3, 1]))
    for pack in (maybe_pack_jagged, pack_per_token_field):
        assert pack(nested, torch.tensor([3, 1])) is nested
        with pytest.raises(ValueError, match="row lengths"):
            pack(nested, torch.tensor([3, 2]))


def test_names_beat_shapes_and_a_guess_warns() -> None:
    lengths = torch.tensor([3, 1])
    fields = {"ids": torch.ones(2, 5), "grid": torch.ones(2, 3, 4)}
    with pytest.warns(UserWarning, match="'grid'"):
        guessed = pack_jagged_fields(fields, lengths=lengths)
    assert guessed["grid"].is_nested
    assert not guessed["ids"].is_nested
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = pack_jagged_fields(fields, lengths=lengths, token_aligned_fields={"ids"})
        none = pack_jagged_fields(fields, lengths=lengths, token_aligned_fields=set())
    assert named["ids"].is_nested
    assert not named["grid"].is_nested
    assert not none["ids"].is_nested
    with pytest.raises(ValueError, match="typo"):
        pack_jagged_fields(fields, lengths=lengths, token_aligned_fields={"typo"})
    with pytest.raises(ValueError, match="'flat'"):
        pack_jagged_fields({"flat": torch.ones(2)}, lengths=lengths, token_aligned_fields={"flat"})


def test_a_guess_warns_once_per_field_whatever_the_widths() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for width in (3, 4, 5, 6):
            fields = {"grid": torch.ones(2, width, 4), "topk": torch.ones(2, width, 2), "ids": torch.ones(2, width)}
            pack_jagged_fields(fields, lengths=torch.tensor([width, 1]))
    assert [str(warning.message).split("'")[1] for warning in caught] == ["grid", "topk"]


def test_pack_refuses_what_it_cannot_carry() -> None:
    for wrong in ([1, 2], np.ones(2), "text", None):
        with pytest.raises(TypeError, match="'bad'"):
            pack_jagged_fields({"bad": wrong}, lengths=torch.tensor([1, 1]))
    for short in (torch.ones(3), np.array(["a"], dtype=object), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="'bad'"):
            pack_jagged_fields({"bad": short}, lengths=torch.tensor([1, 1]))


def test_the_number_of_rows_comes_from_lengths_or_columns() -> None:
    assert pack_jagged_fields({}, lengths=None).batch_size == torch.Size([0])
    assert pack_jagged_fields({}, lengths=torch.tensor([1, 2])).batch_size == torch.Size([2])
    packed = pack_jagged_fields({"x": torch.ones(3, 2), "o": np.array([1, None, 2], dtype=object)}, lengths=None)
    assert packed.batch_size == torch.Size([3])
    assert not packed["x"].is_nested


AWKWARD_OBJECTS = [None, [1, 2], {"a": None}, "text", torch.ones(2), np.ones(3), (), 5]


def test_object_columns_come_back_one_per_row() -> None:
    column = np.empty(len(AWKWARD_OBJECTS), dtype=object)
    for row, item in enumerate(AWKWARD_OBJECTS):
        column[row] = item
    packed = pack_jagged_fields({"o": column, "n": torch.arange(len(column))}, lengths=None)
    for back in (materialize(packed)["o"], materialize({"o": column})["o"], materialize(packed, "jagged")["o"]):
        assert back.shape == (len(column),)
        assert back.dtype == object
        assert all(a is b or a == b for a, b in zip(back, AWKWARD_OBJECTS, strict=True))
    assert materialize(pack_jagged_fields({"o": np.empty(0, dtype=object)}, lengths=None))["o"].shape == (0,)
    same_for_all = TensorDict({"o": NonTensorData(data="x", batch_size=[2])}, batch_size=[2])
    assert materialize(same_for_all)["o"].tolist() == ["x", "x"]


def test_none_and_missing_differ() -> None:
    packed = pack_jagged_fields({"o": np.array([None, None], dtype=object)}, lengths=None)
    back = materialize(packed)
    assert back["o"].tolist() == [None, None]
    assert "other" not in back


def test_unwrap_maps_only_the_stripped_signature_to_none() -> None:
    assert unwrap_wire_stripped_payload(TensorDict({}, batch_size=[])) is None
    empty_batch = TensorDict({}, batch_size=[0])
    full = TensorDict({"a": torch.ones(())}, batch_size=[])
    for item in (empty_batch, full, 3, None, "x", [1], {"a": 1}):
        assert unwrap_wire_stripped_payload(item) is item
    assert unwrap_wire_stripped_payload(NonTensorData(data={"k": 1}, batch_size=[])) == {"k": 1}
    assert unwrap_wire_stripped_payload(NonTensorData(data=None, batch_size=[])) is None
    salvaged = TensorDict({}, batch_size=[])
    object.__setattr__(salvaged, "_non_tensordict", {"data": 7})
    assert unwrap_wire_stripped_payload(salvaged) == 7


def test_a_column_stripped_on_the_wire_reads_as_none() -> None:
    stripped = TensorDict.lazy_stack([TensorDict({}, batch_size=[]) for _ in range(2)])
    assert materialize({"o": stripped})["o"].tolist() == [None, None]
    stack = NonTensorStack(NonTensorData(data=1, batch_size=[]), NonTensorData(data=None, batch_size=[]))
    assert materialize({"o": stack})["o"].tolist() == [1, None]


@given(counts=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=5))
def test_response_agrees_with_the_twin(counts: list[tuple[int, int]]) -> None:
    totals = [prompt + answer for prompt, answer in counts]
    wanted = [answer for _, answer in counts]
    rows = [torch.arange(total) + 10 * row for row, total in enumerate(totals)]
    full = stack_or_nest(rows) if len(set(totals)) > 1 else to_nested_by_length(torch.stack(rows), torch.tensor(totals))
    mask = to_nested_by_length(torch.ones(len(wanted), max([*wanted, 1])), torch.tensor(wanted))
    got = response_from_nested(full, mask)
    assert [row.tolist() for row in got.unbind()] == [row.tolist() for row in twin.response(rows, wanted)]


def test_response_names_the_row_that_is_too_short() -> None:
    full = to_nested_by_length(torch.ones(2, 3), torch.tensor([3, 2]))
    with pytest.raises(ValueError, match="row 1 has 2 tokens and a response of 2"):
        response_from_nested(full, to_nested_by_length(torch.ones(2, 2), torch.tensor([1, 2])))
    with pytest.raises(ValueError, match="rows"):
        response_from_nested(full, to_nested_by_length(torch.ones(1, 2), torch.tensor([1])))
    with pytest.raises(ValueError, match="rectangle"):
        response_from_nested(torch.ones(2, 3), full)
    empty = to_nested_by_length(torch.ones(2, 3), torch.tensor([0, 2]))
    none = response_from_nested(empty, to_nested_by_length(torch.ones(2, 1), torch.tensor([0, 1])))
    assert none.offsets().tolist() == [0, 0, 1]
