"""The table of docs/scale.md: what one billion tokens cost, multiplied out of the measured rows.

A pass is one reading of all tokens by the student. FLOPs are counted, hours are those of the GPU that the speeds were
measured on; bytes are those of the cache's files, and of the questions and answers that go through the queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TOKENS = 1e9
TEACHER_VOCABULARY = 151_936
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
MISSING = "*Nothing has been measured here yet: `make bench`, and `benchmarks/gpu.py` on a machine with a GPU.*"


@dataclass(frozen=True)
class Way:
    """One way to let a teacher teach.

    Attributes:
        again: whether the teacher computes in every pass, or in the first alone.
        kept: bytes per token on disk.
        carried: bytes per token over the network, in every pass.
        beside: whether the teacher's weights lie beside the student's.
    """

    name: str
    again: bool = True
    kept: float = 0.0
    carried: float = 0.0
    beside: bool = False


def scale_table(rows: Iterable[Mapping[str, str]]) -> str:
    """The table in markdown, from rows of results.csv."""
    found = {f"{row['benchmark']} {row['figure']}": row["value"] for row in rows}
    try:
        teacher, student = (float(found[f"gpu {name}: tokens per second"]) for name in ("8B teacher", "1B student"))
        memory = float(found["gpu 8B teacher: peak memory"])
        read, learnt = (
            float(found[f"scale FLOPs per token, {name}"]) for name in ("8B teacher, forward", "1B student, step")
        )
    except KeyError:
        return MISSING
    lines = [
        "| way | teacher, first pass | each further pass | student, each pass | on disk | over the network, each pass "
        "| of it per second and teacher's GPU | teacher's memory beside the student |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way in ways(found):
        cells = [
            way.name,
            work(read, teacher),
            work(read, teacher) if way.again else "0",
            work(learnt, student),
            size(way.kept * TOKENS),
            size(way.carried * TOKENS),
            size(way.carried * teacher),
            f"{memory:.0f} GiB" if way.beside else "0",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ways(found: Mapping[str, str]) -> list[Way]:
    """Online, then what was cached and streamed in the measurement, then dense logits on the same roads."""
    dense = 2.0 * TEACHER_VOCABULARY
    listed = [Way("online, one process", beside=True)]
    for name, value in found.items():
        way = name.removeprefix("scale bytes per token: ")
        if way != name and way.startswith("cached"):
            listed.append(Way(way, again=False, kept=float(value)))
        elif way != name and way.startswith("streamed"):
            listed.append(Way(way, carried=float(value)))
    return [
        *listed,
        Way("dense logits, kept", again=False, kept=dense),
        Way("dense logits, sent", carried=dense),
    ]


def work(gigaflops: float, tokens_per_second: float) -> str:
    """FLOPs of a pass, and GPU hours of the measured GPU."""
    return f"{TOKENS * gigaflops * 1e9:.2g} FLOP, {TOKENS / tokens_per_second / 3_600:.1f} h"


def size(count: float) -> str:
    """Bytes for people."""
    if not count:
        return "0"
    count = float(f"{count:.3g}")
    step = min(int(math.log10(count)) // 3, len(UNITS) - 1)
    return f"{count / 1_000**step:.3g} {UNITS[step]}"
