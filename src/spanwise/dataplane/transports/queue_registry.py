"""What every process must agree on about a partition, kept in the queue itself.

Next to each partition lies a registry partition of keys without data: ``registration`` (layout, fields, number of
samples, tasks), ``field/NAME`` for every schema that a first put has taught, ``cleared/ID`` for every sample that was
in and is gone. They are separate keys because the queue replaces a key's tags whole: two processes that learn different
fields do not overwrite one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spanwise.dataplane.errors import GetTimeout, PutTimeout
from spanwise.dataplane.ledger import Ledger, refuse_conflict
from spanwise.dataplane.schema import Field
from spanwise.dataplane.transports.queue_calls import QueueCalls

REGISTRY = "spanwise.registry/"
CLEARED = "cleared/"
SCHEMA = "field/"


@dataclass
class Registration:
    """What the registry says about a partition, and a ledger that checks schemas as the other transports do."""

    layout: str
    num_samples: int
    ledger: Ledger = field(default_factory=Ledger)


class QueueRegistry:
    """Registrations of the partitions, read once and again when a schema is missing."""

    def __init__(self, calls: QueueCalls) -> None:
        self.calls = calls
        self.known: dict[str, Registration] = {}

    def of(self, partition: str, deadline: float, *, fresh: bool = False) -> Registration:
        if fresh or partition not in self.known:
            found = self.read(partition, deadline)
            if found is None:
                Ledger().partition(partition)  # raises PartitionNotFound in the words of every transport
            else:
                self.known[partition] = found
        return self.known[partition]

    def read(self, partition: str, deadline: float) -> Registration | None:
        keys = self.listing(partition, deadline)
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

    def listing(self, partition: str, deadline: float) -> dict[str, dict[str, Any]]:
        listing = self.calls.call(lambda q: q.kv_list(REGISTRY + partition), deadline, GetTimeout)
        found: dict[str, dict[str, Any]] = listing.get(REGISTRY + partition, {})
        return found

    def keys(self, partition: str, prefix: str, deadline: float) -> list[str]:
        return [key for key in self.listing(partition, deadline) if key.startswith(prefix)]

    def learn(self, registration: Registration, partition: str, schemas: Sequence[Field], deadline: float) -> None:
        known = registration.ledger.partition(partition).fields
        new = [entry for entry in schemas if known[entry.name] != entry]
        if new:
            keys = [SCHEMA + entry.name for entry in new]
            self.calls.put_tags(REGISTRY + partition, keys, [{"field": entry.to_wire()} for entry in new], deadline)
            known.update({entry.name: entry for entry in new})

    def cleared(self, partition: str, deadline: float) -> int:
        """Samples that were in and are gone."""
        gone = {key.removeprefix(CLEARED) for key in self.keys(partition, CLEARED, deadline)}
        return len(gone - self.calls.known_keys(partition, None, deadline)) if gone else 0

    def check_put(
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
            registration = self.of(partition, deadline, fresh=True)
        registration.ledger.check_schemas(partition, schemas)
        task = next(iter(registration.ledger.partition(partition).cursors), "spanwise")
        known = len(self.calls.consumed(partition, task, deadline)[0])
        present: set[str] = set()
        if known:
            meta = self.calls.call(lambda q: q.kv_retrieve_meta(ids, partition, create=False), deadline, PutTimeout)
            indexes = list(meta.global_indexes)
            if indexes:
                present = set(self.calls.call(lambda q: q.kv_retrieve_keys(indexes, partition), deadline, PutTimeout))
        entering = len(ids) - len(present)
        if known + entering + len(registration.ledger.partition(partition).cleared) > registration.num_samples:
            gone = {key.removeprefix(CLEARED) for key in self.keys(partition, CLEARED, deadline)}
            entering = len(set(ids) - present - gone)
            known += len(gone - self.calls.known_keys(partition, None, deadline)) if gone else 0
        registration.ledger.check_room(partition, known, entering)
        if on_conflict == "error":
            held = {name for column in schemas for name in self.calls.produced(partition, column.name, ids, deadline)}
            refuse_conflict(partition, sorted(held))
        return present
