"""docs/compatibility.md: every name in it imports, every file and every test in it exists."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
CODE = re.compile(r"`([^`]+)`")


def sections() -> list[str]:
    return PAGE.split("\n## ")[1:]


def tables(section: str) -> list[tuple[list[str], list[list[str]]]]:
    """Headers and rows of every table, as cells."""
    found: list[tuple[list[str], list[list[str]]]] = []
    previous = ""
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|---"):
            found.append(([cell.strip() for cell in previous.strip("|").split("|")], []))
        elif line.startswith("| ") and found and previous.startswith("|"):
            found[-1][1].append([cell.strip("| ").strip() for cell in cells])
        previous = line
    return found


def names() -> list[tuple[str, str]]:
    found = []
    for section in sections():
        module = re.search(r"Importable from `([\w.]+)`", section)
        assert module, f"a section does not say where its names come from: {section[:60]}"
        for header, rows in tables(section):
            if header[0] == "name":
                found += [(module.group(1), name) for row in rows for name in CODE.findall(row[0])]
    return found


def test_the_page_has_as_many_names_as_the_five_pages_it_follows() -> None:
    assert len(sections()) == 5
    assert len(names()) > 90
    assert len(set(names())) == len(names())


@pytest.mark.parametrize(("module", "name"), names(), ids=lambda value: value)
def test_the_name_imports(module: str, name: str) -> None:
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert found is not None


@cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_every_named_test_exists() -> None:
    missing, counted = [], 0
    for section in sections():
        for header, rows in tables(section):
            place = next(at for at, cell in enumerate(header) if cell.startswith("test ("))
            folder = header[place].removeprefix("test (").removesuffix(")")
            for row in rows:
                tests = [code for code in CODE.findall(row[place]) if ".py" in code or code.endswith("/")]
                assert tests, f"no test is named for {row[0]}"
                for test in tests:
                    file, _, function = test.partition("::")
                    path = ROOT / (file if file.startswith("tests/") else f"{folder}{file}")
                    counted += 1
                    if not path.is_file() or (function and f"def {function}(" not in source(path)):
                        missing.append(test)
    assert counted > 100
    assert missing == []


def test_every_file_that_a_name_lives_in_exists() -> None:
    for section in sections():
        for header, rows in tables(section):
            if header[0] == "name":
                for row in rows:
                    for file in CODE.findall(row[1]):
                        path = ROOT / "src" / (file if file.startswith("spanwise/") else f"spanwise/{file}")
                        assert path.is_file(), file
