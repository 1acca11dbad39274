"""Checkpoints that are whole: staged, given a manifest and renamed, with our own state, without pickled arguments.

The stock trainer writes into the final folder file by file and continues without an optimizer's state in silence.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import rotate_checkpoints

from spanwise.train.hub import UploadingTrainer
from spanwise.train.run_folder import STAGING, publish_checkpoint
from spanwise.train.task import Task

STATE_NAME = "spanwise_state.json"


class CheckpointingTrainer(UploadingTrainer, ABC):
    """A trainer whose checkpoints are complete or absent.

    Attributes:
        task: what is trained.
    """

    task: Task

    @abstractmethod
    def own_state(self) -> dict[str, Any]:
        """What a continued run needs beside model, optimizer and random numbers, as plain values; all ranks ask."""

    @abstractmethod
    def take_up(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`own_state` said."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        name = f"checkpoint-{self.state.global_step}"
        folder = self.folder
        staged = folder / STAGING / name
        self.store_flos()
        self.save_model(str(staged), _internal_call=True)
        if self.state.best_global_step:
            best = folder / f"checkpoint-{self.state.best_global_step}"
            if best.name == name or best.is_dir():
                self.state.best_model_checkpoint = str(best)
        self._save_optimizer_and_scheduler(str(staged))
        self._save_scaler(str(staged))
        self._save_rng_state(str(staged))
        own_state = self.own_state()
        if self.args.should_save:
            self._export_callbacks()
            self.state.save_to_json(str(staged / "trainer_state.json"))
            (staged / STATE_NAME).write_text(json.dumps({"version": 1} | own_state))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            publish_checkpoint(staged, folder / name)
            rotate_checkpoints(
                output_dir=str(folder),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
            )
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder / name))

    def _export_callbacks(self) -> None:
        kept: Any = self.state.stateful_callbacks  # by name once the state is set up, whatever its annotation says
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, exported = type(callback).__name__, callback.state()
                if isinstance(kept.get(name), list):
                    kept[name].append(exported)
                else:
                    kept[name] = exported

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The model as transformers loads it: a sharded one is gathered, but for checkpoints that hold its shards."""
        if self.is_fsdp_enabled and not _internal_call:
            state = gathered_state(self.task.model, keep=self.args.should_save)
            if self.args.should_save:
                self._save(output_dir, state)
        else:
            super().save_model(output_dir, _internal_call=True)  # else it would push a folder that is not complete

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        # The stock trainer pickles its arguments; the resolved recipe says the same and cannot run code.
        Path(output_dir or self.folder, "training_args.bin").unlink(missing_ok=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._weights_at = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._weights_at = str(self.state.best_model_checkpoint)
        super()._load_best_model()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Files name some weights as their model's release does (Qwen's "visual."), not as its modules are called now.

        The stock trainer compares names, warns, and goes on with the weights that it has; ``from_pretrained`` knows
        both names.
        """
        model: Any = self.model
        if load_result.unexpected_keys and hasattr(model, "from_pretrained"):
            released = type(model).from_pretrained(self._weights_at, dtype=model.dtype)
            load_result = model.load_state_dict(released.state_dict(), strict=True)
        # Tied weights are written once: the others of a tie are there as soon as that one is.
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        if load_result.unexpected_keys or set(load_result.missing_keys) - tied:
            super()._issue_warnings_after_load(load_result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.take_up(json.loads(Path(checkpoint, STATE_NAME).read_text()))


def gathered_state(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Every tensor of a sharded model, whole and on the CPU; {} on ranks that keep none. All must take part."""
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            state[name] = whole.cpu()
    return state
