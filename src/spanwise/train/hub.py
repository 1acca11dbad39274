"""What of a run goes to the hub, and when: the folder as it lies at the end, a checkpoint's model while it goes on.

The stock pushes save the model anew, pickled arguments beside it, and send a checkpoint by copying it into the run's
folder first. Ours send what is there, as second names (hard links) where a file may be gone before it is sent.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import HubStrategy
from transformers.utils.hub import PushInProgress, hf_api

from spanwise.train.run_folder import NOT_A_MODEL, NOT_SHARED, STAGING, linked_copy

UPLOADS = "uploads"
# Every file that from_pretrained would take for weights.
WEIGHTS = ("adapter_*", "model*.safetensors", "model*.safetensors.index.json")


class UploadingTrainer(Trainer):
    """A trainer whose pushes send what lies in the run's folder."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(str(self.args.output_dir))

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Upload the run's folder as it lies: model, tokenizer, card, report and log; the stock push saves anew.

        Weights that a push during training left are taken away: adapters would be loaded on top of merged weights.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        shutil.rmtree(self.folder / STAGING / UPLOADS, ignore_errors=True)
        upload: Any = hf_api().upload_folder
        return upload(
            repo_id=self.hub_model_id,
            folder_path=str(self.folder),
            commit_message=commit_message,
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
            run_as_future=not blocking,
            ignore_patterns=list(NOT_SHARED),
            delete_patterns=list(WEIGHTS),
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload a checkpoint's model; the stock push copies it into the run's folder first, pickled arguments too."""
        strategy = self.args.hub_strategy
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        before: Any = [] if self.push_in_progress is None else self.push_in_progress.jobs
        pending = [job for job in before if not job.done()]
        if pending and not self.args.hub_always_push:
            return
        if not pending:
            shutil.rmtree(self.folder / STAGING / UPLOADS, ignore_errors=True)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        name = Path(checkpoint_folder).name
        # The checkpoint itself may be rotated away before the upload is through.
        linked = linked_copy(Path(checkpoint_folder), self.folder / STAGING / UPLOADS / name)
        common: dict[str, Any] = {
            "repo_id": self.hub_model_id,
            "folder_path": str(linked),
            "commit_message": f"Training in progress, step {self.state.global_step}",
            "token": self.args.hub_token,
            "revision": self.args.hub_revision,
            "run_as_future": True,
        }
        jobs = [hf_api().upload_folder(**common, ignore_patterns=[*NOT_SHARED, *NOT_A_MODEL])]
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            place = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else name
            jobs.append(hf_api().upload_folder(**common, path_in_repo=place))
        uploads: Any = [*pending, *jobs]  # annotated as one future, used as a list of them
        self.push_in_progress = PushInProgress(uploads)
