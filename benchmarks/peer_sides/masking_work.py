"""What is asked of a collator of masked models, the same of every library; runs in a peer's environment too."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peer_sides.serve import measured
from tests.tiny_tokenizers import byte_level_bpe

Rows = list[dict[str, Any]]


class MaskingSide:
    """One library's collator. Subclasses say how it is made and how a row is given to it."""

    def __init__(self) -> None:
        self.tokenizer: Any = byte_level_bpe()

    def collator(self) -> Any:
        """One that has drawn nothing yet."""
        raise NotImplementedError

    def features(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row as the collator wants it."""
        raise NotImplementedError

    def time(self, batch_size: int, repeats: int) -> list[dict[str, float]]:
        """A pass over 512 rows in batches, the first pass left out."""
        collate, rows = self.collator(), [self.features(row) for row in self.rows(512)]
        batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]

        def work() -> None:
            for batch in batches:
                collate(batch)

        work()
        return [measured(work)[0] for _ in range(repeats)]

    def share(self) -> dict[str, float]:
        """The share of real tokens hidden over 2,048 rows, and of their begin and end tokens."""
        rows, hidden, ends = self.rows(2_048), 0, 0
        found = self.places(range(len(rows)), 32, rows)
        for row, places in found.items():
            hidden += len(places)
            ends += sum(place in (0, len(rows[row]["ids"]) - 1) for place in places)
        real = sum(len(row["ids"]) for row in rows)
        return {"share": hidden / real, "ends": ends / (2 * len(rows))}

    def repeatable(self) -> dict[str, float]:
        """The share of 64 rows that hide the same places in a second run, in other batches, and in another order."""
        rows = self.rows(64)
        first = self.places(range(64), 8, rows)
        runs = {
            "run again": self.places(range(64), 8, rows),
            "in other batches": self.places(range(64), 4, rows),
            "in another order": self.places(range(63, -1, -1), 8, rows),
        }
        return {name: sum(found[row] == first[row] for row in first) / 64 for name, found in runs.items()}

    def places(self, order: range, batch_size: int, rows: Rows) -> dict[int, list[int]]:
        """Row → hidden places, by a fresh collator, batch by batch in an order."""
        collate, found = self.collator(), {}
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            ids = collate([self.features(rows[row]) for row in chosen])["input_ids"]
            hidden = ids == self.tokenizer.mask_token_id
            found |= {row: one.nonzero()[:, 0].tolist() for row, one in zip(chosen, hidden, strict=True)}
        return found

    def rows(self, count: int) -> Rows:
        """Ragged rows of 16 to 512 tokens, begin and end among them, each with its place in the epoch."""
        draw = torch.Generator().manual_seed(0)
        lengths = torch.randint(14, 511, (count,), generator=draw).tolist()
        rows = []
        for place, length in enumerate(lengths):
            ids = torch.randint(10, len(self.tokenizer), (length,), generator=draw).tolist()
            ids = [self.tokenizer.bos_token_id, *ids, self.tokenizer.eos_token_id]
            rows.append({"ids": ids, "epoch": 0, "position": place})
        return rows
