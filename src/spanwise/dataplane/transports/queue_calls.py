"""The queue's own requests, each under a deadline: keys, tags, what is produced and what is consumed.

One method is one round trip to TransferQueue's controller (``forget`` and ``clear_keys``: two). Its client speaks in
global indexes; these methods speak in keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spanwise.dataplane.client import DEFAULT_TIMEOUT_S
from spanwise.dataplane.errors import ClaimTimeout, DataPlaneError, GetTimeout, PutTimeout, TransportDown
from spanwise.dataplane.schema import Field
from spanwise.dataplane.transports.queue_process import QueueProcess

CLAIM_GRACE_S = 10.0
"""How long a claim that was sent may run past the caller's deadline: once the controller has it, it consumes."""


class QueueCalls:
    """See the module."""

    def __init__(self, process: QueueProcess) -> None:
        self.process = process

    def call(self, function: Callable[[Any], Any], deadline: float, error: type[DataPlaneError]) -> Any:
        client = self.process.client
        try:
            return self.process.call(lambda: function(client), deadline, error)
        except RuntimeError as problem:
            if "StorageUnitTimeout" in type(problem).__name__ or "timed out" in str(problem).lower():
                raise TransportDown(
                    f"a storage unit does not answer ({problem}). Fix: start the queue again."
                ) from problem
            raise

    def fetch(self, partition: str, task: str, fields: list[str], count: int, deadline: float) -> Any:
        """``count`` samples with their keys, or None when fewer are ready. They are consumed when the controller has
        the request, so a request that was sent is waited for beyond the deadline: to abandon it is to lose them."""
        grace = max(deadline, time.monotonic() + CLAIM_GRACE_S)

        def consume(q: Any) -> Any:
            meta = q.get_meta(fields, count, partition, mode="fetch", task_name=task)
            return (
                (meta, q.kv_retrieve_keys(list(meta.global_indexes), partition))
                if meta is not None and meta.size
                else None
            )

        try:
            return self.call(consume, grace, ClaimTimeout)
        except ClaimTimeout as problem:
            raise TransportDown(
                f"the queue did not answer a claim of task '{task}' on partition '{partition}' within "
                f"{CLAIM_GRACE_S:g} s beyond its deadline. Its controller probably hangs, and may count up to {count} "
                "samples as consumed that nobody had. Fix: start the queue again and put the samples again."
            ) from problem

    def consumed(self, partition: str, task: str, deadline: float) -> tuple[Tensor, Tensor]:
        where, status = self.call(lambda q: q.get_consumption_status(task, partition), deadline, GetTimeout)
        if where is None or status is None:
            return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.int8)
        return where, status

    def production(self, partition: str, name: str, deadline: float) -> tuple[Tensor, Tensor]:
        where, status = self.call(lambda q: q.get_production_status([name], partition), deadline, GetTimeout)
        if where is None or status is None:
            return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.bool)
        return where, status.reshape(len(where), -1).bool().all(dim=1)

    def produced(self, partition: str, name: str, ids: list[str], deadline: float) -> list[str]:
        """Those of the ids that have the field."""
        where, produced = self.production(partition, name, deadline)
        indexes = where[produced].tolist()
        if not indexes:
            return []
        keys = self.call(lambda q: q.kv_retrieve_keys(indexes, partition), deadline, GetTimeout)
        return [key for key in keys if key in set(ids)]

    def known_keys(self, partition: str, ids: list[str] | None, deadline: float) -> set[str]:
        listing = self.call(lambda q: q.kv_list(partition), deadline, PutTimeout)
        keys = set(listing.get(partition, {}))
        return keys if ids is None else keys & set(ids)

    def confirm(self, partition: str, ids: list[str], schemas: Sequence[Field], deadline: float) -> None:
        """The queue only logs when its controller did not take note of a put: look."""
        meta = self.call(lambda q: q.kv_retrieve_meta(ids, partition, create=False), deadline, PutTimeout)
        if meta.size != len(ids) or any(entry.name not in meta.field_names for entry in schemas):
            raise TransportDown(
                f"the queue's controller did not take note of {len(ids)} samples of partition '{partition}'; it was "
                "probably busy, or the samples were cleared meanwhile. Fix: put them again."
            )

    def put_tags(self, partition: str, keys: list[str], tags: list[dict[str, Any]], deadline: float) -> None:
        meta = self.call(lambda q: q.kv_retrieve_meta(keys, partition, create=True), deadline, PutTimeout)
        meta.update_custom_meta(tags)
        self.call(lambda q: q.set_custom_meta(meta), deadline, PutTimeout)

    def clear_keys(self, keys: list[str], partition: str, deadline: float) -> None:
        if keys:
            meta = self.call(lambda q: q.kv_retrieve_meta(keys, partition, create=False), deadline, PutTimeout)
            if meta.size:
                self.call(lambda q: q.clear_samples(meta), deadline, PutTimeout)

    def clear_partition(self, partition: str, deadline: float) -> None:
        if partition in self.call(lambda q: q.get_partition_list(), deadline, PutTimeout):
            self.call(lambda q: q.clear_partition(partition), deadline, PutTimeout)

    def forget(self, keys: list[str], partition: str) -> None:
        """Remove keys that a failed put left behind; a queue that is down keeps them, and says so on the next call."""
        try:
            self.clear_keys(keys, partition, time.monotonic() + DEFAULT_TIMEOUT_S)
        except DataPlaneError:
            return
