"""The bytes of a frame's prefix and header: how they are laid out, and every check that reading them needs.

docs/wire-format.md describes the format byte by byte. The prefix (32 bytes) carries the sizes and two checksums; the
header is msgpack and names groups, fields, objects, tags and the sections that hold them. Nothing is allocated from a
number that was not first checked against the buffer's own size. O(sections + groups + fields) time.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any

import msgspec

from spanwise.dataplane.errors import CorruptFrame
from spanwise.dataplane.objects import check_counts, is_tensor_shape
from spanwise.dataplane.schema import DTYPES

MAGIC = b"SPWFRAME"
VERSION = 1
READABLE_VERSIONS = (1,)
ALIGNMENT = 64
PREFIX = struct.Struct("<8sHHIQI")  # magic, version, flags (0), header bytes, total bytes, header CRC
PREFIX_BYTES = PREFIX.size + 4  # and the CRC of these 28 bytes
MAX_HEADER_BYTES = 16 << 20
MAX_ROWS = 1 << 31
MAX_EMPTY_ROWS = 1 << 16
"""Rows of a frame that holds no byte of them (all of its columns are of size 0)."""


class Group(msgspec.Struct, frozen=True, array_like=True):
    """A set of row lengths: its name and the section of its N + 1 int64 offsets."""

    name: str
    section: int


class ValueField(msgspec.Struct, frozen=True, array_like=True):
    """A tensor column; ``group`` is an index into groups, or -1 for one entry per row."""

    name: str
    dtype: str
    tail: list[int]
    group: int
    section: int


class ObjectField(msgspec.Struct, frozen=True, array_like=True):
    """An object column: the section of its N + 1 int64 offsets, and the section of the objects' bytes."""

    name: str
    offsets: int
    blobs: int


class Section(msgspec.Struct, frozen=True, array_like=True):
    """Where bytes lie, counted from the first section; ``crc`` is None for unchecked payload."""

    offset: int
    length: int
    crc: int | None


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything about a frame but its payload."""

    rows: int
    groups: list[Group]
    fields: list[ValueField]
    objects: list[ObjectField]
    tags: ObjectField | None
    sections: list[Section]


def align(size: int) -> int:
    """The next multiple of 64."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def write_prefix(header: bytes, total: int) -> bytes:
    """The first 32 bytes of a frame of ``total`` bytes."""
    prefix = PREFIX.pack(MAGIC, VERSION, 0, len(header), total, zlib.crc32(header))
    return prefix + struct.pack("<I", zlib.crc32(prefix))


def read_prefix_and_header(data: memoryview) -> tuple[Header, int, int]:
    """The header, where the first section starts, and the frame's total size; CorruptFrame otherwise."""
    if len(data) < PREFIX_BYTES:
        raise CorruptFrame(f"{len(data)} bytes, fewer than the prefix of {PREFIX_BYTES}", offset=len(data))
    prefix = bytes(data[: PREFIX.size])
    magic, version, flags, header_bytes, total, header_crc = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise CorruptFrame(f"it starts with {magic!r}, not {MAGIC!r}")
    if zlib.crc32(prefix) != int.from_bytes(data[PREFIX.size : PREFIX_BYTES], "little"):
        raise CorruptFrame("the prefix's checksum does not match", offset=PREFIX.size)
    if version not in READABLE_VERSIONS or flags:
        raise CorruptFrame(
            f"format version {version}, flags {flags}; this library reads {READABLE_VERSIONS} (a newer one wrote it)",
            offset=8,
        )
    start = align(PREFIX_BYTES + header_bytes)
    if header_bytes > MAX_HEADER_BYTES or PREFIX_BYTES + header_bytes > total:
        raise CorruptFrame(f"a header of {header_bytes} bytes in a frame of {total}", offset=12)
    if total > len(data):
        raise CorruptFrame(f"{len(data)} bytes of a frame of {total}", offset=len(data))
    raw = bytes(data[PREFIX_BYTES : PREFIX_BYTES + header_bytes])
    if zlib.crc32(raw) != header_crc:
        raise CorruptFrame("the header's checksum does not match", offset=PREFIX_BYTES, section="header")
    try:
        check_counts(raw)
        header = msgspec.msgpack.decode(raw, type=Header)
        _check_header(header, total - start)
    except (ValueError, RecursionError, OverflowError) as problem:
        raise CorruptFrame(str(problem), offset=PREFIX_BYTES, section="header") from problem
    return header, start, total


def _check_header(header: Header, room: int) -> None:
    most = MAX_ROWS if any(section.length for section in header.sections) else MAX_EMPTY_ROWS
    if not 0 <= header.rows <= most:
        raise ValueError(f"{header.rows} rows where at most {most} may be")
    end = 0
    for number, section in enumerate(header.sections):
        if section.offset % ALIGNMENT or section.offset < end or section.length < 0:
            raise ValueError(f"section {number} at {section.offset} overlaps another or is not aligned")
        end = section.offset + section.length
    if end > max(room, 0):
        raise ValueError(f"the sections end at {end} of {room} bytes")
    columns: list[Any] = [*header.fields, *header.objects]
    names = [column.name for column in columns]
    if len(set(names)) != len(names) or len({group.name for group in header.groups}) != len(header.groups):
        raise ValueError("two columns or groups of one name")
    tags = [header.tags] if header.tags is not None else []
    used = [group.section for group in header.groups] + [field.section for field in header.fields]
    used += [number for column in [*header.objects, *tags] for number in (column.offsets, column.blobs)]
    if sorted(used) != list(range(len(header.sections))):
        raise ValueError("a section that no column uses, that several use, or that does not exist")
    offset_sections = [group.section for group in header.groups]
    offset_sections += [column.offsets for column in [*header.objects, *tags]]
    for number in offset_sections:
        if header.sections[number].length != 8 * (header.rows + 1):
            raise ValueError(f"section {number} does not hold {header.rows + 1} offsets")
    checked = offset_sections + [column.blobs for column in [*header.objects, *tags]]
    if any(header.sections[number].crc is None for number in checked):
        raise ValueError("offsets or objects without a checksum")
    for field in header.fields:
        _check_field(field, header)


def _check_field(field: ValueField, header: Header) -> None:
    if field.dtype not in DTYPES:
        raise ValueError(f"field {field.name!r} of unknown dtype {field.dtype!r}")
    if not is_tensor_shape(field.tail):
        raise ValueError(f"field {field.name!r} of tail {field.tail}")
    if not -1 <= field.group < len(header.groups):
        raise ValueError(f"field {field.name!r} of group {field.group}")
    expected = header.rows * math.prod(field.tail) * DTYPES[field.dtype].itemsize
    if field.group == -1 and header.sections[field.section].length != expected:
        raise ValueError(f"field {field.name!r} does not hold {expected} bytes")
