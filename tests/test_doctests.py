"""The examples in docstrings, of every module that has one."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import spanwise

SOURCE = Path(spanwise.__file__).parent
MODULES = [
    ".".join(["spanwise", *file.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")
    for file in sorted(SOURCE.rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


def test_every_room_below_training_has_examples() -> None:
    assert len(MODULES) > 50
    rooms = {name.split(".")[1] for name in MODULES}
    assert {"batch", "loss_parts", "spans", "dataplane", "teachers", "xtoken", "vlm", "mlm", "report", "train"} <= rooms


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed
