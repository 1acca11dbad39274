"""What a worker tells Ray Train while it trains; imported in workers only, since it imports transformers and ray."""

from __future__ import annotations

from typing import Any

import ray.train
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class RayReport(TrainerCallback):
    """Gives Ray every number that the trainer logs; all ranks do, since ``ray.train.report`` waits for all."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report numbers, with the step they belong to."""
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        ray.train.report(numbers | {"step": state.global_step})
