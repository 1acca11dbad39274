"""``layout="columns"``: fields as the queue's own columns, readable and writable by its other users.

The queue returns every column of one or more dimensions nested, uniform or not; a column is made dense again by its
schema. Objects ride as the queue's NonTensorStack: checked against the allow-list, but encoded by the queue, which
makes lists of tuples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spanwise.dataplane.nested import nested_from_rows, nested_parts
from spanwise.dataplane.object_columns import object_array, object_stack, unwrap_wire_stripped_payload
from spanwise.dataplane.objects import encode_object
from spanwise.dataplane.schema import OBJECT, Field


def to_queue(columns: Mapping[str, Any]) -> Any:
    """Columns as the queue takes them; objects are checked against the allow-list first."""
    from tensordict import TensorDict

    packed: dict[str, Any] = {}
    rows = 0
    for name, column in columns.items():
        rows = column.shape[0]
        if isinstance(column, Tensor):
            packed[name] = column.cpu()
            continue
        for row, item in enumerate(column):
            encode_object(item, field=name, row=row)
        packed[name] = object_stack(column)
    return TensorDict(packed, batch_size=[rows])


def from_queue(column: Any, schema: Field, rows: int) -> Any:
    """The queue returns every column of one or more dimensions nested: make it what its schema says."""
    if schema.dtype == OBJECT:
        if isinstance(column, Tensor):
            return object_array(list(column.unbind()))
        return object_array([unwrap_wire_stripped_payload(member) for member in column.tensordicts])
    if schema.ragged is None or (not schema.ragged and schema.tail_shape is None):
        return _as_it_looks(column)
    if not isinstance(column, Tensor):
        members = [unwrap_wire_stripped_payload(member) for member in column.tensordicts]
        return (
            torch.stack(members)
            if not schema.ragged
            else nested_from_rows(torch.cat(members), [len(m) for m in members])
        )
    if schema.ragged:
        if column.is_nested:
            values, lengths = nested_parts(column)
            return nested_from_rows(values, lengths)
        return nested_from_rows(column.flatten(0, 1), [column.shape[1]] * rows)
    tail = schema.tail_shape or ()
    return nested_parts(column)[0].reshape(rows, *tail) if column.is_nested else column.reshape(rows, *tail)


def _as_it_looks(column: Any) -> Any:
    """A column that another user of the queue put: ragged where its rows differ, a rectangle where they do not."""
    if not isinstance(column, Tensor):
        return object_array([unwrap_wire_stripped_payload(member) for member in column.tensordicts])
    if not column.is_nested:
        return column
    values, lengths = nested_parts(column)
    if len(set(lengths)) > 1:
        return nested_from_rows(values, lengths)
    return values.reshape(len(lengths), lengths[0], *values.shape[1:])
