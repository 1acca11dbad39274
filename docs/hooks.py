"""What mkdocs fills in while it builds: measured rows from benchmarks/results.csv, what follows from them at scale, and
tables of the recipes' keys; and the roles of docstrings, which it does not know.

A page writes ``<!-- measured: WORDS -->`` where a table of the rows belongs; numbers in the pages are therefore those
of the file, and nothing is copied by hand.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scale_table import scale_table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results.csv"
ROLE = re.compile(r":(?:mod|class|func|meth|attr|data):<code>(~?)([^<]*)</code>")
MARK = re.compile(r"<!-- (measured|recipe|scale): ([^>]+?) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page."""
    fill = {"measured": measured, "recipe": recipe_table, "scale": lambda _: scale_table(read_rows())}
    return MARK.sub(lambda mark: fill[mark[1]](mark[2]), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name things by roles (``:class:`~a.b.C```); pages show the name."""
    return ROLE.sub(lambda role: f"<code>{role[2].rsplit('.', 1)[-1] if role[1] else role[2]}</code>", html)


def measured(words: str) -> str:
    """Rows of the benchmark file: ``missed`` (targets not reached), or a benchmark's, or those of it with a word."""
    rows = read_rows()
    if words == "missed":
        return table(row for row in rows if row["reached"] == "no")
    benchmark, _, word = words.partition(" ")
    return table(row for row in rows if row["benchmark"] == benchmark and word in f"{row['figure']} {row['context']}")


def read_rows() -> list[dict[str, str]]:
    """The rows of the benchmark file."""
    with RESULTS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table(rows: Iterable[dict[str, str]]) -> str:
    """A markdown table; it says so when nothing has been measured."""
    lines = [
        f"| {row['figure']} | {number(row['value'])} {row['unit']} | {row['target'] or '–'} | {row['context']} "
        f"| {row['machine']} |"
        for row in ({key: value.replace("|", "/") for key, value in row.items()} for row in rows)
    ]
    if not lines:
        return "*Nothing has been measured here yet.*"
    return "\n".join(["| figure | value | target | context | machine |", "|---|---|---|---|---|", *lines])


def number(text: str) -> str:
    """A value with four significant digits; words as they are."""
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text


def recipe_table(task: str) -> str:
    """The keys of a task's recipes, section by section, from the models that read them."""
    from spanwise.train.recipe import recipe_class

    schema = recipe_class(task).model_json_schema()
    parts = [keys(schema)]
    for name, field in schema["properties"].items():
        inner = section_of(field, schema)
        if inner is not None:
            parts.append(f"\n**{name}**{' (a list)' if field.get('type') == 'array' else ''}\n\n{keys(inner)}")
    return "\n".join(parts)


def keys(section: dict[str, Any]) -> str:
    """One section's keys as a table."""
    required = section.get("required", [])
    lines = ["| key | default | what |", "|---|---|---|"]
    for name, field in section["properties"].items():
        default = "**required**" if name in required else f"`{field['default']}`" if "default" in field else "–"
        if isinstance(field.get("default"), dict):
            default = "see below" if field["default"] else "–"
        lines.append(f"| `{name}` | {default} | {field.get('description', '').replace('|', '/')} |")
    return "\n".join(lines)


def section_of(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any] | None:
    """The model behind a field, if it is one."""
    reference = field.get("$ref") or field.get("items", {}).get("$ref")
    found: dict[str, Any] | None = None if reference is None else schema["$defs"][reference.rsplit("/", 1)[1]]
    return found if found is not None and "properties" in found else None
