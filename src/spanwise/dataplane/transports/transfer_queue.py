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

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spanwise.batch import BatchedDataDict
from spanwise.dataplane.assemble import put_columns, read_cells, sample_lengths, schema_of
from spanwise.dataplane.client import DEFAULT_TIMEOUT_S
from spanwise.dataplane.codec import nested_from_rows, nested_parts, object_array, unwrap_wire_stripped_payload
from spanwise.dataplane.errors import (
    CapacityExceeded,
    ClaimTimeout,
    ClientClosed,
    DataPlaneError,
    FieldNotReady,
    GetTimeout,
    NotSupported,
    PartitionExhausted,
    PutTimeout,
    SampleNotFound,
    TransportDown,
    few,
)
from spanwise.dataplane.frame_writer import FrameWriter
from spanwise.dataplane.frames import decode_frame
from spanwise.dataplane.ledger import Ledger, Sample, refuse_conflict
from spanwise.dataplane.meta import BatchMeta
from spanwise.dataplane.objects import encode_object
from spanwise.dataplane.ragged import tensor_over
from spanwise.dataplane.requests import check_claim, check_put_request, check_registration
from spanwise.dataplane.schema import OBJECT, Columns, Field
from spanwise.dataplane.transports.queue_process import QueueProcess, join_queue

LAYOUTS = ("columns", "frame")
REGISTRY = "spanwise.registry/"
FRAMES = "spanwise.frames/"
LENGTH_TAG = "spanwise.length"
CLEARED = "cleared/"
SCHEMA = "field/"
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


@dataclass
class Registration:
    """What the registry says about a partition, and a ledger that checks schemas as the other transports do."""

    layout: str
    num_samples: int
    ledger: Ledger = field(default_factory=Ledger)


class TransferQueueClient:
    """A ``DataPlaneClient`` over TransferQueue. Safe to share between threads."""

    def __init__(self, process: QueueProcess, layout: str) -> None:
        self.process = process
        self.layout = layout
        self.closed = False
        self.owner_pid = os.getpid()
        self.registrations: dict[str, Registration] = {}

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
        existing = self._read_registration(partition, deadline)
        if existing is not None:
            held = self._known_keys(partition, None, deadline)
            existing.ledger.partition(partition).samples = {name: Sample() for name in held}
            if not existing.ledger.check_register(partition, declared, num_samples, consumer_tasks):
                return
        tag = {
            "layout": self.layout,
            "fields": [entry.to_wire() for entry in declared],
            "num_samples": num_samples,
            "tasks": list(consumer_tasks),
        }
        self._put_tags(REGISTRY + partition, ["registration"], [tag], deadline)
        self.registrations.pop(partition, None)

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
        names, each = check_put_request(ids, fields, tags, on_conflict)
        registration = self._registration(partition, deadline)
        known = registration.ledger.partition(partition).fields
        ragged = {name for name, entry in known.items() if entry.ragged}
        columns = put_columns({} if fields is None else fields, len(names), ragged)
        schemas = [schema_of(name, column) for name, column in columns.items()]
        before = self._check_put(registration, partition, names, schemas, on_conflict, deadline)
        lengths = sample_lengths(columns, each)
        for row, length in enumerate(lengths):
            if length >= 0:
                each[row][LENGTH_TAG] = length
        layout = registration.layout
        payload = FrameWriter(columns, group_of={}) if layout == "frame" else _queue_columns(columns)
        self._learn(registration, partition, schemas, deadline)
        try:
            meta = self._call(lambda q: q.kv_retrieve_meta(names, partition, create=True), deadline, PutTimeout)
            meta.update_custom_meta(each)
            if layout == "columns" and columns:
                self._call(lambda q: q.set_custom_meta(meta), deadline, PutTimeout)
                self._call(lambda q: q.put(payload, meta), deadline, PutTimeout)
            elif columns:
                self._put_frame(partition, meta, payload, schemas, deadline)
            else:
                self._call(lambda q: q.set_custom_meta(meta), deadline, PutTimeout)
            self._confirm(partition, names, schemas, deadline)
        except Exception as problem:
            self._forget([name for name in names if name not in before], partition)
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
        registration = self._registration(partition, deadline)
        names, wanted = list(ids), list(select_fields)
        if not names:
            return BatchedDataDict()
        meta = self._call(lambda q: q.kv_retrieve_meta(names, partition, create=False), deadline, GetTimeout)
        self._check_cells(meta, names, partition, wanted, deadline)
        if any(not registration.ledger.partition(partition).fields[name].known for name in wanted):
            registration = self._registration(partition, deadline, fresh=True)
        schemas = registration.ledger.partition(partition).fields
        if registration.layout == "frame":
            return self._get_frames(meta, partition, wanted, schemas, deadline)
        data = self._call(lambda q: q.get_data(meta.select_fields(wanted)), deadline, GetTimeout)
        batch = BatchedDataDict()
        for name in wanted:
            batch[name] = _from_queue(data.get(name), schemas[name], len(names))
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
        registration = self._registration(partition, deadline)
        registration.ledger.cursor(partition, task)
        fields, nap = list(required_fields), 0.005
        while True:
            meta = self._fetch(partition, task, fields, batch_size, deadline)
            if meta is None:
                try:
                    meta = self._fetch_fewer(registration, partition, task, fields, batch_size, least, deadline)
                except GetTimeout as late:
                    raise ClaimTimeout(f"a claim of task '{task}' on partition '{partition}': {late}") from late
            if meta is not None:
                keys = self._call(
                    lambda q, found=meta: q.kv_retrieve_keys(list(found.global_indexes), partition),
                    deadline,
                    ClaimTimeout,
                )
                return self._meta(partition, keys, meta.custom_meta, fields, task)
            if not blocking:
                return None
            if time.monotonic() >= deadline:
                raise ClaimTimeout(
                    f"task '{task}' waited {timeout_s:g} s for {least} samples of partition '{partition}' with "
                    f"{fields}. Their producers are probably slower, or gone. Fix: wait longer, or lower min_batch."
                )
            time.sleep(min(nap, max(deadline - time.monotonic(), 0.0)))
            nap = min(2 * nap, _LONGEST_NAP_S)

    def get_data(self, meta: BatchMeta, select_fields: Sequence[str] | None = None) -> BatchedDataDict:
        return self.get_samples(meta.ids, meta.partition, meta.fields if select_fields is None else select_fields)

    def ack(self, meta: BatchMeta) -> None:
        raise _no_leases("ack")

    def release(self, meta: BatchMeta) -> None:
        raise _no_leases("release")

    def check_consumption_status(self, partition: str, tasks: Sequence[str]) -> bool:
        self._check_open()
        deadline = time.monotonic() + DEFAULT_TIMEOUT_S
        registration = self._registration(partition, deadline)
        for task in tasks:
            registration.ledger.cursor(partition, task)
        cleared = self._cleared(partition, deadline)
        consumed = [int(self._consumed(partition, task, deadline)[1].sum()) for task in tasks]
        return all(count + cleared >= registration.num_samples for count in consumed)

    def clear_samples(self, ids: Sequence[str] | None, partition: str) -> None:
        self._check_open()
        deadline = time.monotonic() + DEFAULT_TIMEOUT_S
        registration = self._registration(partition, deadline)
        if ids is None:
            for name in (partition, FRAMES + partition):
                self._clear_partition(name, deadline)
            self._clear_keys(self._registry_keys(partition, CLEARED, deadline), REGISTRY + partition, deadline)
            return
        names = list(dict.fromkeys(ids))
        if not names:
            return
        meta = self._call(lambda q: q.kv_retrieve_meta(names, partition, create=False), deadline, PutTimeout)
        self._check_cells(meta, names, partition, [], deadline)
        loose = _frames_of(meta) if registration.layout == "frame" else set()
        self._call(lambda q: q.clear_samples(meta), deadline, PutTimeout)
        self._put_tags(REGISTRY + partition, [CLEARED + name for name in names], [{} for _ in names], deadline)
        self._sweep(partition, loose, deadline)

    def stats(self) -> dict[str, Any]:
        self._check_open()
        deadline = time.monotonic() + DEFAULT_TIMEOUT_S
        everything = self._call(lambda q: q.kv_list(None), deadline, GetTimeout)
        names = [name.removeprefix(REGISTRY) for name in everything if name.startswith(REGISTRY)]
        rows = {name: len(everything.get(name, {})) for name in names}
        found = {name: self._registration(name, deadline) for name in names}
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

    # ---- the registry ----------------------------------------------------------------------------------------------

    def _registration(self, partition: str, deadline: float, *, fresh: bool = False) -> Registration:
        if fresh or partition not in self.registrations:
            found = self._read_registration(partition, deadline)
            if found is None:
                Ledger().partition(partition)  # raises PartitionNotFound in the words of every transport
            else:
                self.registrations[partition] = found
        return self.registrations[partition]

    def _read_registration(self, partition: str, deadline: float) -> Registration | None:
        keys = self._registry(partition, deadline)
        tag = keys.get("registration")
        if not tag:
            return None
        found = Registration(tag["layout"], tag["num_samples"])
        found.ledger.apply(["register", partition, tag["fields"], tag["num_samples"], tag["tasks"]])
        entry = found.ledger.partition(partition)
        for key, value in keys.items():
            if key.startswith(SCHEMA):
                learned = Field.from_wire(value["field"])
                entry.fields[learned.name] = learned
        entry.cleared = {key.removeprefix(CLEARED) for key in keys if key.startswith(CLEARED)}
        return found

    def _registry(self, partition: str, deadline: float) -> dict[str, dict[str, Any]]:
        listing = self._call(lambda q: q.kv_list(REGISTRY + partition), deadline, GetTimeout)
        found: dict[str, dict[str, Any]] = listing.get(REGISTRY + partition, {})
        return found

    def _registry_keys(self, partition: str, prefix: str, deadline: float) -> list[str]:
        return [key for key in self._registry(partition, deadline) if key.startswith(prefix)]

    def _learn(self, registration: Registration, partition: str, schemas: Sequence[Field], deadline: float) -> None:
        known = registration.ledger.partition(partition).fields
        new = [entry for entry in schemas if known[entry.name] != entry]
        if new:
            keys = [SCHEMA + entry.name for entry in new]
            self._put_tags(REGISTRY + partition, keys, [{"field": entry.to_wire()} for entry in new], deadline)
            known.update({entry.name: entry for entry in new})

    def _check_put(
        self,
        registration: Registration,
        partition: str,
        ids: list[str],
        schemas: list[Field],
        on_conflict: str,
        deadline: float,
    ) -> set[str]:
        """Those of the ids that are there; raises where the put contradicts the partition, as the ledger does."""
        if any(not registration.ledger.partition(partition).fields.get(s.name, s).known for s in schemas):
            registration = self._registration(partition, deadline, fresh=True)
        registration.ledger.check_schemas(partition, schemas)
        task = next(iter(registration.ledger.partition(partition).cursors), "spanwise")
        known = len(self._consumed(partition, task, deadline)[0])
        present: set[str] = set()
        if known:
            meta = self._call(lambda q: q.kv_retrieve_meta(ids, partition, create=False), deadline, PutTimeout)
            indexes = list(meta.global_indexes)
            if indexes:
                present = set(self._call(lambda q: q.kv_retrieve_keys(indexes, partition), deadline, PutTimeout))
        entering = len(ids) - len(present)
        if known + entering + len(registration.ledger.partition(partition).cleared) > registration.num_samples:
            gone = {key.removeprefix(CLEARED) for key in self._registry_keys(partition, CLEARED, deadline)}
            entering = len(set(ids) - present - gone)
            known += len(gone - self._known_keys(partition, None, deadline)) if gone else 0
        registration.ledger.check_room(partition, known, entering)
        if on_conflict == "error":
            held = {name for column in schemas for name in self._produced(partition, column.name, ids, deadline)}
            refuse_conflict(partition, sorted(held))
        return present

    # ---- the queue -------------------------------------------------------------------------------------------------

    def _fetch(self, partition: str, task: str, fields: list[str], count: int, deadline: float) -> Any:
        meta = self._call(
            lambda q: q.get_meta(fields, count, partition, mode="fetch", task_name=task), deadline, ClaimTimeout
        )
        return meta if meta is not None and meta.size else None

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
        indexes, consumed = self._consumed(partition, task, deadline)
        ready = consumed == 0
        for name in fields:
            where, produced = self._production(partition, name, deadline)
            ready &= torch.isin(indexes, where[produced])
        count = int(ready.sum())
        done = int(consumed.sum()) + self._cleared(partition, deadline)
        if not count and done >= registration.num_samples:
            raise PartitionExhausted(
                f"task '{task}' has consumed all {registration.num_samples} samples of partition '{partition}'. "
                "Fix: stop here, or clear and register the partition for the next round."
            )
        everything_is_in = done + count >= registration.num_samples
        if count >= least or (count and everything_is_in):
            return self._fetch(partition, task, fields, min(count, most), deadline)
        return None

    def _consumed(self, partition: str, task: str, deadline: float) -> tuple[Tensor, Tensor]:
        where, status = self._call(lambda q: q.get_consumption_status(task, partition), deadline, GetTimeout)
        if where is None or status is None:
            return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.int8)
        return where, status

    def _production(self, partition: str, name: str, deadline: float) -> tuple[Tensor, Tensor]:
        where, status = self._call(lambda q: q.get_production_status([name], partition), deadline, GetTimeout)
        if where is None or status is None:
            return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.bool)
        return where, status.reshape(len(where), -1).bool().all(dim=1)

    def _produced(self, partition: str, name: str, ids: list[str], deadline: float) -> list[str]:
        """Those of the ids that have the field."""
        where, produced = self._production(partition, name, deadline)
        indexes = where[produced].tolist()
        if not indexes:
            return []
        keys = self._call(lambda q: q.kv_retrieve_keys(indexes, partition), deadline, GetTimeout)
        return [key for key in keys if key in set(ids)]

    def _known_keys(self, partition: str, ids: list[str] | None, deadline: float) -> set[str]:
        listing = self._call(lambda q: q.kv_list(partition), deadline, PutTimeout)
        keys = set(listing.get(partition, {}))
        return keys if ids is None else keys & set(ids)

    def _cleared(self, partition: str, deadline: float) -> int:
        """Samples that were in and are gone."""
        gone = {key.removeprefix(CLEARED) for key in self._registry_keys(partition, CLEARED, deadline)}
        return len(gone - self._known_keys(partition, None, deadline)) if gone else 0

    def _check_cells(self, meta: Any, ids: list[str], partition: str, fields: list[str], deadline: float) -> None:
        if meta.size != len(ids):
            absent = [name for name in ids if name not in self._known_keys(partition, ids, deadline)]
            raise SampleNotFound(
                f"partition '{partition}' does not hold {few(absent)}. They were probably cleared, or never put. "
                "Fix: ask for ids that a put or a claim returned."
            )
        late = [name for name in fields if name not in meta.field_names]
        if late:
            missing: dict[str, list[str]] = {}
            for name in late:
                there = self._produced(partition, name, ids, deadline)
                for sample in ids:
                    if sample not in there:
                        missing.setdefault(sample, []).append(name)
            shown = few(f"{sample} × {columns}" for sample, columns in missing.items())
            raise FieldNotReady(
                f"in partition '{partition}' these are not produced yet: {shown}. The producer of the field has "
                "probably not run, or the name is misspelled. Fix: claim with required_fields, which waits for them.",
                missing,
            )

    def _put_frame(self, partition: str, meta: Any, frame: FrameWriter, schemas: list[Field], deadline: float) -> None:
        """The frame first, then tags, then the fields' marks, which make it visible at once."""
        from tensordict import TensorDict

        key = uuid.uuid4().hex
        data = tensor_over(frame.join(), torch.uint8, (1, frame.nbytes))
        place = FRAMES + partition
        slot = self._call(lambda q: q.kv_retrieve_meta([key], place, create=True), deadline, PutTimeout)
        try:
            column = TensorDict({"frame": data}, batch_size=[1])

            async def data_and_tags(q: Any) -> None:
                await asyncio.gather(q.storage_manager.put_data(column, slot), q.async_set_custom_meta(meta))

            self._call(lambda q: q._run_coroutine(data_and_tags(q)), deadline, PutTimeout)
            marks = {
                entry.name: {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
                for entry in schemas
            }
            names = [entry.name for entry in schemas]
            cells = {index: {name: [key, row] for name in names} for row, index in enumerate(meta.global_indexes)}
            replaced = _frames_of(meta, names)
            self._call(
                lambda q: q._run_coroutine(
                    q.storage_manager.notify_data_update(partition, meta.global_indexes, marks, cells)
                ),
                deadline,
                PutTimeout,
            )
        except Exception:
            self._forget([key], place)
            raise
        self._sweep(partition, replaced, deadline)

    def _confirm(self, partition: str, ids: list[str], schemas: Sequence[Field], deadline: float) -> None:
        """The queue only logs when its controller did not take note of a put: look."""
        meta = self._call(lambda q: q.kv_retrieve_meta(ids, partition, create=False), deadline, PutTimeout)
        if meta.size != len(ids) or any(entry.name not in meta.field_names for entry in schemas):
            raise TransportDown(
                f"the queue's controller did not take note of {len(ids)} samples of partition '{partition}'; it was "
                "probably busy, or the samples were cleared meanwhile. Fix: put them again."
            )

    def _get_frames(
        self, meta: Any, partition: str, fields: list[str], schemas: Mapping[str, Field], deadline: float
    ) -> BatchedDataDict:
        cells = [{name: (cell[name][0], cell[name][1]) for name in fields} for cell in meta._custom_backend_meta]
        keys = sorted({cell[name][0] for cell in cells for name in fields})
        slots = self._call(lambda q: q.kv_retrieve_meta(keys, FRAMES + partition, create=False), deadline, GetTimeout)
        if slots.size != len(keys):
            raise SampleNotFound(
                f"frames of partition '{partition}' were cleared while they were read. Fix: claim or list again."
            )
        data = self._call(lambda q: q.get_data(slots.select_fields(["frame"])), deadline, GetTimeout)
        frames = {key: decode_frame(row.numpy()) for key, row in zip(keys, data.get("frame").unbind(), strict=True)}
        return read_cells(fields, schemas, cells, frames, copy=False)

    def _sweep(self, partition: str, loose: set[str], deadline: float) -> None:
        """Clear those of the frames that no sample points to any more."""
        if not loose:
            return
        keys = sorted(self._known_keys(partition, None, deadline))
        if keys:
            meta = self._call(lambda q: q.kv_retrieve_meta(keys, partition, create=False), deadline, PutTimeout)
            fields = list(self._registration(partition, deadline).ledger.partition(partition).fields)
            loose -= self._frames_in_use(meta, partition, keys, fields, deadline)
        self._clear_keys(sorted(loose), FRAMES + partition, deadline)

    def _frames_in_use(
        self, meta: Any, partition: str, keys: list[str], fields: list[str], deadline: float
    ) -> set[str]:
        used = _frames_of(meta)
        partial = [name for name in fields if name not in meta.field_names]
        for name in partial:  # the queue shows only fields that all of the samples have: ask for the others apart
            there = self._produced(partition, name, keys, deadline)
            if there:
                some = self._call(
                    lambda q, ids=there: q.kv_retrieve_meta(ids, partition, create=False), deadline, PutTimeout
                )
                used |= _frames_of(some, [name])
        return used

    def _put_tags(self, partition: str, keys: list[str], tags: list[dict[str, Any]], deadline: float) -> None:
        meta = self._call(lambda q: q.kv_retrieve_meta(keys, partition, create=True), deadline, PutTimeout)
        meta.update_custom_meta(tags)
        self._call(lambda q: q.set_custom_meta(meta), deadline, PutTimeout)

    def _clear_keys(self, keys: list[str], partition: str, deadline: float) -> None:
        if keys:
            meta = self._call(lambda q: q.kv_retrieve_meta(keys, partition, create=False), deadline, PutTimeout)
            if meta.size:
                self._call(lambda q: q.clear_samples(meta), deadline, PutTimeout)

    def _clear_partition(self, partition: str, deadline: float) -> None:
        if partition in self._call(lambda q: q.get_partition_list(), deadline, PutTimeout):
            self._call(lambda q: q.clear_partition(partition), deadline, PutTimeout)

    def _forget(self, keys: list[str], partition: str) -> None:
        """Remove keys that a failed put left behind; a queue that is down keeps them, and says so on the next call."""
        try:
            self._clear_keys(keys, partition, time.monotonic() + DEFAULT_TIMEOUT_S)
        except DataPlaneError:
            return

    def _call(self, function: Callable[[Any], Any], deadline: float, error: type[DataPlaneError]) -> Any:
        client = self.process.client
        try:
            return self.process.call(lambda: function(client), deadline, error)
        except RuntimeError as problem:
            if "StorageUnitTimeout" in type(problem).__name__ or "timed out" in str(problem).lower():
                raise TransportDown(
                    f"a storage unit does not answer ({problem}). Fix: start the queue again."
                ) from problem
            raise

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


def _frames_of(meta: Any, fields: Iterable[str] | None = None) -> set[str]:
    wanted = None if fields is None else set(fields)
    return {
        cell[0]
        for cells in meta._custom_backend_meta
        for name, cell in cells.items()
        if wanted is None or name in wanted
    }


def _queue_columns(columns: Mapping[str, Any]) -> Any:
    """Columns as the queue takes them; objects are checked against the allow-list first."""
    from tensordict import TensorDict

    from spanwise.dataplane.codec import object_stack

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


def _from_queue(column: Any, schema: Field, rows: int) -> Any:
    """The queue returns every column of one or more dimensions nested: make it what its schema says."""
    if schema.dtype == OBJECT:
        if isinstance(column, Tensor):
            return object_array(list(column.unbind()))
        return object_array([unwrap_wire_stripped_payload(member) for member in column.tensordicts])
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
