"""What the demo compares is what the recipes of the repository train."""

from __future__ import annotations

from pathlib import Path

from spanwise.demo import arms
from spanwise.train.catalog import recipe_text
from spanwise.train.recipe import parse_recipe, read_yaml


def test_the_swap_recipe_trains_as_the_demo_does():
    """They may differ in where they lie, in what is measured on the way and in what is kept; in nothing else."""
    shipped = read_yaml(recipe_text("swap"), name="swap")
    demo = arms.swap_recipe("outputs/swapped", 0, scale=arms.FULL, folder=Path("outputs/swap-trained"))
    assert parse_recipe(shipped).seed == demo.pop("seed")
    assert shipped["data"].pop("eval") == arms.DOCS_HELD_OUT
    assert shipped["train"].pop("save_steps") == shipped["train"]["max_steps"]
    assert demo["train"].pop("save_strategy") == "no"
    assert parse_recipe(shipped) == parse_recipe(demo)
