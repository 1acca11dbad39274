"""Distillation across tokenizers by TRL's GOLD trainer, and its loss alone. Argument: the folder of the pair."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.gold.gold_trainer import build_teacher_inputs_from_texts

from benchmarks.peer_sides.serve import measured, serve
from benchmarks.peer_sides.step_clock import StepClock


class GoldOfTRL:
    """A fresh trainer per question: ``uld`` sorts all probabilities, ``gold`` compares shared tokens one by one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def trainer(self, loss: str, rows: int, steps: int) -> tuple[GOLDTrainer, StepClock]:
        """A trainer of a loss; nothing is generated, and shared tokens are compared by KL, as on the other side."""
        clock = StepClock()
        arguments = GOLDConfig(
            output_dir=tempfile.mkdtemp(dir=self.folder),
            teacher_tokenizer_name_or_path=str(self.folder / "teacher"),
            use_uld_loss=True, uld_use_hybrid_loss=loss == "gold", lmbda=0.0, beta=0.0, max_length=None,
            per_device_train_batch_size=rows, max_steps=steps, learning_rate=1e-4,
            train_sampling_strategy="sequential",
            use_cpu=True, bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False,
            save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = GOLDTrainer(
            model=AutoModelForCausalLM.from_pretrained(self.folder / "student", dtype=torch.float32),
            teacher_model=AutoModelForCausalLM.from_pretrained(self.folder / "teacher", dtype=torch.float32),
            args=arguments,
            processing_class=AutoTokenizer.from_pretrained(self.folder / "student"),
            train_dataset=load_dataset("json", data_files=str(self.folder / "pairs.jsonl"), split="train"),
            callbacks=[clock],
        )
        return trainer, clock

    def steps(self, loss: str, rows: int, steps: int) -> list[dict[str, float]]:
        """Whole training steps."""
        trainer, clock = self.trainer(loss, rows, steps)
        trainer.train()
        return clock.steps

    def loss(self, loss: str, rows: int, repeats: int) -> list[dict[str, float]]:
        """The loss of the first rows and its gradient, on logits drawn at random."""
        trainer, _ = self.trainer(loss, rows, 1)
        batch = trainer.data_collator([trainer.train_dataset[row] for row in range(rows)])
        teacher_ids, teacher_labels, _, teacher_offsets = build_teacher_inputs_from_texts(
            trainer.teacher_tokenizer, batch["original_prompt_text"], batch["original_completion_text"]
        )
        draw = torch.Generator().manual_seed(0)
        sizes = trainer.model.config.vocab_size, trainer.teacher_model.config.vocab_size
        student = torch.randn(*batch["input_ids"].shape, sizes[0], generator=draw).mul_(3).requires_grad_()
        teacher = torch.randn(*teacher_ids.shape, sizes[1], generator=draw).mul_(3)

        def work() -> None:
            student.grad = None
            trainer.uld_loss_fn(
                student, teacher, batch["labels"], teacher_labels, batch["input_ids"], teacher_ids,
                batch["byte_offsets"], teacher_offsets,
            ).backward()  # fmt: skip

        work()
        return [measured(work)[0] for _ in range(repeats)]


if __name__ == "__main__":
    serve(GoldOfTRL(Path(sys.argv[1])))
