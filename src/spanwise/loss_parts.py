"""One loss term as a sum and a count, and how terms are reduced.

A mean over a micro-batch cannot be added to the mean of another micro-batch or rank; a sum and a count can. Every loss
therefore returns :class:`LossParts`. The count comes from integer bookkeeping (chunks, tokens, masked positions) and is
known before any floating-point work, so a trainer can reduce it over micro-batches and ranks first and hand each loss
its ``scale = weight / global_count``. O(1) memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Ratio:
    """A metric that stays right under any split: ``sum`` and ``count`` add up, the value is their quotient."""

    sum: float | Float[Tensor, ""]
    count: float | Float[Tensor, ""]

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.sum + other.sum, self.count + other.count)

    @property
    def value(self) -> float:
        """The quotient, 0.0 where nothing was counted."""
        count = float(self.count)
        return float(self.sum) / count if count else 0.0


@dataclass(frozen=True)
class LossParts:
    """What a loss returns.

    Attributes:
        total: scalar with a graph. The sum of the term over everything counted, times ``scale`` when one was given.
            With nothing to count it is 0 and still has a graph.
        count: float32 scalar, no graph. How much was counted, in units of the term (chunks, tokens, positions), each
            weighted by its row's ``sample_mask``.
        metrics: named ratios that may be added over micro-batches and ranks.
        scale: what ``total`` was already multiplied by; None means the plain sum.

    >>> parts = LossParts(torch.tensor(6.0), torch.tensor(3.0))
    >>> float(parts.mean())
    2.0
    """

    total: Float[Tensor, ""]
    count: Float[Tensor, ""]
    metrics: Mapping[str, Ratio] = field(default_factory=dict)
    scale: float | None = None

    def mean(self) -> Float[Tensor, ""]:
        """The mean over this batch alone; 0 with a graph when nothing was counted. Refused once a scale is applied."""
        if self.scale is not None:
            raise ValueError(
                f"LossParts.mean() was asked of a total that is already multiplied by scale={self.scale:g}; it expects "
                "a plain sum. The trainer's weight / global count was probably passed to the loss. "
                "Fix: use parts.total as it is, or call the loss with scale=None."
            )
        return self.total / self.count.clamp(min=1.0)

    def scaled(self, scale: float) -> LossParts:
        """The same term multiplied by ``scale``. Refused where a scale was applied before."""
        if self.scale is not None:
            raise ValueError(
                f"scaled({scale:g}) was asked of a total that is already multiplied by scale={self.scale:g}; "
                "it expects a plain sum. Two places apply the weight. Fix: apply it in one of them."
            )
        return replace(self, total=self.total * scale, scale=scale)


def merge_metrics(many: Iterable[Mapping[str, Ratio]]) -> dict[str, Ratio]:
    """Add metrics by name, so that a mean over batches is weighted by what each batch counted."""
    merged: dict[str, Ratio] = {}
    for metrics in many:
        for name, ratio in metrics.items():
            merged[name] = merged[name] + ratio if name in merged else ratio
    return merged


def nothing_counted(*tensors: Tensor) -> Float[Tensor, ""]:
    """A zero that keeps the graph of ``tensors`` alive, so that backward reaches them with zeros instead of None.

    Slices to no elements before summing: the value is 0 whatever the tensors hold, infinities included.
    """
    zero = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    for tensor in tensors:
        zero = zero + tensor.flatten()[:0].float().sum()
    return zero
