"""Small runs: a student of a few thousand weights, a teacher with another tokenizer, seconds on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from spanwise.train.held_out import documents
from tests import tiny_tokenizers

ROOT = Path(__file__).parents[2]


def config(vocab_size: int | None = None, **changes: Any) -> dict[str, Any]:
    fields = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    return fields | changes | ({} if vocab_size is None else {"vocab_size": vocab_size})


def save_teacher(folder: Path, tokenizer: Any = None, seed: int = 5) -> Path:
    """A random teacher with a tokenizer of its own."""
    tokenizer = tokenizer or tiny_tokenizers.byte_level_bpe(420, start=8)
    fields = config(len(tokenizer))
    del fields["model_type"]
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**fields)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def recipe(tmp_path: Path, teacher: Path | str | None = None, **train: Any) -> dict[str, Any]:
    teachers = [] if teacher is None else [{"model": str(teacher), "loss": "prefix_kl"}]
    return {
        "task": "distill",
        "output": str(tmp_path / "run"),
        "student": {"model": config(), "tokenizer": {"vocab_size": 400}},
        "teachers": teachers,
        "data": {
            "train": "builtin:python-docs",
            "eval": "builtin:python-docs:eval",
            "window_bytes": 120,
            "context_length": 128,
        },
        "eval": {"documents": 1},
        "train": {
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "eval_strategy": "no",
            "save_strategy": "no",
            "logging_steps": 1,
        }
        | train,
    }


def write(content: dict[str, Any], path: Path) -> Path:
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}


def spanwise(*words: str) -> list[str]:
    """The command line in a process of its own."""
    return [sys.executable, "-c", "from spanwise.cli import main; main()", *words]


def run_command(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(spanwise(*words), capture_output=True, text=True, env=environment(), **options)


def held_out(count: int) -> list[str]:
    """The documents on which a recipe's ``eval`` section measures, whole."""
    return list(documents("builtin:python-docs:eval", columns={}, most=count))
