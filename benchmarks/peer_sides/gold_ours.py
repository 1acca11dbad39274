"""Distillation across tokenizers by our trainer, and our losses alone. Argument: the folder of the pair."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer_sides.serve import measured, serve
from benchmarks.peer_sides.step_clock import StepClock
from spanwise.teachers.scores import TeacherScores
from spanwise.train.arguments import training_arguments
from spanwise.train.distill import build
from spanwise.train.recipe import parse_recipe
from spanwise.train.run_log import RunLog
from spanwise.train.trainer import SpanwiseTrainer


class Ours:
    """A fresh trainer per question."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def trainer(self, loss: str, rows: int, steps: int) -> tuple[SpanwiseTrainer, StepClock]:
        """A trainer of a loss, cross entropy off."""
        clock = StepClock()
        run = Path(tempfile.mkdtemp(dir=self.folder))
        recipe: Any = parse_recipe(
            {
                "task": "distill",
                "output": str(run),
                "student": {"model": str(self.folder / "student")},
                "teachers": [{"model": str(self.folder / "teacher"), "loss": loss, "dtype": "float32"}],
                "data": {"train": str(self.folder / "texts.jsonl"), "context_length": 2_048},
                "loss": {"ce_weight": 0.0},
                "train": {
                    "per_device_train_batch_size": rows,
                    "max_steps": steps,
                    "learning_rate": 1e-4,
                    "save_strategy": "no",
                    "train_sampling_strategy": "sequential",
                },
            }
        )
        task = build(recipe, run)
        arguments = training_arguments(recipe, run, has_evaluation=False, best_metric=task.best_metric)
        return SpanwiseTrainer(task, arguments, RunLog(run), [clock]), clock

    def steps(self, loss: str, rows: int, steps: int) -> list[dict[str, float]]:
        """Whole training steps."""
        trainer, clock = self.trainer(loss, rows, steps)
        trainer.train()
        return clock.steps

    def loss(self, loss: str, rows: int, repeats: int) -> list[dict[str, float]]:
        """The loss of the first rows and its gradient, on logits drawn at random."""
        task: Any = self.trainer(loss, rows, 1)[0].task
        batch = task.collator([task.train_rows[row] for row in range(rows)])
        term = task.terms["kd/0"]
        draw = torch.Generator().manual_seed(0)
        sizes = len(task.processing_class), len(term.teacher_tokenizer)
        student = torch.randn(*batch["input_ids"].shape, sizes[0], generator=draw).mul_(3).requires_grad_()
        teacher = torch.randn(*batch["teacher_0_input_ids"].shape, sizes[1], generator=draw).mul_(3)

        def work() -> None:
            student.grad = None
            term.loss(student, TeacherScores(logits=teacher), batch, 1.0).total.backward()

        work()
        return [measured(work)[0] for _ in range(repeats)]


if __name__ == "__main__":
    serve(Ours(Path(sys.argv[1])))
