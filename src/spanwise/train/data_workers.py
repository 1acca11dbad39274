"""Processes that read data beside the trainer (``train.dataloader_num_workers``): what their end means for a run.

torch says it in one of several ways, wherever the trainer is when the kernel tells of a child's end: in its own words,
or as a connection that broke while a batch was handed over.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

TORCH_SAYS = "DataLoader worker (pid"
LOADER = "torch/utils/data/dataloader.py"


class DeadDataWorkerError(RuntimeError):
    """A process that read data was killed; the run can go on from its newest checkpoint."""


@contextlib.contextmanager
def told_of_dead_workers() -> Iterator[None]:
    """Say what to do where a process of a data loader is gone."""
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        if not _is_of_dead_worker(error):
            raise
        raise DeadDataWorkerError(
            f"a process that read data for this run was killed ({type(error).__name__}: {str(error).strip()}); "
            "expected it to live as long as the run. The machine was probably out of memory, or its /dev/shm is small. "
            "Fix: go on with --resume; set train.dataloader_num_workers lower (0: no such processes), or give the "
            "container more shared memory."
        ) from error


def _is_of_dead_worker(error: Exception) -> bool:
    if isinstance(error, RuntimeError):
        return str(error).startswith(TORCH_SAYS)
    return any(frame.filename.endswith(LOADER) for frame in traceback.extract_tb(error.__traceback__))
