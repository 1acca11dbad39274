"""The trainer: ``transformers.Trainer`` with counts that are global, checkpoints that are whole, and an honest log.

What it changes, and why:

- **Counts.** The stock trainer counts labels, drops the first column, and knows nothing of chunks. Ours asks the task
  for integer counts per term, sums them over the micro-batches of the step and over data-parallel ranks before the
  first forward, and gives each term ``scale = weight / count``. DDP averages gradients over ranks, so the loss is
  multiplied by their number.
- **Checkpoints** are staged, given a manifest and renamed (``run_folder``); the optimizer's state and our own are in
  them, no pickled arguments are.
- **Left out.** What collators leave out is counted over all batches and ranks, and goes on counting when a run is
  continued.
- **Log.** Every step leaves one JSON line with each term's mean, count and the rest, reduced over ranks.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy, rotate_checkpoints
from transformers.utils.hub import PushInProgress, hf_api

from spanwise.loss_parts import LossParts, Ratio, merge_metrics
from spanwise.train.left_out import CarryingCollator
from spanwise.train.run_folder import NOT_A_MODEL, NOT_SHARED, STAGING, linked_copy, publish_checkpoint
from spanwise.train.run_log import RunLog
from spanwise.train.sampler import PlacedRows, StepSampler, WholeSteps
from spanwise.train.task import Task

STATE_NAME = "spanwise_state.json"
UPLOADS = "uploads"
# Every file that from_pretrained would take for weights.
WEIGHTS = ("adapter_*", "model*.safetensors", "model*.safetensors.index.json")
# Dynamic scaling multiplies kd with |ce| / |kd| of the step before; a teacher that says almost nothing (kd near 0) must
# not blow the loss up.
LARGEST_RATIO = 1e4


class SpanwiseTrainer(Trainer):
    """Trains a :class:`~spanwise.train.task.Task`.

    Args:
        task: what is trained, on what, and how it is measured.
        args: transformers' arguments; ``output_dir`` is the run's folder.
        log: the run's log.
        callbacks: transformers' callbacks, as usual.
        asked_to_stop: looked at after every step; once it is true on any rank, all save and stop.
    """

    def __init__(
        self,
        task: Task,
        args: TrainingArguments,
        log: RunLog,
        callbacks: list[TrainerCallback] | None = None,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        nothing_to_iterate: Any = []  # evaluate() asks the task; the stock check only wants something to be there
        collator: Any = task.collator
        if isinstance(task.train_rows, torch.utils.data.IterableDataset):
            collator = CarryingCollator(collator)
        super().__init__(
            model=task.model,
            args=args,
            data_collator=collator,
            train_dataset=task.train_rows,
            eval_dataset=nothing_to_iterate if task.has_evaluation else None,
            processing_class=task.processing_class,
            callbacks=callbacks,
        )
        self.task = task
        self.folder = Path(str(args.output_dir))
        self.run_log = log
        self.asked_to_stop = asked_to_stop
        self.stopped = False  # because it was asked to, on some rank
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.terms = [name for name, weight in task.weights.items() if weight]
        self.dynamic_ratio = 1.0
        self.seconds = 0.0  # spent in steps, evaluations and checkpoints left out
        self._sums: dict[str, Tensor] = {}
        self._metrics: dict[str, Ratio] = {}
        self._counts: dict[str, float] = {}
        self._tokens = 0
        self._left_out: Counter[str] = Counter()  # of this rank
        self._step_began = time.perf_counter()
        self._last_finished = -1
        self._sampler: StepSampler | None = None

    # -- rows -------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Batches of the task's rows; map-style rows go through our sampler, streams in their own order."""
        rows: Any = self.task.train_rows
        ranks = max(1, self.args.world_size // (self.get_tp_size() * self.get_cp_size() * self.get_sp_size()))
        step_size = self._train_batch_size * ranks * self.args.gradient_accumulation_steps
        if isinstance(rows, torch.utils.data.IterableDataset):
            return self._loader(WholeSteps(rows, step_size), batch_size=self._train_batch_size)
        strategy = str(self.args.train_sampling_strategy)
        self._sampler = StepSampler(
            len(rows),
            batch_size=self._train_batch_size,
            ranks=ranks,
            seed=self.args.seed,
            shuffle=strategy != "sequential",
            lengths=rows.lengths() if strategy == "group_by_length" else None,
            step_size=step_size,
        )
        return self._loader(PlacedRows(rows), batch_sampler=self._sampler)

    def _loader(self, rows: Any, **batches: Any) -> Any:
        loader = torch.utils.data.DataLoader(
            rows,
            **batches,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )
        return self.accelerator.prepare(loader)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self._sampler is not None:
            self._sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The stock optimizer, with a learning rate of its own for embeddings and head where the task names one."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        rate = self.task.embedding_learning_rate
        if rate is not None:
            inner: Any = self.model
            tables = {id(p) for p in inner.get_input_embeddings().parameters()}
            tables |= {id(p) for p in inner.get_output_embeddings().parameters()}
            for group in list(optimizer.param_groups):
                own = [p for p in group["params"] if id(p) in tables]
                if own:
                    group["params"] = [p for p in group["params"] if id(p) not in tables]
                    optimizer.add_param_group({**group, "params": own, "lr": rate})
        return optimizer

    # -- counts before the first forward ---------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The micro-batches of one optimizer step, and the global count of every term."""
        self._step_began = time.perf_counter()
        self._sums, self._metrics, self._tokens = {}, {}, 0
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | int | None:
        counts = torch.zeros(len(self.terms), dtype=torch.float32, device=device)
        for batch in batch_samples:
            counted = self.task.counts(batch)
            counts += torch.stack([counted[term].to(device, torch.float32) for term in self.terms])
            self._tokens += _tokens_in(batch)
            self._left_out.update(batch.get("left_out") or {})
        counts = self._sum_over_ranks(counts)
        self._counts = dict(zip(self.terms, counts.tolist(), strict=True))
        return counts

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return values
        return self.accelerator.reduce(values, reduction="sum") / self._copies()

    def _copies(self) -> int:
        """Tensor-, context- and sequence-parallel ranks hold the same rows; they must not count them again."""
        copies: int = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()
        return copies

    def left_out(self) -> dict[str, int]:
        """What was not trained on, by reason, over all ranks; every rank must ask."""
        return dict(Counter(self.task.left_out()) + Counter(self._left_out_in_batches()))

    def _left_out_in_batches(self) -> dict[str, int]:
        everywhere: list[Any] = [self._left_out]
        if self.accelerator.num_processes > 1:
            everywhere = [None] * self.accelerator.num_processes
            torch.distributed.all_gather_object(everywhere, self._left_out)
        summed = sum(everywhere, Counter[str]())
        return {reason: count // self._copies() for reason, count in summed.items()}

    # -- the loss ----------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The sum of the task's terms, each already divided by its global count."""
        scales = self.scales()
        parts = self.task.losses(model, inputs, scales)
        self._remember(parts, scales)
        total = torch.stack([parts[term].total for term in self.terms]).sum()
        ranks = self.accelerator.num_processes // self.get_tp_size()
        return (total * ranks, {}) if return_outputs else total * ranks

    def scales(self) -> dict[str, float]:
        """What each term's sum is multiplied with in this optimizer step."""
        return {
            term: self.task.weights[term]
            * (self.dynamic_ratio if term in self.task.scaled_terms else 1.0)
            / max(self._counts[term], 1.0)
            for term in self.terms
        }

    def _remember(self, parts: Mapping[str, LossParts], scales: Mapping[str, float]) -> None:
        for term in self.terms:
            sum_ = parts[term].total.detach().float() / scales[term]
            self._sums[term] = self._sums[term] + sum_ if term in self._sums else sum_
        self._metrics = merge_metrics([self._metrics, *(parts[term].metrics for term in self.terms)])

    # -- after each optimizer step -----------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Tensor,
        grad_norm: Tensor | float | None,
        model: nn.Module,
        trial: Any,
        epoch: float | int,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        if self._sums and self.state.global_step > self._last_finished:
            self._finish_step(grad_norm, learning_rate)
        super()._maybe_log_save_evaluate(
            tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=learning_rate
        )

    def _finish_step(self, grad_norm: Tensor | float | None, learning_rate: float | None) -> None:
        """Reduce the step's sums, write its line, set the next step's dynamic ratio."""
        self._last_finished = self.state.global_step
        means = self._reduced_means()
        scales = self.scales()
        step_seconds = max(time.perf_counter() - self._step_began, 1e-9)
        self.seconds += step_seconds
        line: dict[str, Any] = {
            "loss": sum(means[term] * self._counts[term] * scales[term] for term in self.terms),
            **means,
            **self.task.derived(means),
            **{f"{term}_count": self._counts[term] for term in self.terms},
            **self._reduced_metrics(),
            "tokens_per_second": self._tokens / step_seconds,
            "seconds": self.seconds,
            "learning_rate": learning_rate,
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "memory_mb": peak_memory_mb(),
        }
        if self.task.scaled_terms:
            line["dynamic_ratio"] = self.dynamic_ratio
            self.dynamic_ratio = self._next_ratio(means)
        self.run_log.write("step", self.state.global_step, line)

    def _reduced_means(self) -> dict[str, float]:
        sums = [self._sums[term] for term in self.terms]
        # The wish to stop travels with the sums: a rank that saved alone would wait for the others for ever.
        asked = torch.tensor(float(self.asked_to_stop()), device=sums[0].device)
        *reduced, wishes = self._sum_over_ranks(torch.stack([*sums, asked])).tolist()
        if wishes:
            self._save_and_stop()
        return {term: value / max(self._counts[term], 1.0) for term, value in zip(self.terms, reduced, strict=True)}

    def _save_and_stop(self) -> None:
        self.stopped = True
        self.control.should_save = True
        self.control.should_evaluate = False
        self.control.should_training_stop = True

    def _reduced_metrics(self) -> dict[str, float]:
        names = sorted(self._metrics)
        if not names:
            return {}
        pairs = torch.tensor(
            [[float(self._metrics[name].sum), float(self._metrics[name].count)] for name in names],
            device=self.args.device,
        )
        return {
            name: Ratio(*pair).value for name, pair in zip(names, self._sum_over_ranks(pairs).tolist(), strict=True)
        }

    def _next_ratio(self, means: Mapping[str, float]) -> float:
        """|ce| / |kd| of this step's globally reduced means; 1 where either is 0."""
        distilled = abs(sum(self.task.weights[term] * means[term] for term in self.task.scaled_terms))
        plain = abs(sum(means[term] for term in self.terms if term not in self.task.scaled_terms))
        return min(plain / distilled, LARGEST_RATIO) if plain and distilled else 1.0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Give the trackers what the run's log says about the steps since they last heard."""
        if "loss" in logs:
            steps = [entry for entry in self.run_log.entries if entry["kind"] == "step"][-self._steps_since_log() :]
            names = {name for entry in steps for name, value in entry.items() if isinstance(value, float)}
            for name in sorted(names - {"step", "grad_norm", "learning_rate"}):
                values = [entry[name] for entry in steps if entry.get(name) is not None]
                logs[name] = sum(values) / len(values)
        super().log(logs, start_time)

    def _steps_since_log(self) -> int:
        last = next((int(entry["step"]) for entry in reversed(self.state.log_history) if "loss" in entry), 0)
        return max(self.state.global_step - last, 1)

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The task's held-out measures. Every rank measures everything, so a sharded model can take part."""
        model: Any = self.model_wrapped if self.is_in_train else self.model
        with self.autocast_smart_context_manager():
            measured = self.task.evaluate(model)
        self.run_log.write("evaluation", self.state.global_step, measured | {"seconds": self.seconds})
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # -- checkpoints -------------------------------------------------------------------------------------------------

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
        left_out = self._left_out_in_batches()
        if self.args.should_save:
            self._export_callbacks()
            self.state.save_to_json(str(staged / "trainer_state.json"))
            ours = {"version": 1, "dynamic_ratio": self.dynamic_ratio, "seconds": self.seconds, "left_out": left_out}
            (staged / STATE_NAME).write_text(json.dumps(ours))
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

    # -- the hub -----------------------------------------------------------------------------------------------------

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

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            state = json.loads(Path(checkpoint, STATE_NAME).read_text())
            self.dynamic_ratio, self.seconds = float(state["dynamic_ratio"]), float(state["seconds"])
            # The sum of all ranks goes on with the first one.
            self._left_out = Counter(state["left_out"]) if self.args.process_index == 0 else Counter()
            self.run_log.rewind(self.state.global_step)
            self._last_finished = self.state.global_step


def _tokens_in(batch: Mapping[str, Any]) -> int:
    for name in ("token_mask", "attention_mask"):
        mask = batch.get(name)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            return int((mask != 0).sum())
    return int(batch["input_ids"].numel()) if "input_ids" in batch else 0


def gathered_state(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Every tensor of a sharded model, whole and on the CPU; {} on ranks that keep none. All must take part."""
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            state[name] = whole.cpu()
    return state


def peak_memory_mb() -> float:
    """The most memory this process has held: of its GPU where it has one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
