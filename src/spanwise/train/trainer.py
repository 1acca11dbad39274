"""The trainer: ``transformers.Trainer`` with counts that are global, checkpoints that are whole, and an honest log.

What it changes, and why:

- **Counts.** The stock trainer counts labels, drops the first column, and knows nothing of chunks. Ours asks the task
  for integer counts per term, sums them over the micro-batches of the step and over data-parallel ranks before the
  first forward, and gives each term ``scale = weight / count``. DDP averages gradients over ranks, so the loss is
  multiplied by their number.
- **Checkpoints** are complete or absent (``checkpointing``), and uploads send what lies in the folder (``hub``).
- **Left out.** What collators leave out is counted over all batches and ranks, and goes on counting when a run is
  continued.
- **Log.** Every step leaves one JSON line with each term's mean, count and the rest, reduced over ranks.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments

from spanwise.loss_parts import LossParts, Ratio, merge_metrics
from spanwise.train.checkpointing import CheckpointingTrainer
from spanwise.train.data_workers import outlive_sigterm
from spanwise.train.left_out import CarryingCollator
from spanwise.train.run_log import RunLog
from spanwise.train.sampler import PlacedRows, StepSampler, WholeSteps
from spanwise.train.sharding import shard_by_decoder_layers
from spanwise.train.task import Task

# Dynamic scaling multiplies kd with |ce| / |kd| of the step before; a teacher that says almost nothing (kd near 0) must
# not blow the loss up.
LARGEST_RATIO = 1e4


class SpanwiseTrainer(CheckpointingTrainer):
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
        if self.is_fsdp_enabled:
            shard_by_decoder_layers(self.accelerator.state.fsdp_plugin, task.model)

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
            # Else every start of a loader would draw from the numbers that dropout uses, and when it starts depends on
            # how rows are read.
            generator=torch.Generator().manual_seed(self.args.seed),
            worker_init_fn=outlive_sigterm,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            multiprocessing_context=self.args.dataloader_multiprocessing_context,
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
        means, tokens = self._reduced()
        scales = self.scales()
        step_seconds = max(time.perf_counter() - self._step_began, 1e-9)
        self.seconds += step_seconds
        line: dict[str, Any] = {
            "loss": sum(means[term] * self._counts[term] * scales[term] for term in self.terms),
            **means,
            **self.task.derived(means),
            **{f"{term}_count": self._counts[term] for term in self.terms},
            **self._reduced_metrics(),
            "tokens_per_second": tokens / step_seconds,
            "seconds": self.seconds,
            "learning_rate": learning_rate,
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "memory_mb": peak_memory_mb(),
        }
        if self.task.scaled_terms:
            line["dynamic_ratio"] = self.dynamic_ratio
            self.dynamic_ratio = self._next_ratio(means)
        self.run_log.write("step", self.state.global_step, line)

    def _reduced(self) -> tuple[dict[str, float], float]:
        """Each term's mean and the number of tokens read, over all ranks."""
        sums = [self._sums[term] for term in self.terms]
        # The wish to stop travels with the sums: a rank that saved alone would wait for the others for ever.
        beside = torch.tensor([float(self._tokens), float(self.asked_to_stop())], device=sums[0].device)
        *reduced, tokens, wishes = self._sum_over_ranks(torch.cat([torch.stack(sums), beside])).tolist()
        if wishes:
            self._save_and_stop()
        means = {term: value / max(self._counts[term], 1.0) for term, value in zip(self.terms, reduced, strict=True)}
        return means, tokens

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
            steps = self.run_log.last_steps(self._steps_since_log())
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

    def own_state(self) -> dict[str, Any]:
        """The dynamic ratio, the time spent and what was left out so far."""
        left_out = self._left_out_in_batches()
        return {"dynamic_ratio": self.dynamic_ratio, "seconds": self.seconds, "left_out": left_out}

    def take_up(self, state: dict[str, Any]) -> None:
        """Go on counting where the checkpoint was, and forget the log's lines behind it."""
        self.dynamic_ratio, self.seconds = float(state["dynamic_ratio"]), float(state["seconds"])
        # The sum of all ranks goes on with the first one.
        self._left_out = Counter(state["left_out"]) if self.args.process_index == 0 else Counter()
        self.run_log.rewind(self.state.global_step)
        self._last_finished = self.state.global_step


def _tokens_in(batch: Mapping[str, Any]) -> int:
    """The real tokens of a batch; rows that only complete it are not counted where the batch says so row by row."""
    for name in ("token_mask", "attention_mask"):
        mask = batch.get(name)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            counted = batch.get("sample_mask")
            if isinstance(counted, Tensor) and counted.shape == mask.shape[:1] and "segment_ids" not in batch:
                mask = mask[counted > 0]
            return int(mask.count_nonzero())
    return int(batch["input_ids"].numel()) if "input_ids" in batch else 0


def peak_memory_mb() -> float:
    """The most memory this process has held: of its GPU where it has one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
