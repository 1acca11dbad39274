"""The demo with three seeds and its learning-rate grid.

    python benchmarks/demo.py [--quick]

The grid is run first, for cross entropy and for the teacher's arm alike, at a seed that the comparison does not use; it
is written beside the demo's code, whose page prints it. Then every arm of the demo at three seeds, with spread and
wall-clock, and the two commands as a newcomer runs them, with their time. About 40 minutes on two cores; --quick takes
the demo's small scale and writes no grid.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.record import record
from spanwise.demo import jobs
from spanwise.demo.arms import CROSS_ENTROPY, DISTILLED, FULL, LEARNING_RATE, QUICK
from spanwise.demo.page import GRID_FILE
from spanwise.demo.run import run_demo
from spanwise.demo.sentence import equal_wall_clock, student_verdict, values

GRID = (3e-3, 6e-3, 1.2e-2)
GRID_SEED = 100


def run_grid() -> list[dict[str, object]]:
    """Cross entropy and the teacher's arm at every learning rate."""
    with tempfile.TemporaryDirectory(prefix="spanwise-grid-") as scratch:
        work = Path(scratch)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(2, mp_context=context, initializer=jobs.one_thread) as pool:
            pool.submit(jobs.prepare, work, FULL).result()
            pool.submit(jobs.score_corpus, work, FULL).result()
            futures = {
                (name, rate): pool.submit(
                    jobs.train_student, name, GRID_SEED, rate, work, FULL, label=f"{place}-{rate:g}"
                )
                for place, name in enumerate((CROSS_ENTROPY, DISTILLED))
                for rate in GRID
            }
            rows = [
                {"arm": name, "learning_rate": rate, "bits_per_byte": round(future.result()["bits_per_byte"], 4)}
                for (name, rate), future in futures.items()
            ]
    return [row | {"chosen": "chosen" if row["learning_rate"] == LEARNING_RATE else ""} for row in rows]


def whole_commands() -> list[dict[str, object]]:
    """``spanwise demo`` and its quick form, nothing kept from earlier runs, from start to end."""
    rows: list[dict[str, object]] = []
    for words, most in ((["--quick"], 60), ([], 300)):
        command = [sys.executable, "-c", "from spanwise.cli import main; main()", "demo", "--no-cache", *words]
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            subprocess.run([*command, "--output", folder], check=True, stdout=subprocess.DEVNULL)
            took = time.monotonic() - began
        rows.append(
            {
                "figure": " ".join(["whole command, spanwise demo", *words]),
                "value": took,
                "unit": "s",
                "target": f"<= {most}",
                "reached": "yes" if took <= most else "no",
                "context": "two processes of one thread, installed already",
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rows = []
    if not quick:
        grid = run_grid()
        with GRID_FILE.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(grid[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(grid)
        rows.extend(
            {
                "figure": f"grid: {row['arm']} at {row['learning_rate']:g}",
                "value": row["bits_per_byte"],
                "unit": "bits per byte",
                "context": f"seed {GRID_SEED}",
            }
            for row in grid
        )
    with tempfile.TemporaryDirectory() as folder:
        seeds = 1 if quick else 3
        result = run_demo(Path(folder), quick=quick, seeds=seeds, cache=False, swap_seeds=seeds)
    arms = result["arms"]
    for name in dict.fromkeys(arm["name"] for arm in arms):
        docs = values(arms, name)
        spread = f" ± {stdev(docs):.4f}" if len(docs) > 1 else ""
        tales = mean(values(arms, name, "other_domain_bits_per_byte"))
        seconds = mean(values(arms, name, "seconds"))
        rows.append(
            {
                "figure": name,
                "value": mean(docs),
                "unit": "bits per byte",
                "context": f"{len(docs)} seeds{spread}, tales {tales:.3f}, {seconds:.0f} s",
            }
        )
    verdict = student_verdict(arms)
    for figure, gains in (
        ("teacher against cross entropy, gain", verdict.gains),
        ("teacher against 2 × cross entropy, gain", verdict.gains_over_doubled),
    ):
        rows.append(
            {
                "figure": figure,
                "value": mean(gains),
                "unit": "bits per byte",
                "target": "> 0 in every seed",
                "reached": "yes" if min(gains) > 0 else "no",
                "context": ", ".join(f"{gain:+.4f}" for gain in gains),
            }
        )
    for seed, plain, taught in equal_wall_clock(arms):
        rows.append(
            {
                "figure": f"equal wall-clock, seed {seed}: teacher's gain",
                "value": plain - taught,
                "unit": "bits per byte",
                "context": "read off the curve; the teacher's one pass not counted",
            }
        )
    rows += [] if quick else whole_commands()
    record("demo-quick" if quick else "demo", rows)
    scale = QUICK if quick else FULL
    print(f"{scale.student_steps} steps of {scale.student_batch} windows; learning rate {LEARNING_RATE:g}")
    print(result["sentence"])


if __name__ == "__main__":
    main()
