"""A row of the peers' table: ours divided by theirs, with both sides and every release in the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Row = dict[str, Any]
Measured = Sequence[Mapping[str, float]]


def ratio(figure: str, ours: float, theirs: float, unit: str, context: str) -> Row:
    """One quantity of both sides as ours / theirs; below 1 we need less."""
    shown = f"{ours:.3g} against {theirs:.3g} {unit}; {context}"
    return {"figure": figure, "value": round(ours / theirs, 4), "unit": "×", "reached": "-", "context": shown}


def plain(figure: str, value: Any, unit: str, context: str) -> Row:
    """A figure that stands alone, or words where nothing could be measured."""
    return {"figure": figure, "value": value, "unit": unit, "reached": "-", "context": context}


def middle(measured: Measured, quantity: str) -> float:
    """The median of a quantity."""
    return median(one[quantity] for one in measured)


def releases(found: Mapping[str, str]) -> str:
    """Names and versions in words."""
    return ", ".join(f"{name} {version}" for name, version in found.items())
