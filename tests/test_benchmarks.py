"""The benchmarks' own house: what runs in a peer's environment needs nothing of ours, and run_all finds them all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.peer_sides import vision_work
from benchmarks.run_all import NOT_BENCHMARKS
from tests.vlm import processors

ROOT = Path(__file__).parents[1]
SIDES = ROOT / "benchmarks" / "peer_sides"
THEIRS = [file for file in sorted(SIDES.glob("*.py")) if not file.stem.endswith("_ours")]
THEIRS.append(ROOT / "benchmarks" / "mlm_reference.py")


def imported(file: Path) -> set[str]:
    """Modules a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def reached(file: Path, seen: dict[Path, set[str]] | None = None) -> dict[Path, set[str]]:
    """A file's imports and those of every file of this repository that it leads to."""
    seen = {} if seen is None else seen
    if file not in seen:
        seen[file] = imported(file)
        for name in seen[file]:
            other = ROOT / Path(*name.split(".")).with_suffix(".py")
            if other.is_file():
                reached(other, seen)
    return seen


@pytest.mark.parametrize("file", THEIRS, ids=lambda file: file.stem)
def test_a_peers_side_needs_nothing_of_spanwise(file):
    ours = {
        f"{reader.relative_to(ROOT)} imports {name}"
        for reader, names in reached(file).items()
        for name in names
        if name.split(".")[0] == "spanwise"
    }
    assert not ours


def test_the_check_would_see_an_import_behind_another_file():
    assert any("spanwise.vlm" in names for names in reached(SIDES / "vision_ours.py").values())
    assert SIDES / "memory.py" in reached(SIDES / "gold_trl.py")


def test_run_all_runs_what_records_and_nothing_else():
    files = (ROOT / "benchmarks").glob("*.py")
    recording = {file.stem for file in files if "benchmarks.record" in imported(file) or "record" in imported(file)}
    assert recording == {file.stem for file in (ROOT / "benchmarks").glob("*.py")} - NOT_BENCHMARKS


@pytest.mark.parametrize("name", vision_work.MARKED)
def test_a_marked_template_renders_what_the_template_renders(name):
    processor = processors.build(name)
    chat = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is\nthis?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A field. "}]},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
    ]
    marked = vision_work.marked_template(name)
    assert "{% generation %}" in marked
    plain = processor.apply_chat_template(chat, tokenize=False)
    assert processor.apply_chat_template(chat, chat_template=marked, tokenize=False) == plain
