"""``layout="frame"``: one frame per put, and samples that point into it.

A put writes its frame under a key of its own into a side partition, then marks the fields of its samples as produced
and stores (frame, row) with each mark: all of it becomes visible with the marks. A frame goes when no sample points to
it any more; only frames that a clear or a re-put has just let go are looked at, so a frame on its way in is safe.
Clearing costs one pass over the partition's keys.

To the queue a frame is one row, however many samples it holds: ``max_rows`` is counted here, in samples, as the other
transports count it. With that limit a put costs one round trip per partition more.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from spanwise.batch import BatchedDataDict
from spanwise.dataplane.assemble import read_cells
from spanwise.dataplane.errors import CapacityExceeded, GetTimeout, PutTimeout, SampleNotFound
from spanwise.dataplane.frame_writer import FrameWriter
from spanwise.dataplane.frames import decode_frame
from spanwise.dataplane.ragged import tensor_over
from spanwise.dataplane.schema import Field
from spanwise.dataplane.transports.queue_calls import QueueCalls
from spanwise.dataplane.transports.queue_registry import QueueRegistry

FRAMES = "spanwise.frames/"


class QueueFrames:
    """See the module."""

    def __init__(self, calls: QueueCalls, registry: QueueRegistry) -> None:
        self.calls = calls
        self.registry = registry

    def check_room(self, partition: str, rows: int, deadline: float) -> None:
        """CapacityExceeded when the partitions of frames hold more samples than the queue may have rows. ``rows`` new
        keys of the caller's are among them already, so that two writers at once cannot pass the limit together."""
        limit = self.calls.process.max_rows
        if limit is None or not rows:
            return
        found = self.calls.call(lambda q: q.get_partition_list(), deadline, PutTimeout)
        places = {name.removeprefix(FRAMES) for name in found if name.startswith(FRAMES)} | {partition}
        held = sum(len(self.calls.consumed(place, "spanwise", deadline)[0]) for place in places)
        if held > limit:
            raise CapacityExceeded(
                f"a put of {rows} new samples into partition '{partition}' would make {held} in frames, where the "
                f"queue may hold max_rows={limit}. Consumers probably never clear. Fix: clear_samples after use, or "
                "start the queue with a larger max_rows."
            )

    def put(self, partition: str, meta: Any, frame: FrameWriter, schemas: list[Field], deadline: float) -> None:
        """The frame first, then tags, then the fields' marks, which make it visible at once."""
        from tensordict import TensorDict

        key = uuid.uuid4().hex
        data = tensor_over(frame.join(), torch.uint8, (1, frame.nbytes))
        place = FRAMES + partition
        slot = self.calls.call(lambda q: q.kv_retrieve_meta([key], place, create=True), deadline, PutTimeout)
        try:
            column = TensorDict({"frame": data}, batch_size=[1])

            async def data_and_tags(q: Any) -> None:
                await asyncio.gather(q.storage_manager.put_data(column, slot), q.async_set_custom_meta(meta))

            self.calls.call(lambda q: q._run_coroutine(data_and_tags(q)), deadline, PutTimeout)
            marks = {
                entry.name: {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
                for entry in schemas
            }
            names = [entry.name for entry in schemas]
            cells = {index: {name: [key, row] for name in names} for row, index in enumerate(meta.global_indexes)}
            replaced = frames_of(meta, names)
            self.calls.call(
                lambda q: q._run_coroutine(
                    q.storage_manager.notify_data_update(partition, meta.global_indexes, marks, cells)
                ),
                deadline,
                PutTimeout,
            )
        except Exception:
            self.calls.forget([key], place)
            raise
        self.sweep(partition, replaced, deadline)

    def get(
        self, meta: Any, partition: str, fields: list[str], schemas: Mapping[str, Field], deadline: float
    ) -> BatchedDataDict:
        cells = [{name: (cell[name][0], cell[name][1]) for name in fields} for cell in meta._custom_backend_meta]
        keys = sorted({cell[name][0] for cell in cells for name in fields})
        slots = self.calls.call(
            lambda q: q.kv_retrieve_meta(keys, FRAMES + partition, create=False), deadline, GetTimeout
        )
        if slots.size != len(keys):
            raise SampleNotFound(
                f"frames of partition '{partition}' were cleared while they were read. Fix: claim or list again."
            )
        data = self.calls.call(lambda q: q.get_data(slots.select_fields(["frame"])), deadline, GetTimeout)
        frames = {key: decode_frame(row.numpy()) for key, row in zip(keys, data.get("frame").unbind(), strict=True)}
        return read_cells(fields, schemas, cells, frames, copy=False)

    def sweep(self, partition: str, loose: set[str], deadline: float) -> None:
        """Clear those of the frames that no sample points to any more."""
        if not loose:
            return
        keys = sorted(self.calls.known_keys(partition, None, deadline))
        if keys:
            meta = self.calls.call(lambda q: q.kv_retrieve_meta(keys, partition, create=False), deadline, PutTimeout)
            fields = list(self.registry.of(partition, deadline).ledger.partition(partition).fields)
            loose -= self._in_use(meta, partition, keys, fields, deadline)
        self.calls.clear_keys(sorted(loose), FRAMES + partition, deadline)

    def _in_use(self, meta: Any, partition: str, keys: list[str], fields: list[str], deadline: float) -> set[str]:
        used = frames_of(meta)
        partial = [name for name in fields if name not in meta.field_names]
        for name in partial:  # the queue shows only fields that all of the samples have: ask for the others apart
            there = self.calls.produced(partition, name, keys, deadline)
            if there:
                some = self.calls.call(
                    lambda q, ids=there: q.kv_retrieve_meta(ids, partition, create=False), deadline, PutTimeout
                )
                used |= frames_of(some, [name])
        return used


def frames_of(meta: Any, fields: Iterable[str] | None = None) -> set[str]:
    """The frames that samples point to, all of them or those of some fields."""
    wanted = None if fields is None else set(fields)
    return {
        cell[0]
        for cells in meta._custom_backend_meta
        for name, cell in cells.items()
        if wanted is None or name in wanted
    }
