"""What was not trained on, counted where it is noticed and carried to the report.

An index knows before the first step what it leaves out. A stream finds out as it is read, perhaps in a worker process
whose counters nobody else sees, so its rows carry the counts: the collator adds them up and the batch brings them to
the trainer, which sums them over ranks. O(reasons) per row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# Where a row of a stream carries its counts; no column of a corpus is called that.
CARRIED = "spanwise.left_out"
ROWS_WITHOUT_TEXT = "rows without text"
BLANK_WINDOWS = "windows of white space"


@dataclass
class LeftOut:
    """What was not trained on, by reason."""

    reasons: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.reasons.items())) or "nothing"


def carried(rows: Iterable[dict[str, Any] | str]) -> Iterator[dict[str, Any]]:
    """The rows among rows and reasons; each carries the reasons beside it, the last one also those behind it.

    >>> rows = ["empty", {"text": "a"}, {"text": "b"}, {"text": "c"}, "empty"]
    >>> [row.get(CARRIED) for row in carried(rows)]
    [{'empty': 1}, None, {'empty': 1}]
    """
    waiting: dict[str, Any] | None = None
    reasons: Counter[str] = Counter()
    for row in rows:
        if isinstance(row, str):
            reasons[row] += 1
            continue
        if waiting is not None:
            yield waiting
        waiting, reasons = _with(row, reasons), Counter()
    if waiting is not None:
        yield _with(waiting, reasons + Counter(waiting.get(CARRIED)))


def _with(row: dict[str, Any], reasons: Counter[str]) -> dict[str, Any]:
    return row | {CARRIED: dict(reasons)} if reasons else row


class CarryingCollator:
    """A collator whose batches say in ``left_out`` what their rows carried, beside what it left out itself."""

    def __init__(self, collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        """Collate rows as the collator inside does."""
        reasons = sum((Counter(row.get(CARRIED)) for row in rows), Counter[str]())
        batch: Any = self.collator([{name: row[name] for name in row if name != CARRIED} for row in rows])
        if reasons:
            batch["left_out"] = dict(reasons + Counter(batch.get("left_out")))
        return batch
