"""What a verb of the command line prints: one object for scripts, or tables for people."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def print_json(result: dict[str, Any]) -> None:
    """The one object that a verb prints under ``--json``."""
    sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def show(result: dict[str, Any], as_json: bool, hide: tuple[str, ...] = ()) -> None:
    """A verb's result: one object under ``--json``, else a table of names and values."""
    if int(os.environ.get("RANK", "0")):  # of the processes of one run the first one speaks
        return
    if as_json:
        print_json(result)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 200)
    shown = {name: value for name, value in result.items() if name not in hide and value not in (None, {})}
    lists = {
        name: rows for name, rows in shown.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)
    }
    table = Table(show_header=False, box=None)
    for name in [name for name in shown if name not in lists]:
        table.add_row(escape(name), escape(cell(shown[name])))
    console.print(table)
    for name, rows in lists.items():
        table = Table(*(escape(str(key)) for key in rows[0]), title=escape(name), title_justify="left", box=None)
        for each in rows:
            table.add_row(*(escape(cell(value)) for value in each.values()))
        console.print(table)


def cell(value: Any) -> str:
    """A value in a table: four digits of a fraction, the values of a list of objects one after another."""
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return ", ".join(" ".join(map(repr, each.values())) for each in value)
    return str(value)
