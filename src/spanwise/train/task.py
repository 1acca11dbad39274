"""What the trainer asks of a task: a model, rows, a collator, counts, losses and a measure.

A batch is trained on through **terms** ("ce", "kd/0", …). Each has a weight and a count that comes from integers alone,
so the trainer reduces the counts over micro-batches and ranks before the first forward and tells the task what to
multiply each term's sum with. Rows carry ``epoch`` and ``position``; a row with ``loss_multiplier`` 0 only completes
the last batch of an epoch and must count nothing. To add a task, write a module with ``TaskRecipe`` and ``build`` and
name it in ``recipe.TASK_MODULES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from spanwise.loss_parts import LossParts


@dataclass(frozen=True)
class ReportSection:
    """A piece of HTML that a task adds to the run's report."""

    heading: str
    html: str


@runtime_checkable
class Task(Protocol):
    """One kind of training.

    Attributes:
        model: what is trained; a transformers model, perhaps with adapters.
        processing_class: tokenizer or processor, saved beside the model.
        collator: rows → batch.
        train_rows: map-style or iterable data set of rows.
        has_evaluation: whether ``evaluate`` has held-out data to measure on.
        best_metric: the metric by which checkpoints are chosen, and whether higher is better.
        weights: the weight of each term; terms of weight 0 are not computed.
        scaled_terms: the terms that dynamic scaling multiplies with |ce| / |kd| of the step before; empty = static.
        embedding_learning_rate: of embeddings and head, None for the same as everything else.
    """

    model: nn.Module
    processing_class: Any
    collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]]
    train_rows: torch.utils.data.Dataset[dict[str, Any]]
    has_evaluation: bool
    best_metric: tuple[str, bool]
    weights: dict[str, float]
    scaled_terms: frozenset[str]
    embedding_learning_rate: float | None

    def counts(self, batch: Mapping[str, Any]) -> dict[str, Float[Tensor, ""]]:
        """How much each term counts in this batch, from integers alone; the same terms for every batch."""
        ...

    def losses(self, model: nn.Module, batch: Mapping[str, Any], scales: Mapping[str, float]) -> dict[str, LossParts]:
        """Each term's parts, its sum multiplied by its scale. ``model`` may be wrapped (DDP, FSDP)."""
        ...

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """More values for the log, computed from the terms' means of a step."""
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Held-out measures, without prefix (``bits_per_byte``, …)."""
        ...

    def left_out(self) -> dict[str, int]:
        """What the task leaves out before collation, by reason; batches say the rest in ``left_out``."""
        ...

    def report_sections(self) -> list[ReportSection]:
        """What the run's report should show beside the curves."""
        ...

    def close(self) -> None:
        """Free teachers and files."""
        ...
