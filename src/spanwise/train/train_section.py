"""What may stand in a recipe's ``train`` section: names of TrainingArguments, with values of their kind.

transformers checks few of them: a batch size of 0, a learning rate that is a word or no steps at all would come back
as an error deep inside a loader, or train nothing. Everything wrong is found here, before anything is loaded.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from spanwise.train.nearest import did_you_mean

# What the recipe says elsewhere, or what the trainer itself must decide.
RESERVED_ARGUMENTS = {
    "output_dir": "output",
    "seed": "seed",
    "data_seed": "seed",
    "remove_unused_columns": None,
    "label_names": None,
    "resume_from_checkpoint": "the flag --resume",
    "local_rank": None,
    "do_train": None,
    "do_eval": None,
    "do_predict": None,
    "per_device_eval_batch_size": "eval.batch_size",
    "metric_for_best_model": "the task's own measure",
    "greater_is_better": "the task's own measure",
}
MEASURED = "a task measures by itself, as the section eval says"
# What transformers would do and this trainer does not, so that nobody believes that it was done.
WITHOUT_EFFECT = {
    "label_smoothing_factor": "the losses take none",
    "save_only_model": "every checkpoint can be continued from; save_total_limit says how many are kept",
    "dataloader_drop_last": "the last step is completed with rows that count nothing",
    "dataloader_in_order": "the order of rows is the same in every run of a recipe",
    "length_column_name": "lengths are measured",
    "eval_accumulation_steps": MEASURED,
    "prediction_loss_only": MEASURED,
    "batch_eval_metrics": MEASURED,
    "include_for_metrics": MEASURED,
}
AT_LEAST_ONE = ("per_device_train_batch_size", "gradient_accumulation_steps")
ABOVE_ZERO = ("num_train_epochs", "logging_steps", "save_steps", "eval_steps")
NOT_NEGATIVE = ("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm")
KINDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


def wrong_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Everything that is wrong with a ``train`` section, one line each; [] where nothing is."""
    kinds = _kinds()
    wrong = []
    for name, value in arguments.items():
        if name in RESERVED_ARGUMENTS:
            wrong.append(f"'{name}' is set by {RESERVED_ARGUMENTS[name] or 'the trainer itself'}; take it out")
        elif name in WITHOUT_EFFECT:
            wrong.append(f"'{name}' has no effect here ({WITHOUT_EFFECT[name]}); take it out")
        elif name not in kinds:
            wrong.append(f"'{name}' is not one of TrainingArguments{did_you_mean(name, kinds)}")
        elif not _is_of(value, kinds[name]):
            expected = " or ".join(KINDS[kind] for kind in kinds[name] if kind in KINDS)
            wrong.append(f"{name} is {value!r}; expected {expected}")
        elif (least := _too_small(name, value)) is not None:
            wrong.append(f"{name} is {value!r}; expected {least}")
    return wrong


@cache
def _kinds() -> dict[str, tuple[type, ...]]:
    """Argument → the types that its value may have; () where transformers itself reads words into something."""
    import dataclasses

    from transformers import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    return {field.name: _plain(hints[field.name]) for field in dataclasses.fields(TrainingArguments)}


def _plain(hint: Any) -> tuple[type, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if is_union else (hint,)
    return parts if all(part in (*KINDS, types.NoneType) for part in parts) else ()


def _is_of(value: Any, kinds: tuple[type, ...]) -> bool:
    if not kinds:
        return True
    # Python's bool is an int, but "max_steps: true" is a mistake.
    if isinstance(value, bool):
        return bool in kinds or str in kinds  # transformers reads true as a word, of fsdp for one
    return isinstance(value, (*kinds, int) if float in kinds else kinds)


def _too_small(name: str, value: Any) -> str | None:
    """What is expected of a number that is too small to train with; None where it is not."""
    if name == "max_steps":
        return None if value >= 1 or value == -1 else "at least 1 (or -1: num_train_epochs decides)"
    if name in AT_LEAST_ONE:
        return None if value >= 1 else "at least 1"
    if name in ABOVE_ZERO:
        return None if value is None or value > 0 else "more than 0"
    return "0 or more" if name in NOT_NEGATIVE and value < 0 else None
