"""What every side of a comparison shares: commands in, answers out, seconds of CPU and megabytes at the peak.

One JSON command per line on standard input, ``{"do": METHOD, …arguments}``; one JSON line answers it. Needs torch and
nothing of Spanwise, since it also runs in the peers' environments.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.peer_sides.memory import peak, reset_peak


def serve(side: Any) -> None:
    """Answer commands with the methods of ``side`` until the input ends; what others print goes to standard error."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        with contextlib.redirect_stdout(sys.stderr):
            method = versions if command["do"] == "versions" else getattr(side, command["do"])
            answer = method(**{name: value for name, value in command.items() if name != "do"})
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def versions(packages: list[str]) -> dict[str, str]:
    """The installed releases."""
    return {package: version(package) for package in packages}


def measured(work: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Seconds of CPU and megabytes beyond what was resident, and what the work returned."""
    gc.collect()
    before, began = reset_peak(), time.process_time()
    result = work()
    return {"seconds": time.process_time() - began, "megabytes": peak() - before}, result
