"""Processes that read data beside the trainer (``train.dataloader_num_workers``): what signals and their end mean.

Schedulers send SIGTERM to every process of a job; torch's readers would die of it, and with them the run that is about
to save. When one is killed, torch says so in one of several ways, wherever the trainer is when the kernel tells of a
child's end: in its own words, or as a connection that broke while a batch was handed over.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator

TORCH_SAYS = "DataLoader worker (pid"
LOADER = "torch/utils/data/dataloader.py"
HANDING_OVER = "/multiprocessing/"
# After a broken pipe torch also hears of the child's end, by a signal that raises wherever this process then is.
SECONDS_TO_BE_TOLD = 1.0


class DeadDataWorkerError(RuntimeError):
    """A process that read data was killed; the run can go on from its newest checkpoint."""


def outlive_sigterm(worker: int) -> None:
    """In a process that reads data, first of all: only the run itself may end it by SIGTERM."""
    run = multiprocessing.parent_process()
    if run is None or not hasattr(signal, "sigwaitinfo"):  # macOS does not tell who sent a signal
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(run.pid,), daemon=True).start()


def _end_with(run: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != run:
        pass
    os._exit(0)


@contextlib.contextmanager
def told_of_dead_workers() -> Iterator[None]:
    """Say what to do where a process of a data loader is gone."""
    try:
        try:
            yield
        except (ConnectionError, EOFError) as error:
            if not _broke_in_handing_over(error):
                raise
            time.sleep(SECONDS_TO_BE_TOLD)
            raise RuntimeError(f"{TORCH_SAYS} unknown) is gone ({type(error).__name__}: {error})") from error
    except RuntimeError as error:
        if not str(error).startswith(TORCH_SAYS):
            raise
        raise DeadDataWorkerError(
            f"a process that read data for this run was killed ({str(error).strip()}); expected it to live as long as "
            "the run. The machine was probably out of memory, or its /dev/shm is small. Fix: go on with --resume; set "
            "train.dataloader_num_workers lower (0: no such processes), or give the container more shared memory."
        ) from error


def _broke_in_handing_over(error: Exception) -> bool:
    """A corpus may lose a connection too, and is read under the same loader: there the pipe between us broke last."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(file.endswith(LOADER) for file in files) and HANDING_OVER in files[-1]
