"""One process that sees several GPUs uses one: torch's DataParallel would cut ragged batches by their first axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from spanwise.train.arguments import training_arguments
from spanwise.train.recipe import parse_recipe
from tests.train import runs


def test_a_process_that_sees_two_gpus_trains_on_one_and_says_how_to_use_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = TrainingArguments._setup_devices.func

    def two_gpus(arguments: Any) -> torch.device:
        device = seen(arguments)
        arguments._n_gpu = 2
        return device

    monkeypatch.setattr(TrainingArguments._setup_devices, "func", two_gpus)
    recipe = parse_recipe(runs.recipe(tmp_path))
    arguments = training_arguments(recipe, tmp_path, has_evaluation=False, best_metric=("bits_per_byte", False))
    assert arguments.n_gpu == 1
    assert arguments.train_batch_size == 4
    assert "sees 2 GPUs and trains on one. For all: torchrun --nproc-per-node 2" in caplog.text
