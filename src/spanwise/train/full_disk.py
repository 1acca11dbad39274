"""A disk that fills up while a run goes on: what is whole, and how to go on.

Python, torch and safetensors each say it in their own way, some of them only in the text of an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from spanwise.teachers.cache_writer import CacheDiskError
from spanwise.train.run_folder import STAGING, checkpoints

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What torch says of a file that could not be written to its end names no disk.
WORDS = (*map(os.strerror, FULL), "inline_container.cc", "iostream error")


class FullDiskError(OSError):
    """The disk took no more; the checkpoints that were published are whole."""


@contextlib.contextmanager
def told_of_a_full_disk(folder: Path) -> Iterator[None]:
    """Say what to do where a run's disk is full, and take away what was half written."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CacheDiskError) or not _is_full(error):  # a teacher's cache says it of its own folder
            raise
        shutil.rmtree(folder / STAGING, ignore_errors=True)
        whole = checkpoints(folder)
        goes_on = f"{whole[-1].name} is whole, and the run goes on from there" if whole else "the run begins anew"
        raise FullDiskError(
            errno.ENOSPC,
            f"the disk of '{folder}' took no more ({str(error).strip().splitlines()[0]}); expected room for two "
            "checkpoints. Something else probably filled it since the run began. Fix: free some space and start the "
            f"same command with --resume: {goes_on}",
        ) from error


def _is_full(error: BaseException | None) -> bool:
    """Whether the error, or one that it came of, is a disk's."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in FULL) or any(words in str(error) for words in WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False
