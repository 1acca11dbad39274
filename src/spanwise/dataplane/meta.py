"""BatchMeta: which samples a batch is made of, without their data. Pure transforms, O(rows) each.

A claim, a put and every split or merge of work passes these around; the data follows only where it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spanwise.spans.pack import balanced_shards


@dataclass(frozen=True)
class BatchMeta:
    """Samples of one partition, in order.

    Attributes:
        ids: one string per sample.
        partition: where they live.
        lengths: tokens per sample: the tag ``input_lengths``, else of ``input_ids``, else of the first ragged columns
            that were put (0 where nothing was). Columns that are written back later do not change it.
        tags: one dict per sample.
        fields: the columns this batch is about.
        task, lease: who claimed it and under which lease, when it was claimed.

    >>> meta = BatchMeta(["a", "b", "c"], "train", [3, 1, 2], [{}, {}, {}], ["ids"])
    >>> meta.subset([2, 0]).ids, meta.slice(1, 3).lengths, meta.drop(["a"]).ids
    (['c', 'a'], [1, 2], ['b', 'c'])
    """

    ids: list[str]
    partition: str
    lengths: list[int] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    task: str | None = None
    lease: str | None = None

    def __post_init__(self) -> None:
        count = len(self.ids)
        object.__setattr__(self, "lengths", self.lengths or [0] * count)
        object.__setattr__(self, "tags", self.tags or [{} for _ in range(count)])
        if len(self.lengths) != count or len(self.tags) != count:
            raise ValueError(
                f"a BatchMeta of {count} ids has {len(self.lengths)} lengths and {len(self.tags)} tags; expected one "
                "of each per id. One list was probably filtered alone. Fix: use subset, slice or drop."
            )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self.ids)

    def subset(self, entries: Sequence[int | str]) -> BatchMeta:
        """The samples at these positions (or of these ids), in the order named."""
        rows = self._positions(entries)
        return replace(
            self,
            ids=[self.ids[row] for row in rows],
            lengths=[self.lengths[row] for row in rows],
            tags=[self.tags[row] for row in rows],
        )

    def slice(self, start: int, end: int) -> BatchMeta:
        """Samples ``start`` to ``end`` (exclusive)."""
        return self.subset(range(*slice(start, end).indices(self.size)))

    def drop(self, entries: Sequence[int | str]) -> BatchMeta:
        """Everything but these positions or ids."""
        gone = set(self._positions(entries))
        return self.subset([row for row in range(self.size) if row not in gone])

    def with_fields(self, fields: Sequence[str]) -> BatchMeta:
        """The same samples, about these columns."""
        return replace(self, fields=list(fields))

    def stamp_tags(self, tags: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> BatchMeta:
        """Add tags: one mapping for all samples, or one mapping per sample. Existing keys are overwritten."""
        each = [tags] * self.size if isinstance(tags, Mapping) else list(tags)
        if len(each) != self.size:
            raise ValueError(
                f"{len(each)} tags were given for {self.size} samples; expected one mapping for all or one per "
                "sample. They probably belong to another batch. Fix: stamp before splitting, or subset the tags too."
            )
        return replace(self, tags=[{**old, **new} for old, new in zip(self.tags, each, strict=True)])

    @staticmethod
    def concat(metas: Sequence[BatchMeta]) -> BatchMeta:
        """The samples of several batches of one partition, one after the other; fields that all of them have."""
        if not metas or len({(meta.partition, meta.task, meta.lease) for meta in metas}) > 1:
            raise ValueError(
                f"concat was given {len(metas)} metas of (partition, task, lease) "
                f"{sorted({(meta.partition, str(meta.task), str(meta.lease)) for meta in metas})}; expected at least "
                "one, all alike. Claims of different leases were probably mixed. Fix: ack them one by one."
            )
        first = metas[0]
        return replace(
            first,
            ids=[entry for meta in metas for entry in meta.ids],
            lengths=[entry for meta in metas for entry in meta.lengths],
            tags=[entry for meta in metas for entry in meta.tags],
            fields=[name for name in first.fields if all(name in meta.fields for meta in metas)],
        )

    def _positions(self, entries: Sequence[int | str]) -> list[int]:
        where = {sample: row for row, sample in enumerate(self.ids)}
        rows = [where.get(entry, -1) if isinstance(entry, str) else entry for entry in entries]
        for entry, row in zip(entries, rows, strict=True):
            if not 0 <= row < self.size:
                raise IndexError(
                    f"{entry!r} is not in this batch of {self.size}; expected positions 0 to {self.size - 1}, or ids. "
                    "It probably belongs to another batch. Fix: index within this one."
                )
        return rows


def shard_meta_for_ranks(meta: BatchMeta, ranks: int) -> tuple[list[BatchMeta], list[int]]:
    """Split a batch over data-parallel ranks with nearly equal tokens, and say how to undo it.

    Returns:
        One meta per rank, and the inverse permutation: with every rank's results laid end to end,
        ``results[inverse[i]]`` belongs to sample i of ``meta``.

    >>> shards, inverse = shard_meta_for_ranks(BatchMeta(["a", "b", "c", "d"], "p", [9, 1, 1, 8]), 2)
    >>> [shard.ids for shard in shards], BatchMeta.concat(shards).subset(inverse).ids
    ([['a', 'c'], ['b', 'd']], ['a', 'b', 'c', 'd'])
    """
    shards = balanced_shards(meta.lengths, ranks)
    order = [row for shard in shards for row in shard]
    inverse = [0] * len(order)
    for place, row in enumerate(order):
        inverse[row] = place
    return [meta.subset(shard) for shard in shards], inverse
