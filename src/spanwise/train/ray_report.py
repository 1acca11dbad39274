"""What a worker tells Ray Train while it trains; imported in workers only, since it imports transformers and ray."""

from __future__ import annotations

from typing import Any

import ray.train
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class RayReport(TrainerCallback):
    """Gives Ray the newest numbers whenever a checkpoint is complete, and at the end.

    All ranks report, since each report waits for all of them and then for the next look of Ray's controller (2 s): at
    every logged step that would be most of a small run's time.
    """

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint lies in the run's folder."""
        _report(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The last step is done."""
        _report(state)


def _report(state: TrainerState) -> None:
    numbers: dict[str, Any] = {}
    for logged in state.log_history:
        numbers |= {name: value for name, value in logged.items() if isinstance(value, int | float)}
    ray.train.report(numbers | {"step": state.global_step})
