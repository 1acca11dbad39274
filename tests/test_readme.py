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


def every_file() -> dict[str, str]:
    """The whole tree of the README: file → its words; several names on a line share none."""
    found = {}
    folders: list[str] = []
    for line in README.split("<details>")[1].split("```")[1].strip("\n").splitlines()[1:]:
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        *names, last = re.split(r"\s{2,}", line.strip())
        names, words = (names, last) if " " in last or not Path(last).suffix else ([*names, last], "")
        folders = folders[:depth]
        for name in names:
            if name.endswith("/"):
                folders.append(name)
            else:
                found["".join([*folders, name])] = words
    return found


def test_every_file_is_in_the_tree_with_at_most_six_words():
    package = ROOT / "src" / "spanwise"
    real = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    real = {name for name in real if not name.endswith(("__init__.py", "py.typed", ".pyc"))}
    listed = every_file()
    assert sorted(listed) == sorted(real)
    assert {name: words for name, words in listed.items() if len(words.split()) > 6} == {}
    families = {name for name in listed if name.startswith("vlm/families/")}
    assert {name for name, words in listed.items() if not words} <= families


def test_contributing_asks_for_as_many_words():
    assert "in at most six words" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_two_commands_are_shown():
    assert "make demo" in README
    assert "make test" in README
