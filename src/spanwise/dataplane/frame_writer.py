"""Write a batch as one frame: sections are collected as pieces of memory and joined in a single pass.

Nothing is copied before the join: a column that is already end to end is one piece, a padded one is one piece per row.
O(bytes kept + N) time; memory is the frame itself. The reading side is frames.py.

Shapes: N rows, S padded width, ``*tail`` further dimensions of one token.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from spanwise.dataplane.frame_format import (
    MAX_EMPTY_ROWS,
    PREFIX_BYTES,
    Group,
    Header,
    ObjectField,
    Section,
    ValueField,
    align,
    write_prefix,
)
from spanwise.dataplane.nested import nested_parts, whole_lengths
from spanwise.dataplane.objects import encode_object
from spanwise.dataplane.ragged import byte_view, plain, span_slices, write_pieces
from spanwise.dataplane.schema import DTYPE_NAMES, DTYPES

Pieces = list[memoryview]


def encode_frame(
    fields: Mapping[str, Any],
    groups: Mapping[str, Tensor | Sequence[int]] | None = None,
    objects: Mapping[str, Any] | None = None,
    tags: Sequence[Mapping[str, Any]] | None = None,
    alloc: Callable[[int], Any] = bytearray,
    *,
    group_of: Mapping[str, str] | None = None,
    checksums: bool = False,
) -> Any:
    """A batch as one buffer.

    Args:
        fields: name → tensor [N, ...], nested tensor, or object array. Tensors of any device and dtype.
        groups: name → row lengths [N]. A nested tensor joins the group of its lengths (or founds one of its own name);
            a rectangle [N, S, ...] joins the group whose longest row is S and travels without its padding.
        objects: name → N Python objects of the allow-list.
        tags: one dict per row.
        alloc: size → writable buffer; the default joins straight into a bytearray.
        group_of: field → group for rectangles, by name; with it no shape is guessed.
        checksums: also protect payload sections by CRC-32 (offsets, objects, tags and header always are).

    Returns:
        What ``alloc`` returned, filled.

    >>> import torch
    >>> from spanwise.dataplane.frames import decode_frame
    >>> ids = torch.tensor([[1, 2], [3, 0]])
    >>> buffer = encode_frame({"ids": ids}, groups={"tok": [2, 1]}, objects={"info": ["a", None]})
    >>> frame = decode_frame(buffer)
    >>> frame.values("ids").tolist(), frame.row(1)["info"], frame.padded()["ids"].tolist()
    ([1, 2, 3], None, [[1, 2], [3, 0]])
    """
    writer = FrameWriter(fields, groups, objects, tags, group_of=group_of, checksums=checksums)
    if alloc is bytearray:
        return writer.join()
    buffer = alloc(writer.nbytes)
    writer.write_into(buffer)
    return buffer


class FrameWriter:
    """A frame before it is written: its pieces, their order and its size. Arguments as of :func:`encode_frame`."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        groups: Mapping[str, Tensor | Sequence[int]] | None = None,
        objects: Mapping[str, Any] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        group_of: Mapping[str, str] | None = None,
        checksums: bool = False,
    ) -> None:
        self.tensors = {name: column for name, column in fields.items() if isinstance(column, Tensor)}
        self.objects = {name: column for name, column in fields.items() if name not in self.tensors} | dict(
            objects or {}
        )
        _check_names([*fields, *(objects or {})])
        self.tags = tags
        self.group_of = group_of
        self.checksums = checksums
        self.lengths: dict[str, list[int]] = {
            name: whole_lengths(lengths if isinstance(lengths, Tensor) else torch.tensor(list(lengths)))
            for name, lengths in (groups or {}).items()
        }
        self.declared = list(self.lengths)  # a group that a nested column founds never draws a rectangle in
        self.pieces: Pieces = []
        self.sections: list[Section] = []
        self.position = 0
        self.rows = self._row_count()
        header = self._build()
        start = align(PREFIX_BYTES + len(header))
        self.nbytes = start + self.position
        gap = bytes(start - PREFIX_BYTES - len(header))
        self.head = write_prefix(header, self.nbytes) + header + gap

    def join(self) -> bytearray:
        """The frame in a buffer of its own, written in one pass."""
        return bytearray().join([self.head, *self.pieces])

    def write_into(self, buffer: Any) -> None:
        """The frame at the start of a writable buffer of at least ``nbytes``."""
        write_pieces(buffer, [self.head, *self.pieces])

    def _build(self) -> bytes:
        placed = [(name, *self._place(name, column)) for name, column in self.tensors.items()]
        groups = [Group(name, self._offsets(lengths)) for name, lengths in self.lengths.items()]
        numbers = {group.name: number for number, group in enumerate(groups)}
        fields = []
        for name, dtype, tail, group, pieces in placed:
            section = self._section(pieces, self.checksums)
            fields.append(ValueField(name, dtype, tail, -1 if group is None else numbers[group], section))
        objects = [self._object_field(name, column) for name, column in self.objects.items()]
        tags = None if self.tags is None else self._object_field("tags", [dict(tag) for tag in self.tags])
        if self.rows > MAX_EMPTY_ROWS and not self.position:
            raise ValueError(
                f"{self.rows} rows were given, and no column holds a byte of them; expected at most {MAX_EMPTY_ROWS}. "
                "The columns were probably sliced to nothing. Fix: leave out columns of size 0."
            )
        header = Header(self.rows, groups, fields, objects, tags, self.sections)
        return msgspec.msgpack.encode(header)

    def _place(self, name: str, column: Tensor) -> tuple[str, list[int], str | None, Pieces]:
        """The dtype, tail, group and bytes of one tensor column."""
        if column.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"field '{name}' has dtype {column.dtype}; expected one of {sorted(DTYPES)}. Quantized types "
                "have no place in the format. Fix: convert the column first."
            )
        dtype = DTYPE_NAMES[column.dtype]
        column = column.detach().cpu()
        if column.is_nested:
            values, lengths = nested_parts(column)
            return dtype, list(values.shape[1:]), self._group_of_nested(name, lengths), [byte_view(plain(values))]
        group = self._group_of_rectangle(name, column)
        if group is None:
            return dtype, list(column.shape[1:]), None, [byte_view(plain(column))]
        width = column.shape[1]
        flat = column.reshape(self.rows * width, *column.shape[2:])
        starts = [row * width for row in range(self.rows)]
        return dtype, list(column.shape[2:]), group, span_slices(flat, starts, self.lengths[group])

    def _group_of_nested(self, name: str, lengths: list[int]) -> str:
        for group, known in self.lengths.items():
            if known == lengths:
                return group
        group = name
        while group in self.lengths:
            group += "'"
        self.lengths[group] = lengths
        return group

    def _group_of_rectangle(self, name: str, column: Tensor) -> str | None:
        if self.group_of is not None:
            group = self.group_of.get(name)
            if group is not None and (
                group not in self.lengths or column.dim() < 2 or column.shape[1] < max(self.lengths[group], default=0)
            ):
                raise ValueError(
                    f"field '{name}' of shape {tuple(column.shape)} was assigned to group '{group}'; expected one of "
                    f"{sorted(self.lengths)} with no row longer than the column is wide. The names were probably "
                    "mixed up. Fix: correct group_of."
                )
            return group
        if column.dim() < 2:
            return None
        fitting = [name for name in self.declared if max(self.lengths[name], default=0) == column.shape[1] > 0]
        if len(fitting) > 1 and any(self.lengths[group] != self.lengths[fitting[0]] for group in fitting):
            raise ValueError(
                f"field '{name}' of shape {tuple(column.shape)} is as wide as the longest row of the groups {fitting}; "
                "expected one that fits. Shapes cannot decide. Fix: pass group_of={" + f"'{name}': …" + "}."
            )
        return fitting[0] if fitting else None

    def _offsets(self, lengths: list[int]) -> int:
        return self._section([memoryview(np.array([0, *accumulate(lengths)], dtype="<i8").tobytes())], True)

    def _object_field(self, name: str, column: Any) -> ObjectField:
        blobs = [encode_object(item, field=name, row=row) for row, item in enumerate(column)]
        offsets = self._offsets([len(blob) for blob in blobs])
        return ObjectField(name, offsets, self._section([memoryview(b"".join(blobs))], True))

    def _section(self, pieces: Pieces, checked: bool) -> int:
        length = sum(len(piece) for piece in pieces)
        crc = 0
        if checked:
            for piece in pieces:
                crc = zlib.crc32(piece, crc)
        self.sections.append(Section(self.position, length, crc if checked else None))
        self.pieces += pieces
        gap = align(length) - length
        if gap:
            self.pieces.append(memoryview(bytes(gap)))
        self.position += length + gap
        return len(self.sections) - 1

    def _row_count(self) -> int:
        counts = {f"group '{name}'": len(lengths) for name, lengths in self.lengths.items()}
        for name, column in (*self.tensors.items(), *self.objects.items()):
            if isinstance(column, Tensor) and column.dim() == 0:
                raise ValueError(
                    f"field '{name}' is a scalar; expected one entry per row. A value of the whole batch was probably "
                    "put among the columns. Fix: expand it, or carry it as a tag."
                )
            counts[f"field '{name}'"] = column.shape[0] if isinstance(column, Tensor) else len(column)
        if self.tags is not None:
            counts["tags"] = len(self.tags)
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"the parts of a frame have different numbers of rows: {counts}; expected one number. A column of "
                "another batch was probably mixed in. Fix: select the same rows everywhere."
            )
        unknown = sorted(set(self.group_of or ()) - set(self.tensors))
        if unknown:
            raise ValueError(
                f"group_of names {unknown}, which are not among the tensor columns {sorted(self.tensors)}; expected "
                "names of columns. A column was probably renamed. Fix: name the columns that are passed."
            )
        negative = [name for name, lengths in self.lengths.items() if min(lengths, default=0) < 0]
        if negative:
            raise ValueError(
                f"groups {negative} hold negative lengths; expected 0 or more. They were probably computed by a "
                "subtraction. Fix: recompute them from the attention mask."
            )
        return next(iter(counts.values()), 0)


def _check_names(names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(
            f"columns {twice[:5]} are among the fields and among the objects; expected one column of a name. An object "
            "column was probably passed twice. Fix: pass it as a field or as an object."
        )
