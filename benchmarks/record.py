"""Write a benchmark's rows into results.csv: its old rows are replaced, everybody else's stay."""

from __future__ import annotations

import csv
import fcntl
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.csv")
COLUMNS = ("benchmark", "figure", "value", "unit", "target", "reached", "context", "machine")


def machine() -> str:
    """What the figures were measured on, in a few words."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores {platform.machine()}, {device}, torch {torch.__version__}"


def record(benchmark: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace the rows of ``benchmark`` in results.csv and print them as a table.

    Each row holds figure, value, unit, and where there is one target, reached ("yes", "no" or "-") and context.
    """
    complete = [dict.fromkeys(COLUMNS, "") | {"benchmark": benchmark, "machine": machine()} | dict(row) for row in rows]
    with RESULTS.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        old: list[dict[str, str]] = []
        if RESULTS.is_file():
            with RESULTS.open(newline="") as file:
                old = [row for row in csv.DictReader(file) if row["benchmark"] != benchmark]
        everything = sorted([*old, *complete], key=lambda row: row["benchmark"])
        staging = RESULTS.with_suffix(".tmp")
        with staging.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(everything)
        staging.replace(RESULTS)
    show(complete)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table: figure, value, target, reached."""
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value", "target", "reached", "context")
    for row in rows:
        value = row["value"]
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        table.add_row(row["figure"], f"{shown} {row['unit']}", str(row["target"]), row["reached"], row["context"])
    Console(width=160).print(table)
