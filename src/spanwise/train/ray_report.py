"""What a worker tells Ray Train while it trains; imported in workers only, since it imports transformers and ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray.train
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class RayReport(TrainerCallback):
    """Gives Ray each checkpoint of the run's folder, as it lies there, with the newest numbers.

    All ranks report, since each report waits for all of them and then for the next look of Ray's controller (2 s): at
    every logged step that would be most of a small run's time. Ray keeps numbers beside a checkpoint only.
    """

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint lies in the run's folder."""
        numbers: dict[str, Any] = {}
        for logged in state.log_history:
            numbers |= {name: value for name, value in logged.items() if isinstance(value, int | float)}
        saved = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
        ray.train.report(
            numbers | {"step": state.global_step},
            checkpoint=ray.train.Checkpoint(saved) if state.is_world_process_zero else None,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        )
