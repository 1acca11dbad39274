"""From a recipe's ``train`` section to transformers' TrainingArguments, with defaults that fit what is measured."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from spanwise.train.recipe import Recipe, RecipeError

logger = logging.getLogger(__name__)


def training_arguments(recipe: Recipe, folder: Path, *, has_evaluation: bool, best_metric: tuple[str, bool]) -> Any:
    """The arguments of a run.

    Evaluation and saving happen every 500 steps unless said otherwise; what is said of one also holds for the other.
    With held-out data the checkpoint with the best measure is the one the run ends with, as long as both happen at the
    same steps.
    """
    given = dict(recipe.train)
    alike = "epoch" if given.get("save_strategy") == "epoch" else "steps"
    strategy = given.get("eval_strategy", alike if has_evaluation else "no")
    evaluates = strategy != "no"
    measuring = {"eval_strategy": ("steps", "epoch"), "save_strategy": ("best",)}
    for name, values in measuring.items():
        if not has_evaluation and given.get(name) in values:
            raise RecipeError(
                f"train.{name} is '{given[name]}' and data.eval is not given; expected held-out text to measure on. "
                f"Fix: set data.eval, or take train.{name} out."
            )
    if recipe.data.stream and given.get("max_steps", -1) < 1:
        raise RecipeError(
            "data.stream is true and train.max_steps is not given; expected the number of steps, since a stream does "
            "not say how long it is. Fix: set train.max_steps, or data.stream=false to count epochs."
        )
    if recipe.data.stream and given.get("train_sampling_strategy", "random") != "random":
        raise RecipeError(
            f"data.stream is true and train.train_sampling_strategy is '{given['train_sampling_strategy']}'; expected "
            "random, since the rows of a stream are only known as they come. Fix: set data.stream=false, or take "
            "train.train_sampling_strategy out."
        )
    for name in ("eval_strategy", "save_strategy", "logging_strategy"):
        if recipe.data.stream and given.get(name) == "epoch":
            raise RecipeError(
                f"data.stream is true and train.{name} is 'epoch'; expected steps, since a stream goes on without a "
                f"mark between epochs. Fix: set train.{name}=steps, or data.stream=false."
            )
    _check_trackers(given.get("report_to"))
    every = given.get("save_steps", given.get("eval_steps", 500))
    defaults: dict[str, Any] = {
        "eval_strategy": strategy,
        "eval_steps": every if evaluates else None,
        "save_strategy": strategy if evaluates else "steps",
        "save_steps": every,
        "save_total_limit": 3,
        "logging_steps": 10,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        # Without it several processes on CPUs would each train alone, and say nothing.
        "use_cpu": not torch.accelerator.is_available(),
        # Each rank reads its own share of a stream, instead of the first one sending rows to all.
        "accelerator_config": {"dispatch_batches": False},
    }
    if evaluates and given.get("save_strategy", strategy) in (strategy, "best"):
        metric, higher = best_metric
        defaults |= {
            "load_best_model_at_end": True,
            "metric_for_best_model": f"eval_{metric}",
            "greater_is_better": higher,
        }
    chosen = defaults | given | {"remove_unused_columns": False, "seed": recipe.seed, "output_dir": str(folder)}
    try:
        return on_one_gpu(TrainingArguments(**chosen))
    except (ValueError, TypeError, ImportError) as error:
        raise RecipeError(
            f"train: {error} (from transformers.TrainingArguments). A value probably does not fit this machine or "
            "another value. Fix: change the value it names."
        ) from error


def on_one_gpu(arguments: Any) -> Any:
    """The arguments of a process that uses one GPU, whatever it sees.

    The stock trainer would use all of them by torch's DataParallel, which cuts every tensor of a batch by its first
    axis: an image's patches would come to other rows than its tokens.
    """
    if arguments.n_gpu > 1:
        logger.warning(
            "this process sees %d GPUs and trains on one. For all: torchrun --nproc-per-node %d $(which spanwise) "
            "train …, or ray.workers=%d",
            *[arguments.n_gpu] * 3,
        )
        arguments._n_gpu = 1
    return arguments


def _check_trackers(given: Any) -> None:
    """Refuse a tracker whose package is not there, in our words and before models are loaded."""
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    wanted = [given] if isinstance(given, str) else list(given or [])
    here = get_available_reporting_integrations()
    for name in wanted:
        if name in ("none", "all") or name in here:
            continue
        known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
        remedy = f"pip install {name}" if name in INTEGRATION_TO_CALLBACK else "take one of these"
        raise RecipeError(
            f"train.report_to is '{name}', which is not installed here; expected none or one of {known} with its "
            "package. The recipe was probably written on another machine. Fix: "
            f"{remedy}, or train.report_to=none (log.jsonl and report.html are always written)."
        )
