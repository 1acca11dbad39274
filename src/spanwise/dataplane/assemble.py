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
from spanwise.dataplane.codec import nested_from_rows, nested_parts, object_array, unwrap_wire_stripped_payload
from spanwise.dataplane.errors import SchemaMismatch
from spanwise.dataplane.frames import Frame
from spanwise.dataplane.ledger import Cell
from spanwise.dataplane.ragged import byte_view, plain, row_bytes, tensor_over
from spanwise.dataplane.schema import DTYPE_NAMES, OBJECT, Columns, Field


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
    if isinstance(leaf, Tensor):
        return leaf.detach()
    if isinstance(leaf, np.ndarray) and leaf.dtype == object and leaf.ndim == 1:
        return leaf
    if isinstance(leaf, list):
        return object_array(leaf)
    kept = getattr(leaf, "_non_tensordict", None)
    if isinstance(kept, dict) and isinstance(kept.get("data"), np.ndarray):
        return kept["data"]
    members = getattr(leaf, "tensordicts", None)
    if members is not None:
        return object_array([unwrap_wire_stripped_payload(member) for member in members])
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


def sample_lengths(columns: Mapping[str, Any], tags: Sequence[Mapping[str, Any]]) -> list[int]:
    """Tokens per sample: the tag ``input_lengths``, else ``input_ids``, else the longest ragged column; -1 unknown."""
    ragged = {
        name: nested_parts(column)[1]
        for name, column in columns.items()
        if isinstance(column, Tensor) and column.is_nested
    }
    if "input_ids" in ragged:
        lengths = ragged["input_ids"]
    else:
        lengths = [max(entry) for entry in zip(*ragged.values(), strict=True)] or [-1] * len(tags)
    return [int(tag.get("input_lengths", length)) for tag, length in zip(tags, lengths, strict=True)]


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
