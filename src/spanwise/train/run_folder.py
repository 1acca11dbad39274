"""The folder of a run: one run at a time, and nothing in it is ever half written.

The lock is the kernel's (flock on ``.lock``), so a killed run frees it. A checkpoint is written under ``.staging``,
gets a manifest with the size and SHA-256 of every file, and is renamed into place: it is complete or absent. Resuming
verifies the manifest and refuses a checkpoint that lacks a file, the optimizer's state included. A run that ends in an
error before its first step leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from types import TracebackType
from typing import IO

from spanwise.loading import file_digest
from spanwise.train.run_log import LOG_NAME

STAGING = ".staging"
LOCK = ".lock"
MANIFEST = "manifest.json"
CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")
# What of a folder is the run's own business and never uploaded: checkpoints, locks, staging, its spare tokenizer.
# Nothing that is unpickled is ever shared.
NOT_SHARED = ("checkpoint-*", ".*", "_*", "tokenizer/*", "*.bin", "*.pt", "*.pth", "*.pkl")
# What of a checkpoint only serves to continue it.
NOT_A_MODEL = ("trainer_state.json", "spanwise_state.json", MANIFEST, "optimizer_*", "pytorch_model_fsdp_*")
# What a run cannot be continued without; sharded (FSDP) checkpoints keep the optimizer in a folder of this name.
OPTIMIZER_NAMES = ("optimizer.pt", "optimizer.bin", "optimizer_0")


class RunFolder:
    """Exclusive use of an output folder, as a context manager.

    Args:
        path: made if it is not there.
        resume: continue what lies in it; without it a folder that holds anything is refused.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = False) -> None:
        self.path = Path(path)
        self.resume = resume
        self._lock: IO[str] | None = None
        self._was_empty = False

    def __enter__(self) -> RunFolder:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(
                f"output is '{self.path}', which is a file; expected a folder. Fix: name another output folder."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / LOCK).open("a+")
        except OSError as error:
            raise ValueError(
                f"the output folder '{self.path}' cannot be written ({error.strerror}); expected a folder on a disk "
                "with room that this user may write to. Fix: name another output folder, or free space."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ValueError(
                f"the output folder '{self.path}' is in use by another run; expected one run per folder. Two runs were "
                "probably started from the same recipe. Fix: wait for the other, or pass output=OTHER_FOLDER."
            ) from None
        left = sorted(entry.name for entry in self.path.iterdir() if entry.name not in (LOCK, STAGING))
        if left and not self.resume:
            self.close()
            raise ValueError(
                f"the output folder '{self.path}' is not empty "
                f"({', '.join(left[:4])}{', …' if len(left) > 4 else ''}); "
                "expected an empty one. It probably holds an earlier run. Fix: pass --resume to continue that run, or "
                "name another output folder."
            )
        shutil.rmtree(self.path / STAGING, ignore_errors=True)
        self._was_empty = not left
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._was_empty and not self._has_begun():
            self._clear()
        self.close()

    def _has_begun(self) -> bool:
        """Whether a step was made: only then is there something to continue."""
        log = self.path / LOG_NAME
        return bool(checkpoints(self.path)) or (log.is_file() and log.stat().st_size > 0)

    def _clear(self) -> None:
        """Leave the folder as it was found, so that a corrected recipe is not refused for what a refused one left."""
        for entry in self.path.iterdir():
            if entry.name == LOCK:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)

    def close(self) -> None:
        """Free the folder for the next run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders by ascending step."""
    steps = [(int(match[1]), entry) for entry in folder.iterdir() if (match := CHECKPOINT.match(entry.name))]
    return [entry for _, entry in sorted(steps)]


def publish_checkpoint(staged: Path, final: Path) -> None:
    """Write the manifest of a staged checkpoint, flush it to disk, rename it into place."""
    files = sorted(file for file in staged.rglob("*") if file.is_file())
    entries = {
        str(file.relative_to(staged)): {"bytes": file.stat().st_size, "sha256": file_digest(file)} for file in files
    }
    manifest = staged / MANIFEST
    manifest.write_text(json.dumps({"version": 1, "files": entries}, indent=1))
    for file in [*files, manifest]:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    if final.exists():
        shutil.rmtree(final)
    staged.rename(final)
    directory = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def linked_copy(folder: Path, copy: Path) -> Path:
    """The files of a folder under second names, for a reader that may outlive it; no bytes where the disk has links."""

    def link(source: str, target: str) -> str:
        try:
            os.link(source, target)
        except OSError:  # a disk without links
            shutil.copyfile(source, target)
        return target

    return Path(shutil.copytree(folder, copy, copy_function=link))


def verify_checkpoint(folder: Path) -> None:
    """Refuse a checkpoint that is not exactly what was written, or that a run cannot be continued from."""
    fix = f"Fix: delete '{folder}' to continue from the checkpoint before it."
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise ValueError(
            f"the checkpoint '{folder}' has no {MANIFEST}; expected one that Spanwise wrote. It was probably written "
            f"by another tool or copied in part. {fix}"
        )
    try:
        entries = {
            name: (int(e["bytes"]), str(e["sha256"])) for name, e in json.loads(manifest.read_text())["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{manifest} cannot be read ({type(error).__name__}: {error}); expected what Spanwise wrote. The disk or a "
            f"copy probably damaged it. {fix}"
        ) from error
    for name, (size, digest) in entries.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(
                f"the checkpoint '{folder}' lacks {name}; expected every file of its manifest, the optimizer's state "
                f"included. It was probably cleaned up by hand. {fix}"
            )
        if file.stat().st_size != size or file_digest(file) != digest:
            raise ValueError(
                f"{file} differs from what was written ({file.stat().st_size:,} bytes, expected {size:,} "
                f"with sha256 {digest[:12]}…). The disk or a copy probably damaged it. {fix}"
            )
    if not any(name.split("/")[0] in OPTIMIZER_NAMES for name in entries):
        raise ValueError(
            f"the checkpoint '{folder}' holds no optimizer state; expected one, since without it the run would not "
            f"continue but start its optimizer anew. It was probably put together by hand. {fix}"
        )
