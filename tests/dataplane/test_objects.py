"""Objects: the allow-list travels exactly, everything else is refused by place; none of it is ever pickled."""

from __future__ import annotations

import math
import pathlib
import pickle
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spanwise.dataplane.errors import UnsafeObject
from spanwise.dataplane.objects import check_counts, decode_object, encode_object

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.datetimes()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=12,
)


@given(value=VALUES)
def test_the_allow_list_travels_exactly(value: Any) -> None:
    back = decode_object(encode_object(value, field="f", row=0))
    assert repr(back) == repr(value)


@given(value=VALUES)
def test_the_walker_accepts_what_we_write(value: Any) -> None:
    check_counts(b"\xdd\x00\x00\x00\x01" + encode_object(value, field="f", row=0))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.array(1.5),
        np.empty((0, 3), np.float32),
        np.ones(2, ">i2"),
        np.array([1j]),
        np.arange(6).reshape(2, 3).T,
    ],
)
def test_arrays_keep_dtype_shape_and_values(array: np.ndarray) -> None:
    back = decode_object(encode_object({"a": array}, field="f", row=0))["a"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert (back == array).all()
    assert back.flags.writeable


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3).t(),
        torch.tensor(2.5),
        torch.ones(2, dtype=torch.bfloat16),
        torch.empty(0, 2),
        torch.ones(2).to(torch.float8_e4m3fn),
    ],
)
def test_tensors_keep_dtype_shape_and_bytes(tensor: torch.Tensor) -> None:
    back = decode_object(encode_object([tensor], field="f", row=0))[0]
    assert back.dtype == tensor.dtype
    assert torch.equal(back.float(), tensor.float())


def test_special_values() -> None:
    assert math.isnan(decode_object(encode_object(float("nan"), field="f", row=0)))
    aware = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    assert decode_object(encode_object(aware, field="f", row=0)) == aware
    for number in (2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**5000):
        assert decode_object(encode_object(number, field="f", row=0)) == number


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pathlib.Path, ("never",))


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Payload(), "$"),
        ({"a": [1, {"b": Payload()}]}, "$.a[1].b"),
        ({1: "x"}, "$"),
        ({"s": {1}}, "$.s"),
        (np.float32(1), "$"),
        (np.array([None]), "$"),
        (np.array(["text"]), "$"),
        (LOOP, "$" + "[0]" * 65),
        (1 << (8 * 4096), "$"),
        ("\ud800", "$"),
        ({"\ud800": 1}, "$"),
        (pathlib.Path("x"), "$"),
        (range(3), "$"),
        (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "$"),
    ],
    ids=range(14),
)
def test_everything_else_is_refused_by_place(value: Any, path: str) -> None:
    with pytest.raises(UnsafeObject) as error:
        encode_object(value, field="info", row=3)
    assert (error.value.field, error.value.row, error.value.path) == ("info", 3, path)
    assert "Fix:" in str(error.value)


def test_nothing_in_the_room_imports_pickle() -> None:
    import spanwise.dataplane

    for source in pathlib.Path(spanwise.dataplane.__file__).parent.rglob("*.py"):
        text = source.read_text()
        assert "import pickle" not in text
        assert "torch.load" not in text


def test_a_pickle_is_just_bytes() -> None:
    data = pickle.dumps(Payload())
    assert decode_object(encode_object(data, field="f", row=0)) == data
