"""The same work by this library and by what one would use instead, each peer from PyPI in an environment of its own.

    python benchmarks/peers.py [--quick] [NAME …]

Both sides run interleaved with one thread and are timed in seconds of CPU; memory is the peak of resident memory beyond
what was there before. Ratios are ours / theirs: below 1 we need less. A peer that cannot be installed or run leaves a
row that says why. Comparisons that are not named keep their rows. ``--quick`` measures less and records apart.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peer_process import PeerError
from benchmarks.record import RESULTS, record

COMPARISONS = ("distillation", "vision", "masking", "diffusion", "wire")


def rows_of(name: str, quick: bool) -> list[dict[str, Any]]:
    """The rows of one comparison, or the one that says why there are none."""
    try:
        found = import_module(f"benchmarks.peer_comparisons.{name}").compare(quick)
    except PeerError as error:
        found = [{"figure": "not run", "value": "not run", "unit": "", "reached": "-", "context": str(error)}]
    return [row | {"figure": f"{name}: {row['figure']}"} for row in found]


def kept_rows(benchmark: str, names: list[str]) -> list[dict[str, Any]]:
    """Rows of earlier runs of the comparisons that are not measured now."""
    if not RESULTS.is_file():
        return []
    with RESULTS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["benchmark"] == benchmark]
    return [row for row in rows if row["figure"].split(":")[0] not in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer; records under peers-quick")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(COMPARISONS)}; default: all")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(COMPARISONS))
    if unknown:
        parser.error(f"there is no comparison {', '.join(unknown)}; expected any of {', '.join(COMPARISONS)}")
    benchmark = "peers-quick" if options.quick else "peers"
    for name in options.names or COMPARISONS:
        # Recorded after each, so that a run that is cut short keeps what it has measured.
        rows = kept_rows(benchmark, [name]) + rows_of(name, options.quick)
        record(benchmark, sorted(rows, key=lambda row: COMPARISONS.index(row["figure"].split(":")[0])))


if __name__ == "__main__":
    main()
