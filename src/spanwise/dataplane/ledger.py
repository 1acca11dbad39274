"""The ledger: which samples a plane holds, where their cells lie, who has consumed them. A pure state machine.

Every change is a *record*, a plain list; ``apply`` is deterministic, so processes that apply the same records hold the
same state (shared memory replays them from a log), and a snapshot plus the records after it is the whole plane. The
``check_*`` and ``plan_*`` methods only look, and raise the named errors; nothing here waits, locks or touches bytes.
O(rows of the record) per change; a claim scans what its task has not consumed yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spanwise.dataplane.errors import (
    CapacityExceeded,
    FieldNotReady,
    LeaseExpired,
    PartitionConflict,
    PartitionExhausted,
    PartitionNotFound,
    SampleConflict,
    SampleNotFound,
    SchemaMismatch,
    TaskNotFound,
    few,
)
from spanwise.dataplane.schema import Field

Record = list[Any]
Cell = tuple[str, int]


@dataclass
class Sample:
    """One sample: field → (segment, row), its tokens (-1: not known), its tags as name → msgpack."""

    cells: dict[str, Cell] = field(default_factory=dict)
    length: int = -1
    tags: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Lease:
    """Samples lent to a claimer until ``deadline`` (monotonic seconds of this machine)."""

    deadline: float
    ids: list[str]


@dataclass
class Cursor:
    """One task's way through a partition: what waits, what is lent, what is consumed for good."""

    pending: dict[str, None] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    consumed: set[str] = field(default_factory=set)

    @property
    def lent(self) -> int:
        return sum(len(lease.ids) for lease in self.leases.values())


@dataclass
class Partition:
    """Samples in the order they came, their fields' schemas, and one cursor per task."""

    declared: list[Field]
    num_samples: int
    cursors: dict[str, Cursor]
    fields: dict[str, Field]
    samples: dict[str, Sample] = field(default_factory=dict)
    cleared: set[str] = field(default_factory=set)

    def done(self, cursor: Cursor) -> int:
        """Samples that this cursor has consumed or will never see."""
        return len(cursor.consumed | self.cleared)


class Ledger:
    """See the module. ``bytes`` and ``rows`` count what is held and what is reserved for puts in flight."""

    def __init__(self) -> None:
        self.partitions: dict[str, Partition] = {}
        self.segments: dict[str, list[int]] = {}  # name → [bytes, cells in use]
        self.reservations: dict[str, tuple[int, int]] = {}
        self.clients: dict[str, list[int]] = {}
        self.settings: dict[str, Any] = {}

    @property
    def bytes(self) -> int:
        held = sum(size for size, _ in self.segments.values())
        return held + sum(size for size, _ in self.reservations.values())

    @property
    def rows(self) -> int:
        held = sum(len(partition.samples) for partition in self.partitions.values())
        return held + sum(rows for _, rows in self.reservations.values())

    # ---- looking -------------------------------------------------------------------------------------------------

    def partition(self, name: str) -> Partition:
        if name not in self.partitions:
            raise PartitionNotFound(
                f"there is no partition '{name}'; this plane has {few(self.partitions) or 'none'}. It was probably not "
                "registered yet, or by another name. Fix: call register_partition first."
            )
        return self.partitions[name]

    def cursor(self, name: str, task: str) -> Cursor:
        partition = self.partition(name)
        if task not in partition.cursors:
            raise TaskNotFound(
                f"partition '{name}' has no consumer task '{task}'; it was registered for {list(partition.cursors)}. "
                "The task was probably left out of consumer_tasks. Fix: register the partition with it."
            )
        return partition.cursors[task]

    def check_register(self, name: str, fields: Sequence[Field], num_samples: int, tasks: Sequence[str]) -> bool:
        """True when the partition is new (or empty and may change); False when it is there already, alike."""
        old = self.partitions.get(name)
        if old is None:
            return True
        if (old.declared, old.num_samples, list(old.cursors)) == (list(fields), num_samples, list(tasks)):
            return False
        if old.samples or old.cleared:
            raise PartitionConflict(
                f"partition '{name}' exists with {old.num_samples} samples, fields {few(old.fields)} and tasks "
                f"{list(old.cursors)}; it was registered again with other settings. Two parties probably disagree. "
                "Fix: use the same arguments everywhere, or clear_samples(None, ...) before registering anew."
            )
        return True

    def check_put(self, name: str, ids: Sequence[str], fields: Sequence[Field], on_conflict: str) -> int:
        """How many of the ids are new. Raises where the put contradicts the partition."""
        partition = self.partition(name)
        self.check_schemas(name, fields)
        names = {column.name for column in fields}
        if on_conflict == "error":
            refuse_conflict(
                name, [s for s in ids if s in partition.samples and names & partition.samples[s].cells.keys()]
            )
        entering = [s for s in ids if s not in partition.samples and s not in partition.cleared]
        self.check_room(name, len(partition.samples) + len(partition.cleared), len(entering))
        return sum(1 for s in ids if s not in partition.samples)

    def check_schemas(self, name: str, fields: Sequence[Field]) -> None:
        """SchemaMismatch where a column contradicts its field."""
        partition = self.partition(name)
        self.check_fields(name, [column.name for column in fields])
        for column in fields:
            self._check_schema(name, partition, column)

    def check_fields(self, name: str, fields: Sequence[str]) -> None:
        """SchemaMismatch for a field that the partition was not registered with: nobody can ever produce it."""
        known = self.partition(name).fields
        unknown = [column for column in fields if column not in known]
        if unknown:
            raise SchemaMismatch(
                f"partition '{name}' has no field '{unknown[0]}'; it was registered with {few(known)}. The name was "
                "probably misspelled. Fix: name every field in register_partition."
            )

    def check_room(self, name: str, known: int, entering: int) -> None:
        """CapacityExceeded when more samples come than the partition was registered for."""
        partition = self.partition(name)
        if known + entering > partition.num_samples:
            raise CapacityExceeded(
                f"partition '{name}' was registered for {partition.num_samples} samples and has had {known}; the put "
                f"brings {entering} more. num_samples was probably computed without the repeats per prompt. "
                "Fix: register the true number."
            )

    def check_cells(self, name: str, ids: Sequence[str], fields: Sequence[str]) -> list[Sample]:
        """The samples, all of whose named fields are there."""
        partition = self.partition(name)
        absent = [sample for sample in ids if sample not in partition.samples]
        if absent:
            raise SampleNotFound(
                f"partition '{name}' does not hold {few(absent)}. They were probably cleared, or never put. "
                "Fix: ask for ids that a put or a claim returned."
            )
        samples = [partition.samples[sample] for sample in ids]
        missing = {
            sample: [column for column in fields if column not in held.cells]
            for sample, held in zip(ids, samples, strict=True)
        }
        missing = {sample: columns for sample, columns in missing.items() if columns}
        if missing:
            shown = few(f"{sample} × {columns}" for sample, columns in missing.items())
            raise FieldNotReady(
                f"in partition '{name}' these are not produced yet: {shown}; known fields are {few(partition.fields)}. "
                "The producer of the field has probably not run, or the name is misspelled. "
                "Fix: claim with required_fields, which waits for them.",
                missing,
            )
        return samples

    def plan_claim(self, name: str, task: str, fields: Sequence[str], most: int, least: int) -> list[str] | None:
        """The ids to give now, or None while it is too early. PartitionExhausted when nothing will ever come."""
        partition, cursor = self.partition(name), self.cursor(name, task)
        self.check_fields(name, fields)
        ready = []
        for sample in cursor.pending:
            cells = partition.samples[sample].cells
            if all(column in cells for column in fields):
                ready.append(sample)
                if len(ready) == most:
                    return ready
        if len(ready) >= least:
            return ready
        done = partition.done(cursor)
        if done >= partition.num_samples:
            raise PartitionExhausted(
                f"task '{task}' has consumed all {partition.num_samples} samples of partition '{name}'. "
                "Fix: stop here, or clear and register the partition for the next round."
            )
        everything_is_in = done + cursor.lent + len(ready) >= partition.num_samples
        return ready if ready and everything_is_in else None

    def expired(self, name: str, task: str, now: float) -> list[Record]:
        """The records that take back what was lent for too long."""
        leases = self.cursor(name, task).leases
        return [["release", name, task, lease, entry.ids] for lease, entry in leases.items() if entry.deadline <= now]

    def check_lease(self, name: str, task: str | None, lease: str, ids: Sequence[str], now: float) -> None:
        held = self.cursor(name, task or "").leases.get(lease)
        lost = list(ids) if held is None or held.deadline <= now else [s for s in ids if s not in held.ids]
        if lost:
            raise LeaseExpired(
                f"samples {few(lost)} no longer belong to lease {lease} of task '{task}'. The work probably took "
                "longer than lease_s, or they were given back or acknowledged before. Fix: claim with a longer lease_s."
            )

    # ---- changing ------------------------------------------------------------------------------------------------

    def apply(self, record: Record) -> list[str]:
        """Carry out one record; returns the segments that nothing refers to any more."""
        kind, *arguments = record
        freed: list[str] | None = getattr(self, f"_apply_{kind}")(*arguments)
        return freed or []

    def _apply_settings(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def _apply_join(self, client: str, pid: int, started: int) -> None:
        self.clients[client] = [pid, started]

    def _apply_leave(self, client: str) -> None:
        self.clients.pop(client, None)

    def _apply_reserve(self, token: str, size: int, rows: int) -> None:
        self.reservations[token] = (size, rows)

    def _apply_unreserve(self, token: str) -> None:
        self.reservations.pop(token, None)

    def _apply_register(self, name: str, fields: list[Any], num_samples: int, tasks: list[str]) -> None:
        declared = [Field.from_wire(entry) for entry in fields]
        cursors = {task: Cursor() for task in tasks}
        self.partitions[name] = Partition(declared, num_samples, cursors, {entry.name: entry for entry in declared})

    def _apply_put(
        self, name: str, segment: str, size: int, ids: list[str], fields: list[Any], lengths: list[int], tags: list[Any]
    ) -> list[str]:
        partition = self.partitions[name]
        columns = [Field.from_wire(entry) for entry in fields]
        self._apply_unreserve(segment)
        for column in columns:
            partition.fields[column.name] = column
        if columns:
            self.segments[segment] = [size, 0]
        loose: list[Cell] = []
        for row, sample_id in enumerate(ids):
            sample = partition.samples.get(sample_id)
            if sample is None:
                sample = partition.samples[sample_id] = Sample()
                partition.cleared.discard(sample_id)
                for cursor in partition.cursors.values():
                    if sample_id not in cursor.consumed:
                        cursor.pending[sample_id] = None
            for column in columns:
                if column.name in sample.cells:
                    loose.append(sample.cells[column.name])
                sample.cells[column.name] = (segment, row)
            sample.length = lengths[row] if lengths[row] >= 0 else sample.length
            sample.tags |= tags[row]
        if columns:
            self.segments[segment][1] = len(columns) * len(ids)
        return self._let_go(loose)

    def _apply_claim(self, name: str, task: str, ids: list[str], lease: str | None, deadline: float) -> None:
        cursor = self.partitions[name].cursors[task]
        for sample in ids:
            del cursor.pending[sample]
        if lease is None:
            cursor.consumed.update(ids)
        else:
            cursor.leases[lease] = Lease(deadline, list(ids))

    def _apply_ack(self, name: str, task: str, lease: str, ids: list[str]) -> None:
        cursor = self.partitions[name].cursors[task]
        self._take_from_lease(cursor, lease, ids)
        cursor.consumed.update(ids)

    def _apply_release(self, name: str, task: str, lease: str, ids: list[str]) -> None:
        partition = self.partitions[name]
        cursor = partition.cursors[task]
        self._take_from_lease(cursor, lease, ids)
        back = [sample for sample in ids if sample in partition.samples]
        cursor.pending = dict.fromkeys([*back, *cursor.pending])

    def _apply_clear(self, name: str, ids: list[str] | None) -> list[str]:
        partition = self.partitions[name]
        gone = list(partition.samples) if ids is None else ids
        loose = [cell for sample in gone for cell in partition.samples.pop(sample).cells.values()]
        if ids is None:
            partition.cleared.clear()
            partition.cursors = {task: Cursor() for task in partition.cursors}
            return self._let_go(loose)
        partition.cleared.update(gone)
        for cursor in partition.cursors.values():
            for sample in gone:
                cursor.pending.pop(sample, None)
            for lease in list(cursor.leases):
                self._take_from_lease(cursor, lease, gone)
        return self._let_go(loose)

    @staticmethod
    def _take_from_lease(cursor: Cursor, lease: str, ids: Iterable[str]) -> None:
        entry = cursor.leases.get(lease)
        if entry is None:
            return
        gone = set(ids)
        entry.ids = [sample for sample in entry.ids if sample not in gone]
        if not entry.ids:
            del cursor.leases[lease]

    def _let_go(self, cells: Iterable[Cell]) -> list[str]:
        freed = []
        for segment, _ in cells:
            entry = self.segments[segment]
            entry[1] -= 1
            if entry[1] == 0:
                del self.segments[segment]
                freed.append(segment)
        return freed

    @staticmethod
    def _check_schema(name: str, partition: Partition, column: Field) -> None:
        known = partition.fields[column.name]
        expected = (known.dtype_name, known.tail_shape, known.ragged)
        given = (column.dtype_name, column.tail_shape, column.ragged)
        if any(want is not None and want != have for want, have in zip(expected, given, strict=True)):
            raise SchemaMismatch(
                f"field '{column.name}' of partition '{name}' is (dtype, tail, ragged) {expected} and was put as "
                f"{given}. Another producer probably casts or pads it differently. Fix: cast it, and pack ragged "
                "columns with pack_jagged_fields before every put."
            )


def refuse_conflict(name: str, held: Sequence[str]) -> None:
    """SampleConflict when there are samples that hold some of the fields already."""
    if held:
        raise SampleConflict(
            f"samples {few(held)} of partition '{name}' already have some of the fields of this put; "
            "on_conflict='error' expects new ones. A producer was probably restarted. "
            "Fix: pass on_conflict='replace' to overwrite them."
        )
