"""The one interface to a data plane, whichever transport carries it, and ``open_client`` that gives one.

Producing a field is the signal that it is ready. Each consumer task has its own cursor over a partition. A reader names
the fields it wants. Everything that can wait takes ``timeout_s`` and raises a named error when it passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from spanwise.batch import BatchedDataDict
from spanwise.dataplane.meta import BatchMeta
from spanwise.dataplane.schema import Columns, Field

DEFAULT_TIMEOUT_S = 60.0
OPTIONS = {
    "memory": ["max_bytes", "max_rows", "when_full"],
    "shm": ["max_bytes", "max_rows", "when_full"],
    "tq": ["layout", "storage_units", "max_rows", "timeout_s"],
}


@runtime_checkable
class DataPlaneClient(Protocol):
    """What every transport offers. The errors are those of ``spanwise.dataplane.errors``."""

    def register_partition(
        self, partition: str, fields: Sequence[Field | str], num_samples: int, consumer_tasks: Sequence[str]
    ) -> None:
        """Make a partition. Again with the same arguments it does nothing; with others it is PartitionConflict."""
        ...

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
        """Write columns (and tags) of samples; all of them become visible at once, or none.

        ``on_conflict="replace"`` overwrites fields that exist (cursors stay), ``"error"`` raises SampleConflict.
        """
        ...

    def get_samples(
        self,
        ids: Sequence[str],
        partition: str,
        select_fields: Sequence[str],
        *,
        timeout_s: float | int = DEFAULT_TIMEOUT_S,
    ) -> BatchedDataDict:
        """Read columns in wire layout: jagged, rectangular, object arrays. Does not wait for producers."""
        ...

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
        """Take samples whose required fields are ready and that this task has not had.

        Gives up to ``batch_size`` and at least ``min_batch`` (default: all of it) samples, in the order they came.
        Blocks until then, or raises ClaimTimeout; with ``blocking=False`` it returns None instead; a field that the
        partition was not registered with is SchemaMismatch at once. Once all samples of
        the partition are in, the last claim may be smaller; then PartitionExhausted. With ``lease_s`` samples come
        back unless they are acknowledged in time.
        """
        ...

    def get_data(self, meta: BatchMeta, select_fields: Sequence[str] | None = None) -> BatchedDataDict:
        """Read the columns of a claim; by default ``meta.fields``."""
        ...

    def ack(self, meta: BatchMeta) -> None:
        """The leased samples are consumed for good. LeaseExpired when they no longer belong to the lease."""
        ...

    def release(self, meta: BatchMeta) -> None:
        """Give leased samples back; others may claim them at once."""
        ...

    def check_consumption_status(self, partition: str, tasks: Sequence[str]) -> bool:
        """True when nothing is left for any named task: every sample was consumed, or cleared before it was.

        Leased samples are not consumed yet. A claim raises PartitionExhausted exactly then.
        """
        ...

    def clear_samples(self, ids: Sequence[str] | None, partition: str) -> None:
        """Drop samples; None drops all of them and every cursor, so that the partition starts anew."""
        ...

    def stats(self) -> dict[str, Any]:
        """What the plane holds: bytes, rows, and per partition its samples, fields and tasks."""
        ...

    def close(self) -> None:
        """Let go. A second call does nothing; other clients go on."""
        ...


def open_client(url: str, **options: Any) -> DataPlaneClient:
    """A client for a URL.

    ``memory://`` is a plane of its own; ``memory://NAME`` is shared by name within the process. ``shm://NAME`` is
    shared by the processes of one machine and user. ``tq://auto`` starts TransferQueue on the Ray cluster in reach (or
    a local one); ``tq://ADDRESS`` joins the queue of a running Ray cluster.

    Options of memory and shm: ``max_bytes``, ``max_rows``, ``when_full`` ("block" or "raise"). Options of tq:
    ``layout`` ("columns" or "frame"), ``storage_units``, ``max_rows``, ``timeout_s``.

    >>> client = open_client("memory://")
    >>> client.register_partition("train", ["reward"], num_samples=1, consumer_tasks=["trainer"])
    >>> import torch
    >>> client.put_samples(["a"], "train", {"reward": torch.ones(1)}).ids
    ['a']
    >>> client.get_samples(["a"], "train", ["reward"])["reward"].tolist()
    [1.0]
    >>> client.close()
    """
    scheme, mark, rest = url.partition("://")
    unknown = sorted(set(options) - set(OPTIONS.get(scheme, options)))
    if unknown:
        raise ValueError(
            f"open_client('{url}') was given {unknown}; expected some of {OPTIONS[scheme]}. They were probably meant "
            "for another transport. Fix: leave them out."
        )
    if mark and scheme == "memory":
        from spanwise.dataplane.transports.memory import open_memory

        return open_memory(rest, **options)
    if mark and scheme == "shm" and rest:
        from spanwise.dataplane.transports.shared_memory import open_shared_memory

        return open_shared_memory(rest, **options)
    if mark and scheme == "tq" and rest:
        from spanwise.dataplane.transports.transfer_queue import open_transfer_queue

        return open_transfer_queue(rest, **options)
    raise ValueError(
        f"open_client was given {url!r}; expected memory://, memory://NAME, shm://NAME, tq://auto or tq://ADDRESS. The "
        "scheme was probably misspelled or the name left out. Fix: use one of these forms."
    )
