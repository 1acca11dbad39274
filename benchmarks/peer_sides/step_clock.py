"""A callback of transformers' Trainer that measures whole steps: data, forward, loss, backward, optimizer.

A step is what lies between the ends of two steps, so collating the batch belongs to it. The first step, which makes
the optimizer's state, is left out.
"""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from benchmarks.peer_sides.memory import peak, reset_peak


class StepClock(TrainerCallback):
    """Collects seconds of CPU and megabytes beyond the resident memory, per step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._began: tuple[float, float] | None = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Close one step and begin the next."""
        if self._began is not None:
            seconds, resident = self._began
            self.steps.append({"seconds": time.process_time() - seconds, "megabytes": peak() - resident})
        resident = reset_peak()
        self._began = (time.process_time(), resident)
