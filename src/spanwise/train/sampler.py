"""Which rows make a step: the same ones whatever the number of processes, micro-batches and workers.

Rows are shuffled by (seed, epoch) alone and cut into batches; consecutive batches go to the ranks in turn, so an
optimizer step always sees the next ``global batch`` rows of the epoch's order. The last batches are completed with
blanks (``loss_multiplier`` 0), which count nothing, so that all ranks do the same number of steps. Each row learns its
``epoch`` and ``position`` in the epoch's order, for noise that does not depend on neighbours. O(rows) int64 per epoch.

A stream is dealt out in the same way, in its own order; its rows learn their place as they come.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from spanwise.train.left_out import CARRIED

# Rows that are sorted by length together, in steps; larger groups better, shuffles less.
STEPS_PER_POOL = 50
BLANK = -1

Place = tuple[int, int, int]  # (row, epoch, position); position BLANK for a row that only completes a batch


class StepSampler(Sampler[list[Place]]):
    """Batches of places for one process; accelerate deals them out to the ranks in turn.

    Args:
        rows: size of the data set.
        batch_size: rows per rank and micro-batch.
        ranks: data-parallel processes; the number of batches is a multiple of it.
        seed: of the shuffle.
        shuffle: False keeps the rows' own order.
        lengths: group rows of like length into steps.
        step_size: rows per optimizer step, the unit of grouping.
    """

    drop_last = False

    def __init__(
        self,
        rows: int,
        *,
        batch_size: int,
        ranks: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        lengths: Sequence[int] | None = None,
        step_size: int | None = None,
    ) -> None:
        self.rows, self.batch_size, self.ranks, self.seed, self.shuffle = rows, batch_size, ranks, seed, shuffle
        self.lengths = None if lengths is None else torch.as_tensor(lengths)
        self.step_size = step_size or batch_size * ranks
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Order the rows for this epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        group = self.batch_size * self.ranks
        return -(-self.rows // group) * self.ranks

    def __iter__(self) -> Iterator[list[Place]]:
        order, epoch = self.order(), self.epoch
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            rows = order[start : start + self.batch_size].tolist()
            blanks = self.batch_size - len(rows)
            yield [(row, epoch, start + offset) for offset, row in enumerate(rows)] + [(0, epoch, BLANK)] * blanks

    def order(self) -> torch.Tensor:
        """The epoch's order of rows."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.rows, generator=generator) if self.shuffle else torch.arange(self.rows)
        if self.lengths is None:
            return order
        steps: list[torch.Tensor] = []
        for pool in order.split(self.step_size * STEPS_PER_POOL):
            by_length = pool[self.lengths[pool].argsort(descending=True, stable=True)]
            steps.extend(by_length.split(self.step_size))
        # An incomplete step stays last, so that it is the epoch's incomplete step.
        last = [steps.pop()] if steps and len(steps[-1]) < self.step_size else []
        shuffled = torch.randperm(len(steps), generator=generator).tolist()
        return torch.cat([*(steps[step] for step in shuffled), *last])


class PlacedRows(Dataset[dict[str, Any]]):
    """A data set that is asked for places and tells each row where it stands."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Place) -> dict[str, Any]:
        row, epoch, position = index
        content: dict[str, Any] = dict(self.rows[row]) | {"epoch": epoch, "position": position}
        return content if position != BLANK else content | {"loss_multiplier": 0.0}


class WholeSteps(IterableDataset[dict[str, Any]]):
    """A stream without an end, each of whose epochs ends with a whole optimizer step; rows know where they stand.

    The trainer cannot know how long a stream is. It would look for the place to continue a run within the first epoch;
    accelerate would complete an epoch's last batch with its first rows, which would be trained on twice; and what is
    left of an accumulated step would be added to the next epoch's first. With several data workers each reads and
    completes its own part, so the order is that of as many workers.

    Args:
        rows: the stream, with ``set_epoch``; rows may carry counts of what was left out.
        step_size: rows per optimizer step, over all ranks and micro-batches.
    """

    def __init__(self, rows: Any, step_size: int) -> None:
        self.rows, self.step_size = rows, step_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, apart = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for epoch in itertools.count():
            self.rows.set_epoch(epoch)
            count, row = 0, None
            for count, row in enumerate(self.rows, 1):
                yield row | {"epoch": epoch, "position": first + apart * (count - 1)}
            if row is None:  # a worker for which there is no file
                return
            content = {name: value for name, value in row.items() if name != CARRIED}
            blank = content | {"epoch": epoch, "position": BLANK, "loss_multiplier": 0.0}
            yield from (blank for _ in range(-count % self.step_size))
