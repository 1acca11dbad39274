"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere, always on standard error."""

from __future__ import annotations

import sys
import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class ProgressCallback(TrainerCallback):
    """Steps, loss and held-out measure of a run."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.bar: Any = None
        self.task_id: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin the bar."""
        self.began = time.monotonic()
        if state.is_world_process_zero and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.bar.start()
            self.task_id = self.bar.add_task("training", total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the bar."""
        if self.bar is not None:
            self.bar.update(self.task_id, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Say the loss or the measure."""
        if not state.is_world_process_zero or not logs:
            return
        shown = {
            name: value
            for name, value in logs.items()
            if name == "loss" or name in ("ce", "kd") or name.startswith(("kd/", "eval_"))
        }
        words = "  ".join(f"{name} {value:.4g}" for name, value in shown.items() if isinstance(value, (int, float)))
        if not words:
            return
        if self.bar is not None:
            self.bar.update(self.task_id, description=words)
        else:
            seconds = time.monotonic() - self.began
            sys.stderr.write(f"step {state.global_step}/{state.max_steps}  {words}  ({seconds:.0f} s)\n")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
