"""From a recipe's ``train`` section to transformers' TrainingArguments, with defaults that fit what is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from spanwise.train.recipe import Recipe, RecipeError


def training_arguments(recipe: Recipe, folder: Path, *, has_evaluation: bool, best_metric: tuple[str, bool]) -> Any:
    """The arguments of a run.

    Evaluation and saving happen every 500 steps unless said otherwise; with held-out data the checkpoint with the best
    measure is the one the run ends with, as long as both happen at the same steps.
    """
    given = dict(recipe.train)
    evaluates = given.get("eval_strategy", "steps" if has_evaluation else "no") != "no"
    if evaluates and not has_evaluation:
        raise RecipeError(
            f"train.eval_strategy is '{given['eval_strategy']}' and data.eval is not given; expected held-out text to "
            "measure on. Fix: set data.eval, or train.eval_strategy=no."
        )
    if recipe.data.stream and given.get("max_steps", -1) < 1:
        raise RecipeError(
            "data.stream is true and train.max_steps is not given; expected the number of steps, since a stream does "
            "not say how long it is. Fix: set train.max_steps, or data.stream=false to count epochs."
        )
    _check_trackers(given.get("report_to"))
    every = given.get("save_steps", given.get("eval_steps", 500))
    defaults: dict[str, Any] = {
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": every if evaluates else None,
        "save_strategy": "steps",
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
    together = defaults | given
    if evaluates and together["save_strategy"] == together["eval_strategy"]:
        metric, higher = best_metric
        defaults |= {
            "load_best_model_at_end": True,
            "metric_for_best_model": f"eval_{metric}",
            "greater_is_better": higher,
        }
    chosen = defaults | given | {"remove_unused_columns": False, "seed": recipe.seed, "output_dir": str(folder)}
    try:
        return TrainingArguments(**chosen)
    except (ValueError, TypeError, ImportError) as error:
        raise RecipeError(
            f"train: {error} (from transformers.TrainingArguments). A value probably does not fit this machine or "
            "another value. Fix: change the value it names."
        ) from error


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
