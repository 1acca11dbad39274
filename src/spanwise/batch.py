"""BatchedDataDict, the batch that every collator returns, and how it becomes a model's arguments.

A batch is a dict whose tensors, object arrays and lists share their first dimension, the rows. Everything here is a
view or a gather: slicing costs O(1), selecting and concatenating O(bytes moved).

Shapes: N rows, S sequence length.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spanwise.spans.pack import balanced_shards, block_causal_mask

# What our losses and reports need and no model's forward() takes.
BOOKKEEPING_KEYS = frozenset(
    {
        "idx", "sample_mask", "input_lengths", "labels_shifted", "loss_mask", "token_mask", "segment_ids",
        "n_images_per_sample", "n_videos_per_sample", "_injected_fake", "noise_t", "noise_weight", "target_ids",
        "positions", "fixed_positions_mask", "epoch", "position", "left_out",
    }
)  # fmt: skip
BOOKKEEPING_PREFIXES = ("teacher_", "alignment_")
IGNORE_INDEX = -100


class BatchedDataDict(UserDict[str, Any]):
    """A mapping from names to columns of equal length.

    Columns are tensors (rectangular or jagged), object arrays or lists, one entry per row; anything else (the bool
    ``labels_shifted``, numbers, strings) describes the whole batch and is carried along.

    >>> batch = BatchedDataDict({"input_ids": torch.arange(6).view(3, 2), "labels_shifted": False})
    >>> batch.size, batch.slice(1, 3)["input_ids"].tolist(), batch.select([2, 0])["input_ids"].tolist()
    (3, [[2, 3], [4, 5]], [[4, 5], [0, 1]])
    """

    @property
    def size(self) -> int:
        """The number of rows; 0 for a batch without columns. Columns of unequal length are an error that names them."""
        lengths = {key: len(value) for key, value in self.data.items() if is_column(value)}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"the columns have different numbers of rows: {lengths}; expected one number for all. A packed batch "
                "(documents and rows differ) or concatenated media were probably asked for their rows. "
                "Fix: take such columns out before slicing, or slice before packing."
            )
        return next(iter(lengths.values()), 0)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BatchedDataDict:
        """The same batch with every tensor on ``device``; other values are shared."""
        return BatchedDataDict(
            {
                key: value.to(device, non_blocking=non_blocking) if isinstance(value, Tensor) else value
                for key, value in self.data.items()
            }
        )

    def slice(self, start: int, end: int) -> BatchedDataDict:
        """Rows ``start`` to ``end`` (exclusive), as views where torch allows."""
        _refuse_packed(self.data)
        rows = range(*slice(start, end).indices(self.size))
        return self._map_columns(
            lambda column: _take(column, list(rows)) if _is_jagged(column) else column[rows.start : rows.stop]
        )

    def select(self, rows: Sequence[int] | Tensor) -> BatchedDataDict:
        """The rows named, in the order named."""
        _refuse_packed(self.data)
        wanted = rows.tolist() if isinstance(rows, Tensor) else list(rows)
        outside = [row for row in wanted if not -self.size <= row < self.size]
        if outside:
            raise IndexError(
                f"rows {outside[:5]} were asked of a batch of {self.size} rows; expected 0 to {self.size - 1}. The "
                "indices probably belong to another batch. Fix: index with positions in this batch, not data-set ids."
            )
        return self._map_columns(lambda column: _take(column, wanted))

    @classmethod
    def concat(
        cls, batches: Sequence[Mapping[str, Any]], pad_values: Mapping[str, int | float] | None = None
    ) -> BatchedDataDict:
        """Lay batches below one another.

        Args:
            batches: at least one; all with the same keys.
            pad_values: what to fill a column with on the right where widths differ; a column of unequal widths that is
                not named here is an error.
        """
        if not batches:
            return cls()
        keys = set(batches[0])
        for place, batch in enumerate(batches):
            _refuse_packed(batch)
            if set(batch) != keys:
                raise ValueError(
                    f"batch {place} has keys {sorted(set(batch) ^ keys)} that others have not; expected equal keys. "
                    "Batches of different collators were probably mixed. Fix: drop or add these columns first."
                )
        return cls({key: _join(key, [batch[key] for batch in batches], pad_values or {}) for key in batches[0]})

    def shard(self, count: int, lengths: Sequence[int] | Tensor | None = None) -> list[BatchedDataDict]:
        """Split into ``count`` batches of nearly equal tokens: by ``lengths``, ``input_lengths`` or rows."""
        known = self.data.get("input_lengths") if lengths is None else lengths
        if known is None:
            known = [1] * self.size
        weights = [int(n) for n in (known.tolist() if isinstance(known, Tensor) else known)]
        if len(weights) != self.size:
            raise ValueError(
                f"{len(weights)} lengths were given for {self.size} rows; expected one per row. The lengths probably "
                "belong to another batch. Fix: pass this batch's lengths."
            )
        return [self.select(rows) for rows in balanced_shards(weights, count)]

    def micro_batches(self, size: int) -> Iterator[BatchedDataDict]:
        """Consecutive batches of at most ``size`` rows."""
        if size < 1:
            raise ValueError(
                f"the micro-batch size is {size}; expected at least 1. It was probably computed by an integer "
                "division that reached 0. Fix: pass a positive number of rows."
            )
        for start in range(0, self.size, size):
            yield self.slice(start, start + size)

    def _map_columns(self, change: Callable[[Any], Any]) -> BatchedDataDict:
        return BatchedDataDict({key: change(value) if is_column(value) else value for key, value in self.data.items()})


def is_column(value: object) -> bool:
    """True for what holds one entry per row: a tensor or array with a first dimension, or a list."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim > 0
    return isinstance(value, list)


def _refuse_packed(batch: Mapping[str, Any]) -> None:
    """Rows of a packed batch do not stand alone: their pairs name documents by number, counted over the whole batch."""
    named = [key for key in batch if key.endswith("pair_document")]
    if named:
        raise ValueError(
            f"rows of a packed batch were to be taken apart or joined ('{named[0]}' numbers its documents); expected a "
            "batch of rows that stand alone. It was probably packed before it was split. "
            "Fix: split the rows first, and collate each part with packing=True."
        )


def _is_jagged(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_nested


def _nest(rows: list[Tensor], like: Any) -> Tensor:
    """Rows as a jagged tensor, with their graph; no rows give an empty one of ``like``'s dtype and tail."""
    lengths = [row.shape[0] for row in rows]
    values = torch.cat(rows) if rows else like.values()[:0]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64).to(values.device)
    nested: Tensor = torch.nested.nested_tensor_from_jagged(
        values, offsets=offsets, min_seqlen=min(lengths, default=0), max_seqlen=max(lengths, default=0)
    )
    return nested


def _take(column: Any, rows: list[int]) -> Any:
    if isinstance(column, list):
        return [column[row] for row in rows]
    if isinstance(column, np.ndarray):
        return column[rows]
    if _is_jagged(column):
        every = column.unbind()
        return _nest([every[row] for row in rows], column)
    return column[torch.as_tensor(rows, dtype=torch.long, device=column.device)]


def _join(key: str, columns: list[Any], pad_values: Mapping[str, int | float]) -> Any:
    first = columns[0]
    if not is_column(first):
        if any(other != first for other in columns[1:]):
            raise ValueError(
                f"'{key}' says {first!r} in one batch and something else in another; expected one value for all. "
                "Batches of different collators were probably mixed. Fix: concatenate batches of one kind."
            )
        return first
    if isinstance(first, list):
        return [entry for column in columns for entry in column]
    if isinstance(first, np.ndarray):
        return np.concatenate(columns)
    if any(_is_jagged(column) for column in columns):
        rows = [row for column in columns for row in column.unbind()]
        return _nest(rows, first)
    if len({column.shape[1:] for column in columns}) == 1:
        return torch.cat(columns)
    if key not in pad_values or len({(column.ndim, *column.shape[2:]) for column in columns}) != 1:
        raise ValueError(
            f"'{key}' has shapes {[tuple(c.shape) for c in columns]}; expected equal shapes after the first dimension. "
            f"The batches were padded to different lengths. Fix: pass pad_values={{'{key}': …}} to pad on the right."
        )
    width = max(column.shape[1] for column in columns)
    joined = first.new_full((sum(len(c) for c in columns), width, *first.shape[2:]), pad_values[key])
    row = 0
    for column in columns:
        joined[row : row + len(column), : column.shape[1]] = column
        row += len(column)
    return joined


def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``model.forward`` that a batch holds: bookkeeping left out, masks in the model's form.

    ``token_mask`` becomes ``attention_mask``; a packed batch gets a block-causal mask, bool [B, 1, S, S]. Labels are
    not among the result: what is trained on is the loss's business.
    """
    inputs = {
        key: value
        for key, value in batch.items()
        if key not in BOOKKEEPING_KEYS
        and not key.startswith(BOOKKEEPING_PREFIXES)
        and key not in ("labels", "shift_labels")
    }
    segment_ids = batch.get("segment_ids")
    if segment_ids is not None and inputs.get("attention_mask", segment_ids).ndim == 2:
        inputs["attention_mask"] = block_causal_mask(segment_ids)
    elif "attention_mask" not in inputs and "token_mask" in batch:
        inputs["attention_mask"] = batch["token_mask"]
    return inputs


class TrainerCollator:
    """A collator whose batches a plain ``transformers.Trainer`` accepts. See :func:`for_trainer`."""

    def __init__(self, collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate ``rows`` into model arguments plus ``labels`` (and ``shift_labels`` where labels are shifted)."""
        batch = self.collator(rows)
        inputs = model_inputs(batch)
        inputs["labels"] = self._labels(batch)
        if batch.get("labels_shifted", False):
            inputs["shift_labels"] = inputs["labels"]
        return inputs

    def _labels(self, batch: Mapping[str, Any]) -> Tensor:
        if "labels" in batch:
            labels: Tensor = batch["labels"]
            return labels
        ids: Tensor = batch["input_ids"]
        if "target_ids" in batch:
            mask_token_id = getattr(self.collator, "mask_token_id", None)
            if mask_token_id is None:
                raise ValueError(
                    "the batch has target_ids and its collator no mask_token_id; expected both, since only masked "
                    "positions are trained on. The collator is probably wrapped in a lambda. "
                    "Fix: pass the collator object itself to for_trainer."
                )
            return batch["target_ids"].masked_fill(ids != mask_token_id, IGNORE_INDEX)
        trained = batch["loss_mask"] if "loss_mask" in batch else batch["token_mask"]
        labels = ids.masked_fill(trained == 0, IGNORE_INDEX)
        if "segment_ids" in batch:
            segments = batch["segment_ids"]
            starts = torch.ones_like(segments, dtype=torch.bool)
            starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
            labels = labels.masked_fill(starts, IGNORE_INDEX)
        if "sample_mask" in batch:
            labels = labels.masked_fill(_of_left_out_documents(batch), IGNORE_INDEX)
        return labels


def _of_left_out_documents(batch: Mapping[str, Any]) -> Tensor:
    """Where a position's document has a ``sample_mask`` of 0: one entry per row, or per segment of packed rows."""
    left_out = batch["sample_mask"] <= 0
    if "segment_ids" not in batch:
        return left_out[:, None]
    segments = batch["segment_ids"].long()
    per_row = segments.amax(1)
    document = (per_row.cumsum(0) - per_row)[:, None] + segments - 1
    return (segments > 0) & left_out[document.clamp(min=0)]


def for_trainer(collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]]) -> TrainerCollator:
    """Make any Spanwise collator fit a plain ``transformers.Trainer`` (use ``remove_unused_columns=False``).

    Our bookkeeping keys are taken out. Where labels leave the collator already shifted they are passed as ``labels``
    and ``shift_labels`` alike, so that the model's own loss does not shift them a second time. The result is picklable
    when the collator is.
    """
    return TrainerCollator(collator)
