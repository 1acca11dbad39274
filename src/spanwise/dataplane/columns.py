"""Three helpers over any client: the first write of a batch, reading columns, writing columns back.

They are the codec plus a put or a get: what a rollout worker, a trainer and a log-probability worker call.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spanwise.batch import BatchedDataDict
from spanwise.dataplane.client import DEFAULT_TIMEOUT_S, DataPlaneClient
from spanwise.dataplane.codec import materialize, pack_jagged_fields
from spanwise.dataplane.meta import BatchMeta
from spanwise.dataplane.schema import LENGTH_TAG, Columns, Layout


def kv_first_write(
    client: DataPlaneClient,
    partition: str,
    fields: Columns,
    *,
    lengths: Tensor,
    tags: Sequence[Mapping[str, Any]] | None = None,
    token_aligned_fields: Collection[str] | None = None,
    timeout_s: float | int = DEFAULT_TIMEOUT_S,
) -> BatchMeta:
    """Pack a new batch, mint its ids (once, here) and put it; each sample is tagged with ``input_lengths``."""
    packed = pack_jagged_fields(fields, lengths=lengths, token_aligned_fields=token_aligned_fields)
    counts: list[int] = lengths.tolist()
    ids = [uuid.uuid4().hex for _ in counts]
    given = tags if tags is not None else [{} for _ in counts]
    stamped = BatchMeta(ids, partition, counts, [dict(tag) for tag in given])
    stamped = stamped.stamp_tags([{LENGTH_TAG: count} for count in counts])
    return client.put_samples(ids, partition, packed, stamped.tags, timeout_s=timeout_s)


def read_columns(
    client: DataPlaneClient,
    meta: BatchMeta,
    select_fields: Sequence[str] | None = None,
    *,
    layout: Layout | str = "padded",
    pad_value_dict: Mapping[str, int | float] | None = None,
    pad_to_seqlen: int = 0,
) -> BatchedDataDict:
    """Get a batch's columns and materialize them; ``pad_to_seqlen`` widens ragged columns only."""
    wire = client.get_data(meta, select_fields)
    ragged = [name for name, column in wire.items() if isinstance(column, Tensor) and column.is_nested]
    return materialize(wire, layout, pad_value_dict, pad_to_seqlen, seq_fields=ragged)


def write_columns(
    client: DataPlaneClient,
    meta: BatchMeta,
    columns: Columns,
    *,
    token_aligned_fields: Collection[str] | None = None,
    timeout_s: float | int = DEFAULT_TIMEOUT_S,
) -> BatchMeta:
    """Pack columns by the batch's lengths and put them for its samples; returns the meta about these columns.

    A column that is wider than the longest sample (padded to a multiple) is known to be per-token by its name only:
    pass it in ``token_aligned_fields``. A batch without samples (the share of a rank that got none) is not put.
    """
    if not meta.size:
        return meta.with_fields(list(columns))
    lengths = torch.tensor(meta.lengths, dtype=torch.int64)
    packed = pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=token_aligned_fields)
    client.put_samples(meta.ids, meta.partition, packed, timeout_s=timeout_s)
    return meta.with_fields(list(columns))
