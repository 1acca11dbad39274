"""Every block of the documentation: Python runs, recipes are valid, commands exist; nothing is hidden as plain text."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

from spanwise.cli import app
from spanwise.train.recipe import parse_recipe, read_yaml

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Plain text that is no code: the hex dump of the frame format.
PLAIN_TEXT_PAGES = {"wire-format.md"}


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str


def blocks() -> list[Block]:
    return [
        Block(str(page.relative_to(DOCS)), language.strip(), text)
        for page in sorted(DOCS.rglob("*.md"))
        for language, text in FENCE.findall(page.read_text(encoding="utf-8"))
    ]


BLOCKS = blocks()
PYTHON_PAGES = sorted({block.page for block in BLOCKS if block.language == "python"})


def test_blocks_by_language() -> None:
    counts = Counter(block.language for block in BLOCKS)
    assert set(counts) == {"python", "bash", "yaml", ""}
    assert {block.page for block in BLOCKS if not block.language} == PLAIN_TEXT_PAGES
    assert counts["python"] >= 18
    assert len(PYTHON_PAGES) >= 11
    fences = sum(page.read_text(encoding="utf-8").count("\n```") for page in DOCS.rglob("*.md"))
    assert fences == 2 * len(BLOCKS)


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page are one program, from top to bottom."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": f"docs.{page}"}
    for number, block in enumerate(block for block in BLOCKS if block.page == page and block.language == "python"):
        exec(compile(block.text, f"{page} block {number}", "exec"), names)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=lambda b: b.page)
def test_recipes_are_valid(block: Block) -> None:
    assert parse_recipe(read_yaml(block.text, name=block.page)).output


def commands() -> list[tuple[str, str]]:
    return [
        (block.page, line)
        for block in BLOCKS
        if block.language == "bash"
        for line in block.text.splitlines()
        if line.startswith("spanwise ")
    ]


def check_command(line: str) -> None:
    """A line that a page tells the reader to type: its verb and its options exist."""
    words = shlex.split(line.split(" > ")[0])
    assert words.pop(0) == "spanwise"
    found: Any = typer.main.get_command(app)
    while hasattr(found, "commands"):
        assert words[0] in found.commands, line
        found = found.commands[words.pop(0)]
    options = {name for parameter in found.params for name in parameter.opts}
    unknown = [word for word in words if word.startswith("-") and word not in options]
    assert not unknown, line


def test_commands_and_their_options_exist() -> None:
    assert len(commands()) >= 20
    for page, line in commands():
        try:
            check_command(line)
        except AssertionError as error:
            raise AssertionError(f"{page}: {error}") from error


def test_no_page_asks_a_network_to_be_shown() -> None:
    configuration = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in configuration
    assert "mermaid" not in configuration
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert "![" not in text, page
        assert "<script" not in text, page
