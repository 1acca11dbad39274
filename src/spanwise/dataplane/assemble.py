"""Columns in and out of segments: what a put must know about its columns, and a batch read from scattered cells.

A batch that lies in one segment, whole and in order, is read as views; any other is gathered with one join per column.
O(bytes moved + rows × fields).

Shapes: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spanwise.batch import BatchedDataDict
from spanwise.dataplane.errors import SchemaMismatch
from spanwise.dataplane.frames import Frame
from spanwise.dataplane.ledger import Cell
from spanwise.dataplane.nested import nested_from_rows, nested_parts
from spanwise.dataplane.object_columns import column_of, object_array
from spanwise.dataplane.ragged import byte_view, plain, row_bytes, tensor_over
from spanwise.dataplane.schema import DTYPE_NAMES, LENGTH_TAG, OBJECT, Columns, Field


def put_columns(fields: Columns, rows: int, ragged: set[str]) -> dict[str, Any]:
    """The columns of a put as tensors and object arrays of N rows; fields declared ragged become jagged.

    ``fields`` is a TensorDict or any mapping; lists count as object columns.
    """
    columns: dict[str, Any] = {}
    for name, leaf in fields.items():
        column = _as_column(name, leaf)
        if column.ndim == 0 or column.shape[0] != rows:
            raise SchemaMismatch(
                f"field '{name}' has shape {tuple(column.shape)} and {rows} ids were given; expected one row per id. "
                "Columns and ids were probably selected apart. Fix: put the rows that the ids name."
            )
        if name in ragged and isinstance(column, Tensor) and not column.is_nested and column.ndim >= 2:
            column = nested_from_rows(plain(column).flatten(0, 1), [column.shape[1]] * rows)
        columns[name] = column
    return columns


def _as_column(name: str, leaf: Any) -> Any:
    try:
        column = column_of(name, leaf)
    except TypeError:
        column = None
    if isinstance(column, Tensor):
        if column.is_meta or not (column.is_nested or column.layout == torch.strided):
            raise SchemaMismatch(
                f"field '{name}' is a {column.layout} tensor on {column.device}; expected one that holds every value. "
                "A sparse or a meta tensor was probably passed. Fix: column.to_dense(), or load its values first."
            )
        return column.detach()
    if isinstance(column, np.ndarray) and column.dtype == object and column.ndim == 1:
        return column
    raise SchemaMismatch(
        f"field '{name}' is a {type(leaf).__name__}; expected a tensor, a nested tensor, a list or an ndarray of dtype "
        "object. A NumPy or nested column was probably passed. Fix: torch.as_tensor(...) or flatten it."
    )


def schema_of(name: str, column: Any) -> Field:
    """The field that a column shows itself to be."""
    if not isinstance(column, Tensor):
        return Field(name, OBJECT, (), ragged=False)
    if column.dtype not in DTYPE_NAMES:
        raise SchemaMismatch(
            f"field '{name}' has dtype {column.dtype}, which cannot travel; expected one of "
            f"{sorted(DTYPE_NAMES.values())}. Fix: convert the column first."
        )
    tail = nested_parts(column)[0].shape[1:] if column.is_nested else column.shape[1:]
    return Field(name, DTYPE_NAMES[column.dtype], tuple(tail), ragged=column.is_nested)


def sample_lengths(columns: Mapping[str, Any], tags: Sequence[Mapping[str, Any]], known: Sequence[int]) -> list[int]:
    """Tokens per sample: the tag ``input_lengths``, else ``input_ids``, else what is known, else the longest column.

    A column that is written back later (a teacher's tokens, a response) does not change how long its sample is.
    ``known`` and the result are -1 where nothing says it.
    """
    ragged = {
        name: nested_parts(column)[1]
        for name, column in columns.items()
        if isinstance(column, Tensor) and column.is_nested
    }
    if "input_ids" in ragged:
        lengths = ragged["input_ids"]
    else:
        longest = [max(entry) for entry in zip(*ragged.values(), strict=True)] or [-1] * len(tags)
        lengths = [guess if sure < 0 else sure for sure, guess in zip(known, longest, strict=True)]
    return [_tagged_length(row, tag, length) for row, (tag, length) in enumerate(zip(tags, lengths, strict=True))]


def _tagged_length(row: int, tag: Mapping[str, Any], otherwise: int) -> int:
    length = tag.get(LENGTH_TAG, otherwise)
    if LENGTH_TAG in tag and (not isinstance(length, int) or not 0 <= length < 2**31):
        raise SchemaMismatch(
            f"the tag '{LENGTH_TAG}' of row {row} is {length!r}; expected the sample's number of tokens, an int of at "
            "least 0. A tensor or a text was probably passed. Fix: int(length), or leave the tag to kv_first_write."
        )
    return int(length)


def read_cells(
    fields: Sequence[str],
    schemas: Mapping[str, Field],
    cells: Sequence[Mapping[str, Cell]],
    frames: Mapping[str, Frame],
    *,
    copy: bool,
) -> BatchedDataDict:
    """A batch in wire layout from the cells of its samples; ``copy`` also where a view would do."""
    batch = BatchedDataDict()
    for name in fields:
        where = [entry[name] for entry in cells]
        batch[name] = _read_column(name, schemas[name], where, frames, copy)
    return batch


def _read_column(name: str, schema: Field, where: Sequence[Cell], frames: Mapping[str, Frame], copy: bool) -> Any:
    if schema.dtype == OBJECT:
        return object_array([frames[segment].objects[name][row] for segment, row in where])
    first = frames[where[0][0]]
    column = first.columns[name]
    segments = {segment for segment, _ in where}
    if len(segments) == 1 and [row for _, row in where] == list(range(first.size)):
        values = column.values.clone() if copy else column.values
        return values if column.group is None else nested_from_rows(values, first.lengths(column.group))
    sources = {segment: byte_view(frames[segment].columns[name].values) for segment in segments}
    width = row_bytes(column.values)
    if column.group is None:
        pieces = [sources[segment][row * width : (row + 1) * width] for segment, row in where]
        return _joined(pieces, column.values.dtype, (len(where), *column.values.shape[1:]))
    starts = {segment: _starts(frames[segment], name) for segment in segments}
    spans = [(segment, starts[segment][row], starts[segment][row + 1]) for segment, row in where]
    pieces = [sources[segment][begin * width : end * width] for segment, begin, end in spans]
    lengths = [end - begin for _, begin, end in spans]
    return nested_from_rows(_joined(pieces, column.values.dtype, (sum(lengths), *column.values.shape[1:])), lengths)


def _starts(frame: Frame, name: str) -> list[int]:
    group = frame.columns[name].group
    return frame.starts[group] if group is not None else []


def _joined(pieces: list[memoryview], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return tensor_over(bytearray().join(pieces), dtype, shape)
