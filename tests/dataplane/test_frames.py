"""Frames: what is written is read, in one buffer, without a copy; select, pad and nest; several length groups."""

from __future__ import annotations

import mmap
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spanwise.dataplane.codec import to_nested_by_length
from spanwise.dataplane.errors import CorruptFrame, UnsafeObject
from spanwise.dataplane.frame_format import ALIGNMENT, MAX_EMPTY_ROWS, PREFIX, PREFIX_BYTES
from spanwise.dataplane.frame_writer import encode_frame
from spanwise.dataplane.frames import decode_frame, read_header
from spanwise.dataplane.schema import DTYPES
from tests.dataplane.test_codec import random_tensor, same


def rollout(rows: int = 3) -> dict[str, Any]:
    """Arguments of encode_frame for a batch with two length groups, a rectangle, objects and tags."""
    student, teacher = [3, 0, 2][:rows], [1, 4, 0][:rows]
    return {
        "fields": {
            "ids": random_tensor((rows, 3), torch.int64, 1),
            "features": random_tensor((rows, 3, 2), torch.bfloat16, 2),
            "teacher_ids": to_nested_by_length(random_tensor((rows, 4), torch.int64, 3), torch.tensor(teacher)),
            "reward": torch.arange(float(rows)),
        },
        "groups": {"tok": torch.tensor(student), "teacher": teacher},
        "objects": {"info": [{"a": (1, None)}, None, "ü"][:rows]},
        "tags": [{"row": row} for row in range(rows)],
    }


def test_what_is_written_is_read() -> None:
    batch = rollout()
    frame = decode_frame(encode_frame(**batch))
    assert frame.size == 3
    assert frame.lengths("tok") == [3, 0, 2]
    assert frame.lengths("teacher") == [1, 4, 0]
    assert same(frame.values("ids"), to_nested_by_length(batch["fields"]["ids"], batch["groups"]["tok"]).values())
    assert same(frame.values("features")[3:], batch["fields"]["features"][2, :2])
    assert same(frame.values("teacher_ids"), batch["fields"]["teacher_ids"].values())
    assert frame.values("reward").tolist() == [0, 1, 2]
    assert [frame.row(row)["info"] for row in range(3)] == batch["objects"]["info"]
    assert frame.tags == batch["tags"]
    assert frame.row(-1)["ids"].tolist() == batch["fields"]["ids"][2, :2].tolist()


def test_select_pad_and_nest() -> None:
    batch = rollout()
    frame = decode_frame(encode_frame(**batch))
    chosen = frame.select([2, 0, 2], ["ids", "info", "reward"])
    assert chosen.field_names == ["ids", "reward", "info"]
    assert chosen.lengths("tok") == [2, 3, 2]
    assert chosen.row(0)["ids"].tolist() == frame.row(2)["ids"].tolist()
    assert [chosen.row(row)["info"] for row in range(3)] == ["ü", {"a": (1, None)}, "ü"]
    assert chosen.tags == [{"row": 2}, {"row": 0}, {"row": 2}]
    padded = frame.padded(pad_values={"ids": -1}, pad_to=5)
    assert padded["ids"].shape == (3, 5)
    assert padded["ids"][1].tolist() == [-1] * 5
    assert padded["features"].shape == (3, 5, 2)
    assert padded["reward"].shape == (3,)
    out = torch.empty(3, 5, dtype=torch.int64)
    assert frame.padded(out={"ids": out}, pad_to=5)["ids"].data_ptr() == out.data_ptr()
    nested = frame.nested()
    assert nested["ids"].is_nested
    assert nested["info"].shape == (3,)
    assert nested["ids"].values().data_ptr() == frame.values("ids").data_ptr()


def test_reading_is_zero_copy_and_sections_are_aligned() -> None:
    buffer = encode_frame(**rollout())
    frame = decode_frame(buffer)
    frame.values("ids")[0] = 77
    assert decode_frame(buffer).values("ids")[0] == 77
    header = read_header(buffer)
    assert all(section.offset % ALIGNMENT == 0 for section in header.sections)
    assert len(buffer) % ALIGNMENT == 0
    assert decode_frame(bytes(buffer)).row(0)["ids"].tolist() == frame.row(0)["ids"].tolist()


def test_a_frame_fits_any_allocator() -> None:
    expected = encode_frame(**rollout())
    mapped = encode_frame(**rollout(), alloc=lambda size: mmap.mmap(-1, size))
    assert bytes(mapped)[: len(expected)] == bytes(expected)
    assert decode_frame(mapped).tags == rollout()["tags"]


@pytest.mark.parametrize("dtype", list(DTYPES.values()))
def test_every_dtype_travels(dtype: torch.dtype) -> None:
    padded = random_tensor((2, 3, 2), dtype)
    frame = decode_frame(encode_frame({"x": padded, "flat": padded[:, 0]}, {"tok": [3, 1]}, group_of={"x": "tok"}))
    assert same(frame.values("x")[3:], padded[1, :1])
    assert same(frame.values("flat"), padded[:, 0])


@given(
    lengths=st.lists(st.integers(0, 5), max_size=5),
    tail=st.lists(st.integers(0, 2), max_size=2),
    checksums=st.booleans(),
)
def test_any_lengths_and_tails_round_trip(lengths: list[int], tail: list[int], checksums: bool) -> None:
    width = max(lengths, default=0)
    padded = random_tensor((len(lengths), width, *tail), torch.float32)
    frame = decode_frame(encode_frame({"x": padded}, {"tok": lengths}, group_of={"x": "tok"}, checksums=checksums))
    for row, length in enumerate(lengths):
        assert same(frame.row(row)["x"], padded[row, :length])
    assert frame.padded()["x"].shape == (len(lengths), width, *tail)


def test_shapes_at_the_edge_travel() -> None:
    deep = torch.arange(2.0).reshape(2, *[1] * 30)
    frame = decode_frame(encode_frame({"deep": deep, "empty": torch.ones(2, 0, 3)}))
    assert torch.equal(frame.values("deep"), deep)
    assert frame.values("empty").shape == (2, 0, 3)
    nothing = decode_frame(encode_frame({"empty": torch.ones(MAX_EMPTY_ROWS, 0)}))
    assert len(nothing.tags) == MAX_EMPTY_ROWS


def test_names_decide_where_shapes_cannot() -> None:
    fields = {"ids": torch.ones(2, 3), "topk": torch.ones(2, 3)}
    frame = decode_frame(encode_frame(fields, {"tok": [3, 1]}, group_of={"ids": "tok"}))
    assert frame.values("topk").shape == (2, 3)
    assert frame.values("ids").shape == (4,)
    with pytest.raises(ValueError, match="'idz'"):
        encode_frame(fields, {"tok": [3, 1]}, group_of={"idz": "tok"})
    with pytest.raises(ValueError, match="group_of"):
        encode_frame(fields, {"a": [3, 1], "b": [1, 3]})
    with pytest.raises(ValueError, match="'ids'"):
        encode_frame(fields, {"tok": [3, 1]}, group_of={"ids": "typo"})
    with pytest.raises(ValueError, match="'ids'"):
        encode_frame(fields, {"tok": [9, 1]}, group_of={"ids": "tok"})


@pytest.mark.parametrize(
    "arguments",
    [
        {"fields": {"a": torch.ones(2), "b": torch.ones(3)}},
        {"fields": {"a": torch.ones(2)}, "groups": {"tok": [1]}},
        {"fields": {"a": torch.ones(2)}, "objects": {"o": [1]}},
        {"fields": {"a": torch.ones(2)}, "tags": [{}]},
        {"fields": {"a": torch.tensor(1.0)}},
        {"fields": {}, "groups": {"tok": [-1, 2]}},
        {"fields": {"a": torch.ones(2)}, "objects": {"a": [1, 2]}},
        {"fields": {"a": torch.ones(MAX_EMPTY_ROWS + 1, 0)}},
    ],
)
def test_parts_that_do_not_match_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Fix:"):
        encode_frame(**arguments)


def test_selecting_what_is_not_there() -> None:
    frame = decode_frame(encode_frame(**rollout()))
    with pytest.raises(KeyError, match="typo"):
        frame.select([0], ["typo"])
    for row in (3, -1):
        with pytest.raises(IndexError):
            frame.select([row])
    with pytest.raises(IndexError):
        frame.row(3)
    for look in (frame.values, frame.lengths):
        with pytest.raises(KeyError, match=r"typo.*Fix:"):
            look("typo")


def test_an_unsafe_object_is_refused_when_writing_and_located() -> None:
    with pytest.raises(UnsafeObject, match=r"field 'info', row 1, at \$\.model\[0\]") as error:
        encode_frame({}, objects={"info": [None, {"model": [object()]}]})
    assert (error.value.field, error.value.row, error.value.path) == ("info", 1, "$.model[0]")
    with pytest.raises(UnsafeObject):
        encode_frame({"o": np.array([{1, 2}], dtype=object)})
    with pytest.raises(UnsafeObject):
        encode_frame({"a": torch.ones(1)}, tags=[{"f": print}])


def test_a_newer_version_says_so() -> None:
    buffer = encode_frame(**rollout())
    magic, _, flags, header_bytes, total, crc = PREFIX.unpack(buffer[: PREFIX.size])
    prefix = PREFIX.pack(magic, 2, flags, header_bytes, total, crc)
    buffer[:PREFIX_BYTES] = prefix + struct.pack("<I", zlib.crc32(prefix))
    with pytest.raises(CorruptFrame, match="version 2"):
        decode_frame(buffer)


def test_a_copy_protects_read_only_bytes() -> None:
    data = bytes(encode_frame({"ids": torch.zeros(3)}))
    frame = decode_frame(bytearray(data))
    frame.values("ids")[0] = 7
    assert frame.values("ids").tolist() == [7, 0, 0]
    assert decode_frame(data).values("ids").tolist() == [0, 0, 0]


def listed_bytes() -> bytes:
    """The example of docs/wire-format.md, read as its reader reads it: place, bytes or ``00 × n``, words."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "wire-format.md").read_text()
    listing = page.split("## An example")[1].split("```")[1].strip()
    listed = bytearray()
    for line in listing.splitlines():
        place, said = re.split(r" {2,}", line)[:2]
        assert int(place, 16) == len(listed), line
        zeros = re.fullmatch(r"00 × (\d+)", said)
        listed += bytes(int(zeros[1])) if zeros else bytes.fromhex(said)
    return bytes(listed)


def test_the_listing_in_the_docs_is_a_frame() -> None:
    listed = listed_bytes()
    assert listed == bytes.fromhex(RECORDED)
    frame = decode_frame(listed)
    assert [frame.row(row)["ids"].tolist() for row in range(2)] == [[1, 2], [3]]
    assert [frame.row(row)["info"] for row in range(2)] == ["a", None]
    assert frame.tags == [{"n": 0}, {"n": 1}]


def test_version_1_stays_readable() -> None:
    """The bytes of docs/wire-format.md's example, written once by the first release."""
    recorded = bytes.fromhex(RECORDED)
    frame = decode_frame(recorded)
    assert [frame.row(row)["ids"].tolist() for row in range(2)] == [[1, 2], [3]]
    assert [frame.row(row)["info"] for row in range(2)] == ["a", None]
    assert frame.tags == [{"n": 0}, {"n": 1}]
    again = encode_frame(
        {"ids": torch.tensor([[1, 2], [3, 0]])}, {"tok": [2, 1]}, {"info": ["a", None]}, [{"n": 0}, {"n": 1}]
    )
    assert bytes(again) == recorded


RECORDED = (
    "5350574652414d4501000000850000004002000000000000247bd41c9532fa9c86a4726f777302a667726f7570739192"
    "a3746f6b00a66669656c64739195a3696473a5696e743634900001a76f626a656374739193a4696e666f0203a4746167"
    "7393a4746167730405a873656374696f6e7396930018ceaaeee8a0934018c093cc8018ceaaeee8a093ccc003cec07976"
    "1393cd010018cea4159d1293cd014008ce28b77c6b000000000000000000000000000000000000000000000000000000"
    "000000000000000002000000000000000300000000000000000000000000000000000000000000000000000000000000"
    "000000000000000000000000000000000100000000000000020000000000000003000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000000000000000000000000000000000000200000000000000"
    "030000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
    "a161c0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000040000000000000008000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000000000000000000081a16e0081a16e010000000000000000"
    "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
)
