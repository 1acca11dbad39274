"""The client of both one-machine transports: a ledger under a lock, data in segments that are frames.

A *plane* lends its ledger inside ``transaction()`` (exclusive, up to date), publishes records atomically with
``commit`` and stores frames. Memory and shared memory differ in their plane only. A put writes its frame outside the
lock and publishes it with one record, so readers see all of it or nothing.
"""

from __future__ import annotations

import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from spanwise.batch import BatchedDataDict
from spanwise.dataplane.assemble import put_columns, read_cells, sample_lengths, schema_of
from spanwise.dataplane.client import DEFAULT_TIMEOUT_S
from spanwise.dataplane.errors import (
    CapacityExceeded,
    ClaimTimeout,
    ClientClosed,
    DataPlaneError,
    GetTimeout,
    LeaseExpired,
    PutTimeout,
    few,
)
from spanwise.dataplane.frame_writer import FrameWriter
from spanwise.dataplane.frames import Frame
from spanwise.dataplane.ledger import Ledger, Record
from spanwise.dataplane.meta import BatchMeta
from spanwise.dataplane.objects import decode_tags
from spanwise.dataplane.requests import check_claim, check_put_request, check_registration, check_selection
from spanwise.dataplane.schema import Columns, Field


class Plane(ABC):
    """Where the ledger and the segments live. ``settings``: max_bytes, max_rows (None: unlimited), when_full."""

    copies: bool
    name: str

    @abstractmethod
    def transaction(self, deadline: float, error: type[DataPlaneError]) -> AbstractContextManager[Ledger]:
        """The ledger, exclusive and up to date; ``error`` when the lock is not free before the deadline."""

    @abstractmethod
    def commit(self, records: Sequence[Record]) -> None:
        """Publish records, all or none, and free what they let go. Inside a transaction only."""

    @abstractmethod
    def write(self, segment: str, frame: FrameWriter) -> None:
        """Write a frame that no reader can see yet. Outside the lock."""

    @abstractmethod
    def settle(self, segment: str) -> None:
        """The frame is about to be published. Inside a transaction."""

    @abstractmethod
    def discard(self, segment: str) -> None:
        """Forget a frame that was never published."""

    @abstractmethod
    def frame(self, segment: str) -> Frame:
        """A published frame. Inside a transaction; it stays readable afterwards."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Sleep until something may have changed, at most this long. Outside the lock."""

    @abstractmethod
    def reap(self) -> None:
        """Free what dead parties left behind. Inside a transaction."""

    @abstractmethod
    def leave(self, client: str) -> None:
        """A client goes; the last one takes everything with it."""


class LocalClient:
    """A ``DataPlaneClient`` over a plane; safe to share between threads."""

    def __init__(self, plane: Plane, client: str) -> None:
        self.plane = plane
        self.client = client
        self.closed = False
        self.process = os.getpid()

    def __enter__(self) -> LocalClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def register_partition(
        self, partition: str, fields: Sequence[Field | str], num_samples: int, consumer_tasks: Sequence[str]
    ) -> None:
        self._check_open()
        declared = check_registration(partition, fields, num_samples, consumer_tasks)
        with self._now(PutTimeout) as ledger:
            if ledger.check_register(partition, declared, num_samples, consumer_tasks):
                wire = [entry.to_wire() for entry in declared]
                self.plane.commit([["register", partition, wire, num_samples, list(consumer_tasks)]])

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
        names, each, tag_bytes = check_put_request(ids, fields, tags, on_conflict)
        with self._until(deadline, PutTimeout) as ledger:
            entry = ledger.partition(partition)
            ragged = {name for name, known in entry.fields.items() if known.ragged}
            held = [entry.samples[name].length if name in entry.samples else -1 for name in names]
        columns = put_columns({} if fields is None else fields, len(names), ragged)
        schemas = [schema_of(name, column) for name, column in columns.items()]
        lengths = sample_lengths(columns, each, held)
        frame = FrameWriter(columns, group_of={})
        segment = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._reserve(segment, frame.nbytes, partition, names, schemas, on_conflict, deadline)
        published = False
        try:
            if columns:
                self.plane.write(segment, frame)
            with self._until(deadline, PutTimeout) as ledger:
                ledger.check_put(partition, names, schemas, on_conflict)
                if columns:
                    self.plane.settle(segment)
                wire = [entry.to_wire() for entry in schemas]
                self.plane.commit([["put", partition, segment, frame.nbytes, names, wire, lengths, tag_bytes]])
                published = True
                return self._meta(ledger, partition, names, [entry.name for entry in schemas])
        finally:
            if not published:
                self._withdraw(segment)

    def get_samples(
        self,
        ids: Sequence[str],
        partition: str,
        select_fields: Sequence[str],
        *,
        timeout_s: float | int = DEFAULT_TIMEOUT_S,
    ) -> BatchedDataDict:
        self._check_open()
        wanted = check_selection(select_fields)
        with self._until(time.monotonic() + timeout_s, GetTimeout) as ledger:
            samples = ledger.check_cells(partition, ids, wanted)
            schemas = dict(ledger.partition(partition).fields)
            cells = [dict(sample.cells) for sample in samples]
            segments = {cell[name][0] for cell in cells for name in wanted}
            frames = {segment: self.plane.frame(segment) for segment in segments}
        if not cells:
            return BatchedDataDict()
        return read_cells(wanted, schemas, cells, frames, copy=self.plane.copies)

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
        deadline = time.monotonic() + timeout_s
        while True:
            with self._until(deadline, ClaimTimeout) as ledger:
                now = time.monotonic()
                late = ledger.expired(partition, task, now)
                if late:
                    self.plane.commit(late)
                ids = ledger.plan_claim(partition, task, required_fields, batch_size, least)
                if ids is not None:
                    lease = None if lease_s is None else uuid.uuid4().hex
                    self.plane.commit([["claim", partition, task, ids, lease, now + (lease_s or 0.0)]])
                    return self._meta(ledger, partition, ids, required_fields, task, lease)
                returns = [entry.deadline for entry in ledger.cursor(partition, task).leases.values()]
            if not blocking:
                return None
            left = min([deadline, *returns]) - time.monotonic()
            if time.monotonic() >= deadline:
                raise ClaimTimeout(
                    f"task '{task}' waited {timeout_s:g} s for {least} samples of partition '{partition}' with "
                    f"{list(required_fields)}. Their producers are probably slower, or gone. "
                    "Fix: wait longer, or pass a smaller min_batch."
                )
            self._check_open()
            self.plane.wait(max(left, 0.0))

    def get_data(self, meta: BatchMeta, select_fields: Sequence[str] | None = None) -> BatchedDataDict:
        return self.get_samples(meta.ids, meta.partition, meta.fields if select_fields is None else select_fields)

    def ack(self, meta: BatchMeta) -> None:
        self._settle_lease("ack", meta)

    def release(self, meta: BatchMeta) -> None:
        if meta.lease is None:
            raise LeaseExpired(
                f"release was given samples {few(meta.ids)} that were claimed without a lease and are consumed. "
                "Fix: claim with lease_s to be able to give them back."
            )
        self._settle_lease("release", meta)

    def check_consumption_status(self, partition: str, tasks: Sequence[str]) -> bool:
        self._check_open()
        with self._now(GetTimeout) as ledger:
            entry = ledger.partition(partition)
            return all(entry.done(ledger.cursor(partition, task)) >= entry.num_samples for task in tasks)

    def clear_samples(self, ids: Sequence[str] | None, partition: str) -> None:
        self._check_open()
        with self._now(PutTimeout) as ledger:
            wanted = None if ids is None else list(dict.fromkeys(ids))
            ledger.check_cells(partition, wanted or [], [])
            self.plane.commit([["clear", partition, wanted]])
            self.plane.reap()

    def stats(self) -> dict[str, Any]:
        self._check_open()
        with self._now(GetTimeout) as ledger:
            return {
                "transport": self.plane.name,
                "bytes": ledger.bytes,
                "rows": ledger.rows,
                "segments": len(ledger.segments),
                "partitions": {name: _partition_stats(ledger, name) for name in ledger.partitions},
            }

    def close(self) -> None:
        if self.closed or self.process != os.getpid():
            return
        self.closed = True
        self.plane.leave(self.client)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _reserve(
        self,
        segment: str,
        size: int,
        partition: str,
        ids: list[str],
        schemas: list[Field],
        on_conflict: str,
        deadline: float,
    ) -> None:
        """Hold room for the put, or wait for it. Only a plane with limits keeps reservations."""
        while True:
            with self._until(deadline, PutTimeout) as ledger:
                entering = ledger.check_put(partition, ids, schemas, on_conflict)
                limits = ledger.settings
                if limits.get("max_bytes") is None and limits.get("max_rows") is None:
                    return
                problem, possible = _over_capacity(ledger, size, entering)
                if problem:
                    self.plane.reap()
                    problem, possible = _over_capacity(ledger, size, entering)
                if not problem:
                    self.plane.commit([["reserve", segment, size, entering]])
                    return
            if not possible or limits.get("when_full") == "raise":
                raise CapacityExceeded(
                    f"{problem}. Consumers probably lag behind, or never clear. Fix: clear_samples after use, raise "
                    "the limit, or put smaller batches."
                )
            if time.monotonic() >= deadline:
                raise PutTimeout(
                    f"{problem}, and nothing was cleared before the deadline. Consumers are probably slower, or gone. "
                    "Fix: wait longer, or clear samples that were consumed."
                )
            self._check_open()
            self.plane.wait(deadline - time.monotonic())

    def _withdraw(self, segment: str) -> None:
        with self._now(PutTimeout) as ledger:
            if segment in ledger.segments:
                return  # interrupted just behind the commit: it is in
            self.plane.discard(segment)
            if segment in ledger.reservations:
                self.plane.commit([["unreserve", segment]])

    def _settle_lease(self, kind: str, meta: BatchMeta) -> None:
        self._check_open()
        if meta.lease is None:
            return
        with self._now(PutTimeout) as ledger:
            ledger.check_lease(meta.partition, meta.task, meta.lease, meta.ids, time.monotonic())
            self.plane.commit([[kind, meta.partition, meta.task, meta.lease, list(meta.ids)]])

    def _meta(
        self,
        ledger: Ledger,
        partition: str,
        ids: Sequence[str],
        fields: Sequence[str],
        task: str | None = None,
        lease: str | None = None,
    ) -> BatchMeta:
        samples = [ledger.partition(partition).samples[sample] for sample in ids]
        tags = [decode_tags(sample.tags) for sample in samples]
        return BatchMeta(list(ids), partition, [max(s.length, 0) for s in samples], tags, list(fields), task, lease)

    def _now(self, error: type[DataPlaneError]) -> AbstractContextManager[Ledger]:
        return self._until(time.monotonic() + DEFAULT_TIMEOUT_S, error)

    def _until(self, deadline: float, error: type[DataPlaneError]) -> AbstractContextManager[Ledger]:
        return self.plane.transaction(deadline, error)

    def _check_open(self) -> None:
        if self.closed or self.process != os.getpid():
            where = "closed" if self.closed else "opened in another process"
            raise ClientClosed(
                f"this {self.plane.name} client was {where}; expected an open client of this process. Fix: call "
                "open_client again, once per process."
            )


def _over_capacity(ledger: Ledger, size: int, rows: int) -> tuple[str, bool]:
    """What is exceeded ("" if nothing), and whether waiting could ever help."""
    max_bytes, max_rows = ledger.settings.get("max_bytes"), ledger.settings.get("max_rows")
    if max_bytes is not None and ledger.bytes + size > max_bytes:
        return f"the put needs {size:,} bytes; the plane holds {ledger.bytes:,} of {max_bytes:,}", size <= max_bytes
    if max_rows is not None and ledger.rows + rows > max_rows:
        return f"the put brings {rows} rows; the plane holds {ledger.rows} of {max_rows}", rows <= max_rows
    return "", True


def _partition_stats(ledger: Ledger, name: str) -> dict[str, Any]:
    partition = ledger.partition(name)
    return {
        "samples": len(partition.samples),
        "num_samples": partition.num_samples,
        "fields": list(partition.fields),
        "tasks": {
            task: {"pending": len(cursor.pending), "leased": cursor.lent, "consumed": len(cursor.consumed)}
            for task, cursor in partition.cursors.items()
        },
    }
