"""Rows that hold nothing but MASK, to start unconditional generation from.

They stream, and with DataLoader workers each worker yields its share, so that the rows are as many as asked. O(length)
per row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from spanwise.batch import BatchedDataDict
from spanwise.mlm.layout import Rows, field
from spanwise.mlm.special_tokens import mask_token_id

PAPL_LENGTHS = (100, 200, 300, 400, 500, 600, 700, 800)
EmptyRow = dict[str, Any]


class _MaskRows(IterableDataset[EmptyRow]):
    """Rows of the lengths that a subclass lists."""

    def __init__(self, tokenizer: Any) -> None:
        self.mask = mask_token_id(tokenizer)

    def lengths(self) -> Sequence[int]:
        """The length of every row, in order."""
        return []

    def __iter__(self) -> Iterator[EmptyRow]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        lengths = self.lengths()
        for index in range(first, len(lengths), step):
            yield {"input_ids": [self.mask] * lengths[index], "idx": index}


class MLMEmptyDataset(_MaskRows):
    """``num_examples`` rows of ``max_length`` MASK tokens."""

    def __init__(self, tokenizer: Any, num_examples: int, max_length: int) -> None:
        super().__init__(tokenizer)
        self.num_examples, self.max_length = num_examples, max_length

    def lengths(self) -> Sequence[int]:
        """All equal."""
        return [self.max_length] * self.num_examples


class MLMEmptyDatasetFromLengthRef(_MaskRows):
    """Rows whose lengths are drawn from a text file with one whole number per line, none below ``min_length``.

    The same ``seed`` draws the same lengths in every pass.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examples: int,
        length_ref_file: str | os.PathLike[str],
        min_length: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(tokenizer)
        path = Path(length_ref_file)
        if path.suffix != ".txt":
            raise ValueError(
                f"the length file is '{path.name}'; expected a .txt with one whole number per line. Pickled "
                "lengths are not read, since unpickling runs code. Fix: write the numbers into a text file."
            )
        words = path.read_text().split()
        if not words or not all(word.isdigit() for word in words):
            raise ValueError(
                f"'{path.name}' holds {len(words)} words, not all whole numbers or none at all; expected one length "
                "per line. It is probably another file. Fix: write one whole number per line."
            )
        self.reference = [max(int(word), min_length) for word in words]
        self.num_examples, self.seed = num_examples, seed

    def lengths(self) -> Sequence[int]:
        """Drawn with replacement."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(len(self.reference), (self.num_examples,), generator=generator)
        return [self.reference[index] for index in drawn.tolist()]


class PaplUnconditionalMLMDataset(_MaskRows):
    """``examples_per_node`` rows of every length in ``lengths``, in order (100, 200, … 800 by default)."""

    def __init__(self, tokenizer: Any, examples_per_node: int, lengths: Sequence[int] | None = None) -> None:
        super().__init__(tokenizer)
        self.examples_per_node = examples_per_node
        self.row_lengths = PAPL_LENGTHS if lengths is None else tuple(lengths)

    def lengths(self) -> Sequence[int]:
        """Each length as often as asked."""
        return [length for length in self.row_lengths for _ in range(self.examples_per_node)]


class PaplUnconditionalCollator:
    """Stack rows of one length; nothing is added or hidden."""

    def __call__(self, rows: Rows) -> BatchedDataDict:
        """Collate rows with ``input_ids``."""
        sequences = [field(row, "input_ids") for row in rows]
        lengths = {len(tokens) for tokens in sequences}
        if len(lengths) != 1:
            raise ValueError(
                f"rows of lengths {sorted(lengths)} came in one batch; expected one length. The batch size probably "
                "does not divide the rows per length. Fix: make the batch size a divisor of examples_per_node."
            )
        ids = torch.tensor(sequences, dtype=torch.long)
        return BatchedDataDict(
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "target_ids": ids.clone(),
                "labels_shifted": False,
            }
        )
