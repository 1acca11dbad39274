"""The README's examples run, and its file tree is the real one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_three_examples():
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("place", range(len(BLOCKS)))
def test_an_example_runs(place):
    exec(compile(BLOCKS[place], f"README example {place + 1}", "exec"), {})


def test_the_file_tree_is_real_and_says_at_most_eight_words():
    tree = README.split("## Where things are")[1].split("```")[1]
    for line in tree.strip().splitlines():
        name, _, words = line.strip().partition(" ")
        for part in [name, *re.findall(r"(\w+/)\s{2}", line.strip())][:1]:
            inside = line.startswith("  ")
            assert (ROOT / ("src/spanwise" if inside else "") / part).exists(), f"{part} is not there"
        assert len(words.split()) <= 10, f"{name} is described at length"


def test_the_two_commands_are_shown():
    assert "make demo" in README
    assert "make test" in README
