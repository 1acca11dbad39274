"""Starts recipes on two gloo processes; one launch for several recipes, since starting takes longer than they do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.train import runs

RANK = Path(__file__).with_name("rank.py")


def on_two_ranks(
    contents: Sequence[dict[str, Any]],
    folder: Path,
    *words: str,
    again: Sequence[int] = (),
    signalled: Sequence[int] = (),
) -> list[list[dict[str, Any]]]:
    """What each recipe gave on each of the two ranks, which are two processes: results[recipe][rank].

    Where the recipe's place is in ``again``, the run is continued from its last checkpoint but one; where it is in
    ``signalled``, the second rank gets SIGTERM on its way into the third step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [runs.write(content, folder / f"recipe-{place}.yaml") for place, content in enumerate(contents)]
    jobs = [
        {"recipe": str(path), "again": place in again, "signalled": place in signalled}
        for place, path in enumerate(paths)
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(RANK), str(folder), *words],
        env=runs.environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-20_000:]
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [(seen["rank"], seen["world"]) for seen in ranks] == [(0, 2), (1, 2)]
    assert ranks[0]["pid"] != ranks[1]["pid"]
    return [[seen["results"][place] for seen in ranks] for place in range(len(contents))]
