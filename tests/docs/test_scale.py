"""docs/scale.md: the table is the product of measured rows, and the page has every row that it asks for."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """docs/hooks.py as mkdocs loads it: from its file, with its folder on the path."""
    monkeypatch.syspath_prepend(str(DOCS))
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("scale_table", None)


ROWS = [
    {"benchmark": "gpu", "figure": "8B teacher: tokens per second", "value": "50000"},
    {"benchmark": "gpu", "figure": "8B teacher: peak memory", "value": "17.2"},
    {"benchmark": "gpu", "figure": "1B student: tokens per second", "value": "100000"},
    {"benchmark": "scale", "figure": "FLOPs per token, 8B teacher, forward", "value": "17.5"},
    {"benchmark": "scale", "figure": "FLOPs per token, 1B student, step", "value": "9"},
    {"benchmark": "scale", "figure": "bytes per token: dense logits", "value": "98304"},
    {"benchmark": "scale", "figure": "bytes per token: cached, k = 4", "value": "25"},
    {"benchmark": "scale", "figure": "bytes per token: streamed, top 64", "value": "560"},
    {"benchmark": "teachers", "figure": "bytes per token: cached, k = 9", "value": "1"},
]


def test_the_table_multiplies_what_was_measured(hooks: Any) -> None:
    head, _, *lines = hooks.scale_table(ROWS).splitlines()
    cells = {line.strip("| ").split(" | ")[0]: line.strip("| ").split(" | ")[1:] for line in lines}
    assert list(cells) == [
        "online, one process",
        "cached, k = 4",
        "streamed, top 64",
        "dense logits, kept",
        "dense logits, sent",
    ]
    # 1e9 tokens at 50,000 a second are 5.56 hours; at 100,000 half as many.
    teacher, student = "1.8e+19 FLOP, 5.6 h", "9e+18 FLOP, 2.8 h"
    assert cells["online, one process"] == [teacher, teacher, student, "0", "0", "0", "17 GiB"]
    assert cells["cached, k = 4"] == [teacher, "0", student, "25 GB", "0", "0", "0"]
    assert cells["streamed, top 64"] == [teacher, teacher, student, "0", "560 GB", "28 MB", "0"]
    assert cells["dense logits, kept"] == [teacher, "0", student, "304 TB", "0", "0", "0"]
    assert hooks.scale_table.__globals__["size"](999.7e9) == "1 TB"
    assert len(head.split(" | ")) == 8


def test_without_measurements_the_page_says_so(hooks: Any) -> None:
    assert "Nothing has been measured" in hooks.scale_table(ROWS[:1])


@pytest.mark.parametrize("page", ["scale.md", "comparison.md"])
def test_a_page_has_every_row_that_it_asks_for(hooks: Any, page: str) -> None:
    filled = hooks.on_page_markdown((DOCS / page).read_text(encoding="utf-8"))
    assert "<!--" not in filled
    assert "Nothing has been measured" not in filled
