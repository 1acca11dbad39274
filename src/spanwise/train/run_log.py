"""The log of a run: one JSON line per optimizer step and per evaluation, always, whatever else watches the run.

Continuing a run first drops the lines after the checkpoint it continues from, so every step stands exactly once.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

LOG_NAME = "log.jsonl"


class RunLog:
    """Appends lines to ``log.jsonl`` in a run's folder.

    Args:
        folder: the run's folder.
        writes: False on all ranks but the first, which then only remember.
    """

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.path = folder / LOG_NAME
        self.writes = writes
        self.entries: list[dict[str, Any]] = read_log(self.path)

    def rewind(self, step: int) -> None:
        """Forget every line after ``step``."""
        self.entries = [entry for entry in self.entries if entry["step"] <= step]
        if self.writes:
            staging = self.path.with_suffix(".tmp")
            staging.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries), encoding="utf-8")
            staging.replace(self.path)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Add one line; ``kind`` is "step" or "evaluation"."""
        entry = {"kind": kind, "step": step} | values
        self.entries.append(entry)
        if self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def last_steps(self, count: int) -> list[dict[str, Any]]:
        """The newest ``count`` lines of steps, oldest first; O(lines since then)."""
        newest = islice((entry for entry in reversed(self.entries) if entry["kind"] == "step"), count)
        return list(newest)[::-1]

    def curve(self, name: str, kind: str = "step") -> list[tuple[float, float]]:
        """(step, value) of every line of that kind that has the name."""
        return [
            (float(entry["step"]), float(entry[name]))
            for entry in self.entries
            if entry["kind"] == kind and entry.get(name) is not None
        ]


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last line that a crash cut short is left out."""
    if not path.is_file():
        return []
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return entries
