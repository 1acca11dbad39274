"""``tq://``: TransferQueue on Ray, in one of two layouts.

``layout="columns"`` puts fields as the queue's own columns: other users of the queue read and write them, objects are
its NonTensorStack. ``layout="frame"`` puts one frame per put into a side partition and only *marks* the fields as
produced, each sample pointing to its frame: one message instead of rows × fields, and objects travel as bytes that we
encoded. A partition's layout is fixed when it is registered. The queue pickles its own metadata over sockets without
authentication: trusted networks only. Leases do not exist here.

A registry partition next to each partition holds its registration, the schemas that were learned, and the ids that
were cleared, so that every process agrees on them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from spanwise.batch import BatchedDataDict
from spanwise.dataplane.assemble import put_columns, sample_lengths, schema_of
from spanwise.dataplane.client import DEFAULT_TIMEOUT_S
from spanwise.dataplane.errors import (
    CapacityExceeded,
    ClaimTimeout,
    ClientClosed,
    FieldNotReady,
    GetTimeout,
    NotSupported,
    PartitionExhausted,
    PutTimeout,
    SampleNotFound,
    few,
)
from spanwise.dataplane.frame_writer import FrameWriter
from spanwise.dataplane.ledger import Sample
from spanwise.dataplane.meta import BatchMeta
from spanwise.dataplane.requests import check_claim, check_put_request, check_registration, check_selection
from spanwise.dataplane.schema import Columns, Field
from spanwise.dataplane.transports.queue_calls import QueueCalls
from spanwise.dataplane.transports.queue_columns import from_queue, to_queue
from spanwise.dataplane.transports.queue_frames import FRAMES, QueueFrames, frames_of
from spanwise.dataplane.transports.queue_process import QueueProcess, join_queue
from spanwise.dataplane.transports.queue_registry import CLEARED, REGISTRY, QueueRegistry, Registration

LAYOUTS = ("columns", "frame")
LENGTH_TAG = "spanwise.length"
_LONGEST_NAP_S = 0.1


def open_transfer_queue(
    address: str,
    *,
    layout: str = "columns",
    storage_units: int | None = None,
    max_rows: int | None = None,
    timeout_s: float | int = DEFAULT_TIMEOUT_S,
) -> TransferQueueClient:
    """A client of the queue on the cluster at ``address`` ("auto": the one in reach, or a local one)."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {list(LAYOUTS)}. Fix: use one of them.")
    return TransferQueueClient(join_queue(address, storage_units, max_rows, timeout_s), layout)


class TransferQueueClient:
    """A ``DataPlaneClient`` over TransferQueue. Safe to share between threads."""

    def __init__(self, process: QueueProcess, layout: str) -> None:
        self.process = process
        self.layout = layout
        self.closed = False
        self.owner_pid = os.getpid()
        self.calls = QueueCalls(process)
        self.registry = QueueRegistry(self.calls)
        self.frames = QueueFrames(self.calls, self.registry)

    def __enter__(self) -> TransferQueueClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def register_partition(
        self, partition: str, fields: Sequence[Field | str], num_samples: int, consumer_tasks: Sequence[str]
    ) -> None:
        self._check_open()
        declared = check_registration(partition, fields, num_samples, consumer_tasks)
        deadline = time.monotonic() + DEFAULT_TIMEOUT_S
        existing = self.registry.read(partition, deadline)
        if existing is not None:
            held = self.calls.known_keys(partition, None, deadline)
            existing.ledger.partition(partition).samples = {name: Sample() for name in held}
            if not existing.ledger.check_register(partition, declared, num_samples, consumer_tasks):
                return
        tag = {
            "layout": self.layout,
            "fields": [entry.to_wire() for entry in declared],
            "num_samples": num_samples,
            "tasks": list(consumer_tasks),
        }
        self.calls.put_tags(REGISTRY + partition, ["registration"], [tag], deadline)
        self.registry.known.pop(partition, None)

    def put_samples(
        self,
        ids: Sequence[str],
        partition: str,
        fields: Columns | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        on_conflict: str = "replace",
        timeout_s: float | int = DEFAULT_TIMEOUT_S,
    ) -> BatchMeta:
        self._check_open()
        deadline = time.monotonic() + timeout_s
        names, each, _ = check_put_request(ids, fields, tags, on_conflict)
        registration = self.registry.of(partition, deadline)
        known = registration.ledger.partition(partition).fields
        ragged = {name for name, entry in known.items() if entry.ragged}
        columns = put_columns({} if fields is None else fields, len(names), ragged)
        schemas = [schema_of(name, column) for name, column in columns.items()]
        before = self.registry.check_put(registration, partition, names, schemas, on_conflict, deadline)
        sample_lengths(columns, each, [-1] * len(names))  # refuses bad tags before anything is changed
        layout = registration.layout
        payload = FrameWriter(columns, group_of={}) if layout == "frame" else to_queue(columns)
        self.registry.learn(registration, partition, schemas, deadline)
        try:
            meta = self.calls.call(lambda q: q.kv_retrieve_meta(names, partition, create=True), deadline, PutTimeout)
            held = [entry.get(LENGTH_TAG, -1) for entry in meta.custom_meta]
            for tag, length in zip(each, sample_lengths(columns, each, held), strict=True):
                tag |= {LENGTH_TAG: length} if length >= 0 else {}
            meta.update_custom_meta(each)
            if layout == "columns" and columns:
                self.calls.call(lambda q: q.set_custom_meta(meta), deadline, PutTimeout)
                self.calls.call(lambda q: q.put(payload, meta), deadline, PutTimeout)
            elif columns:
                self.frames.check_room(partition, len(names) - len(before), deadline)
                self.frames.put(partition, meta, payload, schemas, deadline)
            else:
                self.calls.call(lambda q: q.set_custom_meta(meta), deadline, PutTimeout)
            self.calls.confirm(partition, names, schemas, deadline)
        except Exception as problem:
            self.calls.forget([name for name in names if name not in before], partition)
            if "capacity exceeded" in str(problem).lower():
                raise CapacityExceeded(
                    f"TransferQueue refused {len(names)} rows of partition '{partition}': {problem}. Consumers "
                    "probably never clear. Fix: clear_samples after use, or start the queue with a larger max_rows."
                ) from problem
            raise
        return self._meta(partition, names, meta.custom_meta, [entry.name for entry in schemas])

    def get_samples(
        self,
        ids: Sequence[str],
        partition: str,
        select_fields: Sequence[str],
        *,
        timeout_s: float | int = DEFAULT_TIMEOUT_S,
    ) -> BatchedDataDict:
        self._check_open()
        deadline = time.monotonic() + timeout_s
        registration = self.registry.of(partition, deadline)
        names, wanted = list(ids), check_selection(select_fields)
        if not names:
            return BatchedDataDict()
        meta = self.calls.call(lambda q: q.kv_retrieve_meta(names, partition, create=False), deadline, GetTimeout)
        self._check_cells(meta, names, partition, wanted, deadline)
        schemas = {name: Field(name) for name in wanted} | registration.ledger.partition(partition).fields
        if not all(schemas[name].known for name in wanted):
            registration = self.registry.of(partition, deadline, fresh=True)
            schemas |= registration.ledger.partition(partition).fields
        if registration.layout == "frame":
            return self.frames.get(meta, partition, wanted, schemas, deadline)
        data = self.calls.call(lambda q: q.get_data(meta.select_fields(wanted)), deadline, GetTimeout)
        batch = BatchedDataDict()
        for name in wanted:
            batch[name] = from_queue(data.get(name), schemas[name], len(names))
        return batch

    def claim_meta(
        self,
        partition: str,
        task: str,
        required_fields: Sequence[str],
        batch_size: int,
        *,
        min_batch: int | None = None,
        blocking: bool = True,
        timeout_s: float | int = DEFAULT_TIMEOUT_S,
        lease_s: float | int | None = None,
    ) -> BatchMeta | None:
        self._check_open()
        least = check_claim(required_fields, batch_size, min_batch, lease_s)
        if lease_s is not None:
            raise _no_leases("claim_meta(lease_s=...)")
        deadline = time.monotonic() + timeout_s
        registration = self.registry.of(partition, deadline)
        registration.ledger.cursor(partition, task)
        registration.ledger.check_fields(partition, required_fields)
        fields, nap = list(required_fields), 0.005
        while True:
            claimed = self.calls.fetch(partition, task, fields, batch_size, deadline)
            if claimed is None:
                try:
                    claimed = self._fetch_fewer(registration, partition, task, fields, batch_size, least, deadline)
                except GetTimeout as late:
                    raise ClaimTimeout(f"a claim of task '{task}' on partition '{partition}': {late}") from late
            if claimed is not None:
                meta, keys = claimed
                return self._meta(partition, keys, meta.custom_meta, fields, task)
            if not blocking:
                return None
            time.sleep(min(nap, max(deadline - time.monotonic(), 0.0)))
            nap = min(2 * nap, _LONGEST_NAP_S)
            if time.monotonic() >= deadline:  # no fetch begins so late: it would only be a late answer
                raise ClaimTimeout(
                    f"task '{task}' waited {timeout_s:g} s for {least} samples of partition '{partition}' with "
                    f"{fields}. Their producers are probably slower, or gone. Fix: wait longer, or lower min_batch."
                )

    def get_data(self, meta: BatchMeta, select_fields: Sequence[str] | None = None) -> BatchedDataDict:
        return self.get_samples(meta.ids, meta.partition, meta.fields if select_fields is None else select_fields)

    def ack(self, meta: BatchMeta) -> None:
        raise _no_leases("ack")

    def release(self, meta: BatchMeta) -> None:
        raise _no_leases("release")

    def check_consumption_status(self, partition: str, tasks: Sequence[str]) -> bool:
        self._check_open()
        deadline = time.monotonic() + DEFAULT_TIMEOUT_S
        registration = self.registry.of(partition, deadline)
        for task in tasks:
            registration.ledger.cursor(partition, task)
        cleared = self.registry.cleared(partition, deadline)
        consumed = [int(self.calls.consumed(partition, task, deadline)[1].sum()) for task in tasks]
        return all(count + cleared >= registration.num_samples for count in consumed)

    def clear_samples(self, ids: Sequence[str] | None, partition: str) -> None:
        self._check_open()
        deadline = time.monotonic() + DEFAULT_TIMEOUT_S
        registration = self.registry.of(partition, deadline)
        if ids is None:
            for name in (partition, FRAMES + partition):
                self.calls.clear_partition(name, deadline)
            self.calls.clear_keys(self.registry.keys(partition, CLEARED, deadline), REGISTRY + partition, deadline)
            return
        names = list(dict.fromkeys(ids))
        if not names:
            return
        meta = self.calls.call(lambda q: q.kv_retrieve_meta(names, partition, create=False), deadline, PutTimeout)
        self._check_cells(meta, names, partition, [], deadline)
        loose = frames_of(meta) if registration.layout == "frame" else set()
        self.calls.call(lambda q: q.clear_samples(meta), deadline, PutTimeout)
        self.calls.put_tags(REGISTRY + partition, [CLEARED + name for name in names], [{} for _ in names], deadline)
        self.frames.sweep(partition, loose, deadline)

    def stats(self) -> dict[str, Any]:
        self._check_open()
        deadline = time.monotonic() + DEFAULT_TIMEOUT_S
        everything = self.calls.call(lambda q: q.kv_list(None), deadline, GetTimeout)
        names = [name.removeprefix(REGISTRY) for name in everything if name.startswith(REGISTRY)]
        rows = {name: len(everything.get(name, {})) for name in names}
        found = {name: self.registry.of(name, deadline) for name in names}
        return {
            "transport": "tq",
            "bytes": None,  # the queue does not say
            "rows": sum(rows.values()),
            "partitions": {
                name: {
                    "samples": rows[name],
                    "num_samples": entry.num_samples,
                    "fields": list(entry.ledger.partition(name).fields),
                    "layout": entry.layout,
                    "frames": len(everything.get(FRAMES + name, {})),
                }
                for name, entry in found.items()
            },
        }

    def close(self) -> None:
        if self.closed or self.owner_pid != os.getpid():
            return
        self.closed = True
        self.process.leave()

    def _fetch_fewer(
        self,
        registration: Registration,
        partition: str,
        task: str,
        fields: list[str],
        most: int,
        least: int,
        deadline: float,
    ) -> Any:
        """A smaller claim where one is allowed; PartitionExhausted when nothing is left."""
        indexes, consumed = self.calls.consumed(partition, task, deadline)
        ready = consumed == 0
        for name in fields:
            where, produced = self.calls.production(partition, name, deadline)
            ready &= torch.isin(indexes, where[produced])
        count = int(ready.sum())
        done = int(consumed.sum()) + self.registry.cleared(partition, deadline)
        if not count and done >= registration.num_samples:
            raise PartitionExhausted(
                f"task '{task}' has consumed all {registration.num_samples} samples of partition '{partition}'. "
                "Fix: stop here, or clear and register the partition for the next round."
            )
        everything_is_in = done + count >= registration.num_samples
        if count >= least or (count and everything_is_in):
            return self.calls.fetch(partition, task, fields, min(count, most), deadline)
        return None

    def _check_cells(self, meta: Any, ids: list[str], partition: str, fields: list[str], deadline: float) -> None:
        if meta.size != len(ids):
            absent = [name for name in ids if name not in self.calls.known_keys(partition, ids, deadline)]
            raise SampleNotFound(
                f"partition '{partition}' does not hold {few(absent)}. They were probably cleared, or never put. "
                "Fix: ask for ids that a put or a claim returned."
            )
        late = [name for name in fields if name not in meta.field_names]
        if late:
            missing: dict[str, list[str]] = {}
            for name in late:
                there = self.calls.produced(partition, name, ids, deadline)
                for sample in ids:
                    if sample not in there:
                        missing.setdefault(sample, []).append(name)
            shown = few(f"{sample} × {columns}" for sample, columns in missing.items())
            raise FieldNotReady(
                f"in partition '{partition}' these are not produced yet: {shown}. The producer of the field has "
                "probably not run, or the name is misspelled. Fix: claim with required_fields, which waits for them.",
                missing,
            )

    def _meta(
        self,
        partition: str,
        ids: Sequence[str],
        tags: Iterable[Mapping[str, Any]],
        fields: list[str],
        task: str | None = None,
    ) -> BatchMeta:
        each = [dict(tag) for tag in tags]
        lengths = [int(tag.pop(LENGTH_TAG, 0)) for tag in each]
        return BatchMeta(list(ids), partition, lengths, each, fields, task)

    def _check_open(self) -> None:
        if self.closed or self.owner_pid != os.getpid():
            where = "closed" if self.closed else "opened in another process"
            raise ClientClosed(
                f"this tq client was {where}; expected an open client of this process. Fix: call open_client again, "
                "once per process."
            )


def _no_leases(what: str) -> NotSupported:
    return NotSupported(
        f"{what} is not supported on tq://: TransferQueue has no leases, a claim consumes at once. Fix: use shm:// or "
        "memory:// where claimers may die, or re-register the partition after a crash."
    )
