"""Frames: a batch of ragged columns in one buffer, read without a copy.

``decode_frame`` gives a Frame whose values and offsets are views of the buffer: O(rows) checks, no copy of the payload.
Several length groups may live in one frame (student and teacher tokens). Objects are decoded when they are asked for.
The writing side is frame_writer.py, the bytes are frame_format.py and docs/wire-format.md.

Shapes: N rows, L_g the summed lengths of group g, ``*tail`` further dimensions of one token.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from spanwise.batch import BatchedDataDict
from spanwise.dataplane.codec import materialize
from spanwise.dataplane.errors import CorruptFrame
from spanwise.dataplane.frame_format import Header, ObjectField, read_prefix_and_header
from spanwise.dataplane.frame_writer import encode_frame
from spanwise.dataplane.object_columns import object_array
from spanwise.dataplane.objects import decode_object, is_tensor_shape
from spanwise.dataplane.ragged import gather_spans, tensor_over
from spanwise.dataplane.schema import DTYPES

__all__ = ["Column", "Frame", "Objects", "decode_frame", "encode_frame", "read_header"]


Found = TypeVar("Found")


@dataclass(frozen=True)
class Column:
    """One tensor column of a frame: values [L, *tail] of a length group, or [N, *tail] where ``group`` is None."""

    values: Tensor
    group: str | None


class Objects:
    """An object column whose rows are decoded one by one, when asked for."""

    def __init__(self, offsets: np.ndarray, blobs: memoryview, name: str) -> None:
        self.offsets = offsets.tolist()
        self.blobs = blobs
        self.name = name

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def raw(self, row: int) -> memoryview:
        """The msgpack of one row."""
        return self.blobs[self.offsets[row] : self.offsets[row + 1]]

    def __getitem__(self, row: int) -> Any:
        return decode_object(self.raw(row), section=f"objects '{self.name}'", offset=self.offsets[row])


class Frame:
    """A batch of N rows: tensor columns, object columns, tags, and the length groups they share.

    Attributes:
        size: N.
        columns: name → Column.
        offsets: group → int64 [N + 1].
        objects: name → Objects.
        tag_objects: one dict per row, still encoded, or None.
    """

    def __init__(
        self,
        size: int,
        columns: Mapping[str, Column],
        offsets: Mapping[str, Tensor],
        objects: Mapping[str, Objects],
        tag_objects: Objects | None = None,
    ) -> None:
        self.size = size
        self.columns = dict(columns)
        self.offsets = dict(offsets)
        self.objects = dict(objects)
        self.tag_objects = tag_objects

    @property
    def field_names(self) -> list[str]:
        """Every column, tensors first."""
        return [*self.columns, *self.objects]

    @cached_property
    def starts(self) -> dict[str, list[int]]:
        """Group → its offsets as Python integers."""
        return {name: offsets.tolist() for name, offsets in self.offsets.items()}

    @property
    def tags(self) -> list[dict[str, Any]]:
        """One dict per row; empty dicts where none were written."""
        if self.tag_objects is None:
            return [{} for _ in range(self.size)]
        return [self.tag_objects[row] for row in range(self.size)]

    def lengths(self, group: str) -> list[int]:
        """The row lengths of one group."""
        return [end - start for start, end in pairwise(self._known(self.starts, group, "length group"))]

    def values(self, name: str) -> Tensor:
        """A tensor column's values without a copy, [L, *tail] or [N, *tail]."""
        return self._known(self.columns, name, "tensor column").values

    @staticmethod
    def _known(entries: Mapping[str, Found], name: str, kind: str) -> Found:
        if name not in entries:
            raise KeyError(
                f"the frame has no {kind} {name!r}; expected one of {list(entries)}. It was probably written without "
                "it, or by another name. Fix: ask for one that the writer put."
            )
        return entries[name]

    def row(self, row: int) -> dict[str, Any]:
        """One row as name → tensor view or object."""
        if not -self.size <= row < self.size:
            raise IndexError(
                f"row {row} of a frame of {self.size}; expected 0 to {self.size - 1}. Fix: index within it."
            )
        row %= max(self.size, 1)
        entry: dict[str, Any] = {}
        for name, column in self.columns.items():
            if column.group is None:
                entry[name] = column.values[row]
            else:
                starts = self.starts[column.group]
                entry[name] = column.values[starts[row] : starts[row + 1]]
        return entry | {name: column[row] for name, column in self.objects.items()}

    def select(self, rows: Sequence[int], fields: Sequence[str] | None = None) -> Frame:
        """The rows and columns named, in the order named, copied into a frame of their own."""
        names = self.field_names if fields is None else list(fields)
        unknown = sorted(set(names) - set(self.field_names))
        if unknown:
            raise KeyError(
                f"the frame has no field {unknown}; expected some of {self.field_names}. It was probably written "
                "without it. Fix: ask for fields that the writer put."
            )
        outside = [row for row in rows if not 0 <= row < self.size]
        if outside:
            raise IndexError(
                f"rows {outside[:5]} of a frame of {self.size}; expected 0 to {self.size - 1}. Fix: select within it."
            )
        columns = {name: self._take(self.columns[name], rows) for name in names if name in self.columns}
        groups = {column.group for column in columns.values() if column.group is not None}
        offsets = {}
        for group in groups:
            lengths = self.lengths(group)
            offsets[group] = torch.tensor([0, *accumulate(lengths[row] for row in rows)], dtype=torch.int64)
        objects = {name: _take_objects(self.objects[name], rows) for name in names if name in self.objects}
        tags = None if self.tag_objects is None else _take_objects(self.tag_objects, rows)
        return Frame(len(rows), columns, offsets, objects, tags)

    def nested(self) -> BatchedDataDict:
        """Every column: jagged nested tensors over the frame's values, rectangles, object arrays of shape (N,)."""
        batch = BatchedDataDict()
        for name, column in self.columns.items():
            batch[name] = column.values if column.group is None else self._nested(column.values, column.group)
        for name, objects in self.objects.items():
            batch[name] = object_array([objects[row] for row in range(self.size)])
        return batch

    def padded(
        self,
        *,
        out: Mapping[str, Tensor] | None = None,
        pad_values: Mapping[str, int | float] | None = None,
        pad_to: int = 0,
    ) -> BatchedDataDict:
        """Every column as a rectangle, see :func:`materialize`; ``pad_to`` widens the ragged ones."""
        ragged = [name for name, column in self.columns.items() if column.group is not None]
        return materialize(self.nested(), pad_value_dict=pad_values, pad_to_seqlen=pad_to, seq_fields=ragged, out=out)

    def _nested(self, values: Tensor, group: str) -> Tensor:
        lengths = self.lengths(group)
        nested: Tensor = torch.nested.nested_tensor_from_jagged(
            values,
            offsets=self.offsets[group],
            min_seqlen=min(lengths, default=0),
            max_seqlen=max(lengths, default=0),
        )
        return nested

    def _take(self, column: Column, rows: Sequence[int]) -> Column:
        if column.group is None:
            return Column(gather_spans(column.values, rows, [1] * len(rows)), None)
        starts, lengths = self.starts[column.group], self.lengths(column.group)
        spans = gather_spans(column.values, [starts[row] for row in rows], [lengths[row] for row in rows])
        return Column(spans, column.group)


def read_header(buffer: Any) -> Header:
    """The header of a frame, checked, without touching its payload."""
    return read_prefix_and_header(memoryview(buffer).cast("B"))[0]


def decode_frame(buffer: Any) -> Frame:
    """A Frame over ``buffer`` (any bytes-like object), without a copy.

    Every size is checked before anything is allocated; offsets and objects are checked against their checksums.
    The views keep the buffer alive. torch has no read-only tensors: over ``bytes`` they look writable, and writing
    changes the bytes object (over a read-only map it ends the process). Decode ``bytearray(data)`` to write.

    Raises:
        CorruptFrame: with the byte offset and section.
    """
    data = memoryview(buffer).cast("B")
    header, start, total = read_prefix_and_header(data)
    raw = [data[start + s.offset : start + s.offset + s.length] for s in header.sections]
    for number, section in enumerate(header.sections):
        if section.crc is not None and zlib.crc32(raw[number]) != section.crc:
            raise CorruptFrame(
                "its checksum does not match", offset=start + section.offset, section=f"section {number}"
            )
    body = tensor_over(data[:total], torch.uint8, (total,))

    def view(number: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        section = header.sections[number]
        if section.length == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        at = start + section.offset
        return body[at : at + section.length].view(dtype).view(tuple(shape))

    offsets = {}
    for group in header.groups:
        _checked_offsets(
            raw[group.section], None, f"group '{group.name}'", start + header.sections[group.section].offset
        )
        offsets[group.name] = view(group.section, torch.int64, (header.rows + 1,))
    columns = {}
    for field in header.fields:
        group_name = None if field.group < 0 else header.groups[field.group].name
        rows = header.rows if group_name is None else int(offsets[group_name][-1])
        dtype = DTYPES[field.dtype]
        expected = rows * math.prod(field.tail) * dtype.itemsize
        section = header.sections[field.section]
        if section.length != expected or not is_tensor_shape([rows, *field.tail]):
            raise CorruptFrame(
                f"{section.length} bytes where the offsets ask for {expected} of shape {[rows, *field.tail]}",
                offset=start + section.offset,
                section=f"field '{field.name}'",
            )
        columns[field.name] = Column(view(field.section, dtype, (rows, *field.tail)), group_name)

    def object_column(column: ObjectField) -> Objects:
        at = start + header.sections[column.offsets].offset
        ends = _checked_offsets(raw[column.offsets], len(raw[column.blobs]), f"objects '{column.name}'", at)
        return Objects(ends, raw[column.blobs], column.name)

    tags = None if header.tags is None else object_column(header.tags)
    return Frame(header.rows, columns, offsets, {c.name: object_column(c) for c in header.objects}, tags)


def _checked_offsets(raw: memoryview, end: int | None, section: str, at: int) -> np.ndarray:
    offsets = np.frombuffer(raw, dtype="<i8")
    if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any() or (end is not None and offsets[-1] != end):
        raise CorruptFrame(
            "offsets that do not start at 0, do not ascend or do not end with the data", offset=at, section=section
        )
    return offsets


def _take_objects(column: Objects, rows: Sequence[int]) -> Objects:
    blobs = [column.raw(row) for row in rows]
    ends = np.array([0, *accumulate(len(blob) for blob in blobs)], dtype=np.int64)
    return Objects(ends, memoryview(b"".join(blobs)), column.name)
