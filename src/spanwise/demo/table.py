"""The demo's result for a terminal: the arms with their spread, the sentence, where the report is."""

from __future__ import annotations

import io
from collections.abc import Mapping
from statistics import mean
from typing import Any

from spanwise.demo.sentence import values


def arms_table(result: Mapping[str, Any]) -> str:
    """Plain text, as wide as a terminal of 110 columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Held-out bits per byte (lower is better)", title_justify="left")
    for name in ("arm", "seeds", "Python's help", "range", "tales", "seconds"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    arms = result["arms"]
    for name in dict.fromkeys(arm["name"] for arm in arms):
        docs = values(arms, name)
        spread = f"{min(docs):.3f}–{max(docs):.3f}" if len(docs) > 1 else ""
        tales = mean(values(arms, name, "other_domain_bits_per_byte"))
        seconds = mean(values(arms, name, "seconds"))
        table.add_row(name, str(len(docs)), f"{mean(docs):.3f}", spread, f"{tales:.3f}", f"{seconds:.0f}")
    text = io.StringIO()
    console = Console(file=text, width=110)
    console.print(table)
    console.print(f"\n{result['sentence']}\n", highlight=False, markup=False)
    # Never broken into lines: a path is there to be copied.
    console.print(f"Report: {result['report']}", highlight=False, markup=False, soft_wrap=True)
    return text.getvalue()
