"""The ``train`` section: which checkpoint a run ends with, and what is refused because nothing would come of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spanwise.train.arguments import training_arguments
from spanwise.train.recipe import RecipeError, parse_recipe
from spanwise.train.train_section import RESERVED_ARGUMENTS, WITHOUT_EFFECT
from tests.train import runs


def arguments(tmp_path: Path, has_evaluation: bool = True, data: dict[str, Any] | None = None, **train: Any) -> Any:
    content = runs.recipe(tmp_path)
    content["data"] |= data or {}
    content["train"] = {"max_steps": 4} | train
    best = ("bits_per_byte", False)
    return training_arguments(parse_recipe(content), tmp_path, has_evaluation=has_evaluation, best_metric=best)


@pytest.mark.parametrize(
    ("given", "evaluates", "saves"),
    [
        ({}, "steps", "steps"),
        ({"save_strategy": "epoch"}, "epoch", "epoch"),
        ({"eval_strategy": "epoch"}, "epoch", "epoch"),
        ({"eval_steps": 7}, "steps", "steps"),
        ({"save_strategy": "best"}, "steps", "best"),
    ],
)
def test_what_is_said_of_saving_holds_for_measuring_and_the_best_is_kept(
    tmp_path: Path, given: dict[str, Any], evaluates: str, saves: str
) -> None:
    found = arguments(tmp_path, **given)
    assert (found.eval_strategy, found.save_strategy) == (evaluates, saves)
    assert found.load_best_model_at_end
    assert (found.metric_for_best_model, found.greater_is_better) == ("eval_bits_per_byte", False)
    if "eval_steps" in given:
        assert (found.eval_steps, found.save_steps) == (7, 7)


def test_who_measures_apart_from_saving_or_not_at_all_gets_the_last_model(tmp_path: Path) -> None:
    for given in (
        {"eval_strategy": "no"},
        {"save_strategy": "no"},
        {"eval_strategy": "steps", "save_strategy": "epoch"},
    ):
        assert not arguments(tmp_path, **given).load_best_model_at_end
    without = arguments(tmp_path, has_evaluation=False)
    assert (without.eval_strategy, without.save_strategy) == ("no", "steps")


@pytest.mark.parametrize(("name", "value"), [("eval_strategy", "steps"), ("save_strategy", "best")])
def test_measuring_without_held_out_text_is_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(RecipeError, match=rf"{name} is '{value}' and data\.eval is not given.*Fix: set data\.eval"):
        arguments(tmp_path, has_evaluation=False, **{name: value})


@pytest.mark.parametrize("strategy", ["group_by_length", "sequential"])
def test_a_stream_cannot_be_put_in_order(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(RecipeError, match=f"data.stream is true and train.train_sampling_strategy is '{strategy}'"):
        arguments(tmp_path, data={"stream": True}, train_sampling_strategy=strategy)


@pytest.mark.parametrize("name", ["eval_strategy", "save_strategy", "logging_strategy"])
def test_a_stream_has_no_epochs_to_wait_for(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match=f"data.stream is true and train.{name} is 'epoch'; expected steps"):
        arguments(tmp_path, data={"stream": True}, **{name: "epoch"})


@pytest.mark.parametrize("name", [*WITHOUT_EFFECT, *RESERVED_ARGUMENTS])
def test_what_would_have_no_effect_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match=rf"'{name}' (has no effect here \(|is set by ).*; take it out"):
        arguments(tmp_path, **{name: 1})
