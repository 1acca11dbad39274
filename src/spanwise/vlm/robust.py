"""A collator that takes other rows when a batch cannot be made, and says how often and why.

Bad files and broken rows are facts of large data sets. What no other rows would mend (a missing package, no memory, a
misspelt name) is raised at once, and so are labels that cannot be proven, unless asked otherwise. O(1) memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spanwise.spans.chat_template import UnprovenSpanError
from spanwise.vlm.checks import NOT_THE_DATA

logger = logging.getLogger(__name__)


class RobustCollate:
    """See :func:`make_robust_collate`. ``failures`` counts by class of error since it was made.

    Picklable when the data set and the collate function are; each DataLoader worker counts for itself.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        max_retries: int = 10,
        *,
        retry_unproven: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        if max_retries < 1:
            raise ValueError(
                f"max_retries={max_retries} was given; expected at least 1, the batch itself. It counts batches, not "
                "further ones. Fix: pass 1 to try none but the first."
            )
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.max_retries = max_retries
        self.retry_unproven = retry_unproven
        self.generator = generator
        self.failures: Counter[str] = Counter()

    def __call__(self, examples: Sequence[Any]) -> Any:
        """Collate ``examples``, or as many others drawn from the data set."""
        error: Exception | None = None
        for attempt in range(self.max_retries):
            try:
                return self.collate_fn(examples)
            except NOT_THE_DATA:
                raise
            except UnprovenSpanError as unproven:
                if not self.retry_unproven:
                    raise
                error = unproven
            except Exception as failed:  # whatever a row's file or content may raise
                error = failed
            self.failures[type(error).__name__] += 1
            logger.warning(
                "Collate failed (attempt %d/%d): %s: %s. Re-sampling batch. So far: %s",
                attempt + 1, self.max_retries, type(error).__name__, error, dict(self.failures),
            )  # fmt: skip
            examples = self._others(len(examples), error)
        raise RuntimeError(
            f"Collate failed after {self.max_retries} retries ({dict(self.failures)}). Last error: {error}"
        ) from error

    def _others(self, count: int, error: Exception) -> list[Any]:
        size = len(self.dataset) if hasattr(self.dataset, "__len__") else 0
        if size == 0:
            raise ValueError(
                f"a batch failed and the data set, a {type(self.dataset).__name__}, has no rows to draw others from; "
                "expected len and integer indices. It is empty, or a stream. Fix: pass a data set with rows, or leave "
                "make_robust_collate out."
            ) from error
        return [self.dataset[int(row)] for row in torch.randint(size, (count,), generator=self.generator)]


def make_robust_collate(
    dataset: Any,
    collate_fn: Callable[[Any], Any],
    max_retries: int = 10,
    *,
    retry_unproven: bool = False,
    generator: torch.Generator | None = None,
) -> RobustCollate:
    """Wrap ``collate_fn`` so that a batch that cannot be made is replaced by other rows of ``dataset``.

    Args:
        dataset: has ``len`` and integer indices.
        collate_fn: what to wrap.
        max_retries: how many batches are tried before a RuntimeError, whose cause is the last error.
        retry_unproven: also replace rows whose labels cannot be proven; otherwise these errors pass.
        generator: draws the other rows; None uses torch's default generator.

    >>> def halves(rows): return [row // 2 for row in rows] if all(rows) else 1 // 0
    >>> robust = make_robust_collate([4, 4, 4], halves)
    >>> robust([0, 8]), dict(robust.failures)
    ([2, 2], {'ZeroDivisionError': 1})
    """
    return RobustCollate(dataset, collate_fn, max_retries, retry_unproven=retry_unproven, generator=generator)
