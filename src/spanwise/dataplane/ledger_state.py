"""A ledger as one plain record and back: what a compacted log begins with. O(samples)."""

from __future__ import annotations

from typing import Any

from spanwise.dataplane.ledger import Cursor, Lease, Ledger, Partition, Record, Sample
from spanwise.dataplane.schema import Field


def to_record(ledger: Ledger) -> Record:
    """Everything the ledger knows, as lists, dicts, strings and numbers."""
    partitions = {name: _partition_to_wire(partition) for name, partition in ledger.partitions.items()}
    reserved = {token: list(entry) for token, entry in ledger.reservations.items()}
    return [partitions, ledger.segments, reserved, ledger.clients, ledger.settings]


def from_record(record: Record) -> Ledger:
    """The inverse of :func:`to_record`."""
    ledger = Ledger()
    partitions, ledger.segments, reserved, ledger.clients, ledger.settings = record
    ledger.partitions = {name: _partition_from_wire(wire) for name, wire in partitions.items()}
    ledger.reservations = {token: (size, rows) for token, (size, rows) in reserved.items()}
    return ledger


def _partition_to_wire(partition: Partition) -> Record:
    return [
        [entry.to_wire() for entry in partition.declared],
        partition.num_samples,
        {task: _cursor_to_wire(cursor) for task, cursor in partition.cursors.items()},
        [entry.to_wire() for entry in partition.fields.values()],
        {name: [sample.cells, sample.length, sample.tags] for name, sample in partition.samples.items()},
        sorted(partition.cleared),
    ]


def _cursor_to_wire(cursor: Cursor) -> Record:
    leases = {name: [lease.deadline, lease.ids] for name, lease in cursor.leases.items()}
    return [list(cursor.pending), leases, sorted(cursor.consumed)]


def _partition_from_wire(wire: Record) -> Partition:
    declared, num_samples, cursors, fields, samples, cleared = wire
    known = [Field.from_wire(entry) for entry in fields]
    return Partition(
        [Field.from_wire(entry) for entry in declared],
        num_samples,
        {task: _cursor_from_wire(cursor) for task, cursor in cursors.items()},
        {entry.name: entry for entry in known},
        {name: _sample_from_wire(sample) for name, sample in samples.items()},
        set(cleared),
    )


def _sample_from_wire(wire: Record) -> Sample:
    cells, length, tags = wire
    return Sample({name: (segment, row) for name, (segment, row) in cells.items()}, length, tags)


def _cursor_from_wire(wire: Record) -> Cursor:
    pending: list[Any]
    pending, leases, consumed = wire
    lent = {name: Lease(deadline, ids) for name, (deadline, ids) in leases.items()}
    return Cursor(dict.fromkeys(pending), lent, set(consumed))
