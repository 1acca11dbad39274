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
    for line in tree.strip("\n").splitlines():
        # Names stand before the words, at least two blanks apart; a folder with its files below has no words.
        parts = re.split(r"\s{2,}", line.strip())
        names, words = (parts[:-1], parts[-1]) if len(parts) > 1 else (parts, "")
        for name in names:
            folder = "src/spanwise" if line.startswith("  ") else ""
            assert (ROOT / folder / name).exists(), f"{name} is not there"
        assert len(words.split()) <= 8, f"{names[0]} is described at length"


def test_contributing_asks_for_as_many_words():
    assert "in at most eight words" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_two_commands_are_shown():
    assert "make demo" in README
    assert "make test" in README
