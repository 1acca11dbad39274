"""What the demo compares: every arm is a recipe, so each can be run alone with ``spanwise train``.

Two questions, each with its controls:

- **swap**: SmolLM2 moved onto a new 8k tokenizer. Against the original (untouched), the swap before any training, and
  the original trained on the same text in the same way, which says how much of the gain is mere adaptation to the text.
- **student**: a small model from random weights with a 2k tokenizer of its own. Cross entropy alone, half cross entropy
  and half prefix KL (the same total weight), and *doubled* cross entropy with no teacher, which shows what a larger
  loss alone does. Same data, order, steps and learning rate; clipping is scale-invariant (AdamW's step does not depend
  on the loss's scale, and the norm is not clipped).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spanwise.loading import BUILTIN_SMOLLM2

DOCS, TALES = "builtin:python-docs", "builtin:tales"
DOCS_HELD_OUT, TALES_HELD_OUT = f"{DOCS}:eval", f"{TALES}:eval"

CROSS_ENTROPY, DISTILLED, DOUBLED = "cross entropy", "½ cross entropy + ½ teacher", "2 × cross entropy"
ORIGINAL, SWAPPED = "original, untouched", "swapped, untrained"
SWAPPED_TRAINED, ORIGINAL_TRAINED = "swapped, trained", "original, trained the same way"

# Chosen for both arms alike from the grid in benchmarks/demo.py.
LEARNING_RATE = 6e-3


@dataclass(frozen=True)
class Scale:
    """How large the demo is."""

    swap_steps: int
    student_steps: int
    student_batch: int
    curve_points: int
    held_out_documents: int
    teacher_documents: int | None
    small_student: bool = False


FULL = Scale(
    swap_steps=24, student_steps=200, student_batch=4, curve_points=5, held_out_documents=10, teacher_documents=40
)
QUICK = Scale(
    swap_steps=2,
    student_steps=12,
    student_batch=8,
    curve_points=2,
    held_out_documents=2,
    teacher_documents=4,
    small_student=True,
)


def student_recipe(
    name: str, seed: int, *, scale: Scale, folder: Path, tokenizer: Path, cache: Path, train: str, rate: float
) -> dict[str, Any]:
    """A small model from random weights; the arms differ in their weights of the two losses and nothing else."""
    ce_weight, kd_weight = {CROSS_ENTROPY: (1.0, 0.0), DISTILLED: (0.5, 0.5), DOUBLED: (2.0, 0.0)}[name]
    return {
        "task": "distill",
        "seed": seed,
        "output": str(folder),
        "student": {"model": student_config(scale), "tokenizer": str(tokenizer)},
        "teachers": [{"cache": str(cache), "tokenizer": BUILTIN_SMOLLM2, "loss": "prefix_kl"}],
        "loss": {"ce_weight": ce_weight, "kd_weight": kd_weight},
        "data": {"train": train, "eval": DOCS_HELD_OUT, "window_bytes": 700, "context_length": 256},
        "eval": {"documents": scale.held_out_documents, "batch_size": 16},
        "train": {
            "max_steps": scale.student_steps,
            "per_device_train_batch_size": scale.student_batch,
            "gradient_accumulation_steps": 1,
            "learning_rate": rate,
            "warmup_steps": max(1, scale.student_steps // 10),
            "lr_scheduler_type": "cosine",
            "adam_beta2": 0.95,
            "weight_decay": 0.0,
            "max_grad_norm": 0.0,
            "eval_strategy": "steps",
            "eval_steps": max(1, scale.student_steps // scale.curve_points),
            "save_strategy": "no",
            "logging_steps": 20,
        },
    }


def student_config(scale: Scale) -> dict[str, Any]:
    """d = 192, 3 layers; smaller for --quick."""
    width, layers = (64, 2) if scale.small_student else (192, 3)
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        # At this width the usual 0.02 leaves the model at its unigrams for the first hundred steps.
        "initializer_range": 0.07,
    }


def swap_recipe(model: str, seed: int, *, scale: Scale, folder: Path) -> dict[str, Any]:
    """LoRA on all linear layers, the tied embeddings at a rate of their own; the same for the original."""
    return {
        "task": "distill",
        "seed": seed,
        "output": str(folder),
        "student": {
            "model": model,
            "dtype": "bfloat16",
            "peft": {"r": 16, "lora_alpha": 16, "target_modules": "all-linear"},
            "embedding_learning_rate": 5e-4,
            "merge": True,
        },
        "data": {"train": [DOCS, TALES], "window_bytes": 1000, "context_length": 1024},
        "train": {
            "max_steps": scale.swap_steps,
            "per_device_train_batch_size": 4,
            "learning_rate": 4e-3,
            "weight_decay": 0.0,
            "max_grad_norm": 0.1,
            "bf16": True,
            "save_strategy": "no",
            "logging_steps": 4,
        },
    }
