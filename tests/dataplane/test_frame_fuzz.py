"""Hostile and damaged bytes: CorruptFrame or equal shapes; no crash, no read out of bounds, no huge allocation."""

from __future__ import annotations

import os
import random
import resource
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from spanwise.dataplane.errors import CorruptFrame, UnsafeObject
from spanwise.dataplane.frame_format import PREFIX, PREFIX_BYTES, align, write_prefix
from spanwise.dataplane.frame_writer import encode_frame
from spanwise.dataplane.frames import Frame, decode_frame, read_header
from spanwise.dataplane.objects import decode_object, encode_object
from tests.dataplane.test_frames import rollout

Shapes = dict[str, Any]


def touch(buffer: bytes | bytearray) -> Shapes:
    """Decode everything there is, reading every byte, and say what shapes came out."""
    frame = decode_frame(buffer)
    for name in frame.columns:
        frame.values(name).float().sum()
    assert isinstance(frame, Frame)
    objects = {name: [repr(column[row]) for row in range(len(column))] for name, column in frame.objects.items()}
    return {
        "columns": {name: (column.values.shape, column.values.dtype) for name, column in frame.columns.items()},
        "offsets": frame.starts,
        "objects": objects,
        "tags": frame.tags,
    }


@pytest.fixture(scope="module")
def plain_frame() -> bytes:
    return bytes(encode_frame(**rollout()))


@pytest.fixture(scope="module")
def checked_frame() -> bytes:
    return bytes(encode_frame(**rollout(), checksums=True))


@pytest.mark.parametrize(("checked", "flip"), [(False, 0x01), (False, 0xFF), (True, 0x80)])
def test_every_single_byte_flip(plain_frame: bytes, checked_frame: bytes, checked: bool, flip: int) -> None:
    good = checked_frame if checked else plain_frame
    expected = touch(good)
    survived = 0
    for place in range(len(good)):
        damaged = bytearray(good)
        damaged[place] ^= flip
        try:
            assert touch(damaged) == expected
            survived += 1
        except CorruptFrame:
            continue
    payload = 0 if checked else 3 * 8 + 2 * 8 + 5 * 4 + 5 * 8 + 3 * 4
    gaps = sum(1 for _ in gap_bytes(good))
    assert survived == gaps + payload


def gap_bytes(good: bytes) -> Iterator[int]:
    """The alignment bytes, which mean nothing."""
    header_bytes = PREFIX.unpack(good[: PREFIX.size])[3]
    yield from range(PREFIX_BYTES + header_bytes, align(PREFIX_BYTES + header_bytes))
    header = msgspec.msgpack.decode(good[PREFIX_BYTES : PREFIX_BYTES + header_bytes])
    for offset, length, _ in header["sections"]:
        yield from range(offset + length, offset + align(length))


def test_every_truncation(plain_frame: bytes) -> None:
    for size in range(len(plain_frame)):
        with pytest.raises(CorruptFrame):
            decode_frame(plain_frame[:size])


def reheaded(good: bytes, header: bytes) -> bytes:
    """The same payload under another header, with valid checksums: what an attacker would send."""
    old = PREFIX.unpack(good[: PREFIX.size])[3]
    body = good[align(PREFIX_BYTES + old) :]
    start = align(PREFIX_BYTES + len(header))
    return write_prefix(header, start + len(body)) + header + bytes(start - PREFIX_BYTES - len(header)) + body


def integers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every integer in a header."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from integers(item, (*path, key))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from integers(item, (*path, place))
    elif isinstance(value, int):
        yield path


INTEGERS = [-1, 0, 1, 2, 63, 64, 65, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 2**64 - 1]


def header_of(good: bytes) -> bytes:
    return good[PREFIX_BYTES : PREFIX_BYTES + PREFIX.unpack(good[: PREFIX.size])[3]]


def with_integer(good: bytes, value: int) -> Iterator[bytes]:
    """The frame once for every integer of its header, which is then ``value``."""
    raw = header_of(good)
    for path in integers(msgspec.msgpack.decode(raw)):
        header = msgspec.msgpack.decode(raw)
        holder = header
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value
        yield reheaded(good, msgspec.msgpack.encode(header))


def with_header_bytes(good: bytes) -> Iterator[bytes]:
    """The frame with one byte of its header changed: to the markers that promise most, and by chance."""
    raw = header_of(good)
    chance = random.Random(0)
    for place in range(len(raw)):
        for byte in (0xDD, 0xDF, chance.randrange(256)):
            damaged = bytearray(raw)
            damaged[place] = byte
            yield reheaded(good, bytes(damaged))


def refusals(frames: Iterator[bytes]) -> int:
    """How many of the frames are corrupt; the others are read to their last byte."""
    refused = 0
    for hostile in frames:
        try:
            touch(hostile)
        except CorruptFrame as problem:
            if isinstance(problem.__cause__, MemoryError):
                raise
            refused += 1
    return refused


@pytest.mark.parametrize("value", INTEGERS)
def test_header_integers_with_valid_checksums(plain_frame: bytes, value: int) -> None:
    tracemalloc.start()
    refusals(with_integer(plain_frame, value))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_header_bytes_with_valid_checksums(plain_frame: bytes) -> None:
    tracemalloc.start()
    refused = refusals(with_header_bytes(plain_frame))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused > len(header_of(plain_frame))
    assert peak < 4 << 20


ROOM = 64 << 20


def fuzz_in_little_memory() -> None:
    """All of the fuzz where the kernel refuses memory, torch's included: the test below runs it in its own process."""
    good = bytes(encode_frame(**rollout()))
    touch(good)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM,) * 2)
    with pytest.raises(RuntimeError, match="memory"):
        torch.empty(2 * ROOM, dtype=torch.uint8)
    refused = sum(refusals(with_integer(good, value)) for value in INTEGERS) + refusals(with_header_bytes(good))
    flipped = (good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :] for place in range(len(good)))
    print(refused + refusals(flipped))


def test_no_fuzz_asks_the_kernel_for_memory() -> None:
    """tracemalloc does not see what torch allocates: here every allocation counts."""
    code = "from tests.dataplane import test_frame_fuzz; test_frame_fuzz.fuzz_in_little_memory()"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 1000


def with_section(good: bytes, number: int, content: bytes) -> bytes:
    """The frame with other bytes in one section, of its old length, and valid checksums."""
    raw = header_of(good)
    header = msgspec.msgpack.decode(raw)
    place, length, crc = header["sections"][number]
    assert len(content) == length
    header["sections"][number][2] = None if crc is None else zlib.crc32(content)
    start = align(PREFIX_BYTES + len(raw)) + place
    return reheaded(good[:start] + content + good[start + length :], msgspec.msgpack.encode(header))


OFFSETS = [
    [-1, 0, 1, 5],
    [0, -1, 2, 5],
    [0, 3, 2, 5],
    [0, 5, 5, 4],
    [0, 3, 3, 6],
    [0, 3, 3, 2**62],
    [0, 2**63 - 1, 2**63 - 1, 2**63 - 1],
    [1, 3, 3, 5],
    [0, 3, -(2**63), 5],
]


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_negative_overlapping_and_huge_offsets_with_valid_checksums(plain_frame: bytes, offsets: list[int]) -> None:
    header = read_header(plain_frame)
    places = [group.section for group in header.groups] + [column.offsets for column in header.objects]
    assert header.tags is not None
    for place in (*places, header.tags.offsets):
        hostile = with_section(plain_frame, place, struct.pack("<4q", *offsets))
        with pytest.raises(CorruptFrame):
            touch(hostile)


def test_any_payload_with_valid_checksums(plain_frame: bytes) -> None:
    """Random bytes in every section: offsets and objects are judged, values are only numbers."""
    chance = random.Random(0)
    header = read_header(plain_frame)
    frames = [
        with_section(plain_frame, place, chance.randbytes(section.length))
        for _ in range(30)
        for place, section in enumerate(header.sections)
    ]
    shapes = [touch(hostile) for hostile in frames if not refusals(iter([hostile]))]
    expected = touch(plain_frame)
    assert len(shapes) < len(frames)
    assert all((shape["columns"], shape["offsets"]) == (expected["columns"], expected["offsets"]) for shape in shapes)


def test_shapes_that_overflow_are_corrupt() -> None:
    """No element, so no byte is missing: only the product of the dimensions is beyond any tensor."""
    good = bytes(encode_frame({"x": torch.ones(2, 0, 3)}))
    header = msgspec.msgpack.decode(header_of(good))
    for rows, tail in ((2, [2**62, 2**62, 0]), (2, [0, 2**62, 2**62]), (2, [2**58, 0]), (2, [0] * 65), (2**31, [0, 3])):
        header["rows"], header["fields"][0][2] = rows, tail
        with pytest.raises(CorruptFrame):
            decode_frame(reheaded(good, msgspec.msgpack.encode(header)))


@pytest.mark.parametrize("total", [0, 32, 63, 2**31, 2**63, 2**64 - 1])
@pytest.mark.parametrize("header_bytes", [0, 1, 2**16, 2**32 - 1])
def test_prefix_integers_with_valid_checksums(plain_frame: bytes, total: int, header_bytes: int) -> None:
    magic, version, flags, _, _, crc = PREFIX.unpack(plain_frame[: PREFIX.size])
    prefix = PREFIX.pack(magic, version, flags, header_bytes, total, crc)
    hostile = prefix + struct.pack("<I", zlib.crc32(prefix)) + plain_frame[PREFIX_BYTES:]
    with pytest.raises(CorruptFrame):
        decode_frame(hostile)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\xdd\x00\x00\x00\x01" * 200,
        b"\xc7\x01\x01\xc0",
        b"\xc8\xff\xff\x01",
        b"\xc7\x01\x63\x00",
        b"\xc7\x03\x02abc",
        b"\xd4\x03\xc0",
        b"\xff\xff",
        b"\xc1",
        msgspec.msgpack.encode(msgspec.msgpack.Ext(3, msgspec.msgpack.encode(["|O8", [1], b"12345678"]))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(3, msgspec.msgpack.encode(["<f4", [2**40, 2**40], b""]))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(3, msgspec.msgpack.encode(["<f4", [-1], b"1234"]))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(4, msgspec.msgpack.encode(["object", [1], b"1234"]))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(4, msgspec.msgpack.encode(["float32", [2], b"1234"]))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(3, msgspec.msgpack.encode(["<f4", [2**61, 2**61, 0], b""]))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(4, msgspec.msgpack.encode(["float32", [2**61, 2**61, 0], b""]))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(5, b"1" * 5000)),
        b"\x91" * 66 + b"\xc0",
        b"\x81\xa1a" * 66 + b"\xc0",
    ],
)
def test_hostile_objects_are_refused_without_allocating(data: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(CorruptFrame):
        decode_object(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_what_may_be_written_is_not_too_deep_to_read() -> None:
    value: Any = None
    for _ in range(65):
        value = [value, "\u0080" * 80]  # text whose bytes look like containers
    with pytest.raises(UnsafeObject, match="deeper"):
        encode_object(value, field="f", row=0)
    written = encode_object(value[0], field="f", row=0)
    assert decode_object(written) == value[0]


def test_a_tower_of_tuples_is_refused() -> None:
    data = msgspec.msgpack.encode(None)
    for _ in range(70):
        data = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode([msgspec.Raw(data)])))
    with pytest.raises(CorruptFrame):
        decode_object(data)
