"""``shm://name``: processes of one machine share a plane in /dev/shm, and any of them may be killed at any moment.

The ledger is a replicated log (shared_log.py) that each process replays. An flock guards it: the kernel frees it when
its holder dies. A put writes its frame to a file of its own, renames it under the lock, publishes it with one record.
What dead processes leave (half-written frames, reservations, stale planes) is reaped by whoever comes next; the last
living client removes everything. Where /dev/shm is full a put is refused and nothing changes; the log keeps room in
reserve for the records that free something. Who is alive is read in /proc: the parties must see one another there.

Reads are views of private copy-on-write mappings: zero-copy, safe to write into, valid after the file is gone.
O(records since the last transaction) to catch up.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from spanwise.dataplane.errors import CapacityExceeded, DataPlaneError, PutTimeout, TransportDown
from spanwise.dataplane.frame_writer import FrameWriter
from spanwise.dataplane.frames import Frame, decode_frame
from spanwise.dataplane.ledger import Ledger, Record
from spanwise.dataplane.transports.local import LocalClient, Plane
from spanwise.dataplane.transports.settings import plane_settings, same_settings
from spanwise.dataplane.transports.shared_log import SharedLog, room_for

ROOT = Path("/dev/shm")  # noqa: S108 (the point of this transport)
OPEN_TIMEOUT_S = 30.0
REAP_EVERY = 16
_LONGEST_NAP_S = 0.01


def open_shared_memory(
    name: str, *, max_bytes: int | None = None, max_rows: int | None = None, when_full: str = "block"
) -> LocalClient:
    """A client of the plane ``name`` of this machine and user; the first one makes it."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise ValueError(
            f"shm://{name}: expected 1 to 64 letters, digits, '_', '-' or '.'. A path was probably passed. "
            "Fix: use a short plain name."
        )
    if not ROOT.is_dir():
        raise TransportDown(f"{ROOT} does not exist; shm:// needs Linux shared memory. Fix: use memory:// or tq://.")
    settings = plane_settings(max_bytes, max_rows, when_full)
    plane = SharedMemoryPlane(ROOT / f"spanwise-{os.getuid()}-{name}")
    client = uuid.uuid4().hex
    plane.join(client, settings, f"shm://{name}")
    return LocalClient(plane, client)


_planes: weakref.WeakSet[SharedMemoryPlane] = weakref.WeakSet()


class SharedMemoryPlane(Plane):
    """One process's handle: lock file, log, segments."""

    copies = False
    name = "shm"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.thread_lock = threading.RLock()
        self.depth = 0
        self.lock_file = -1
        self.log = SharedLog(folder)
        self.settled = 0
        _planes.add(self)

    @property
    def ledger(self) -> Ledger:
        return self.log.ledger

    # ---- joining and leaving ---------------------------------------------------------------------------------------

    def join(self, client: str, settings: dict[str, Any], url: str) -> None:
        """Enter the plane; a plane whose clients are all dead is swept and begun anew."""
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        while True:
            try:
                with room_for("a new plane"):
                    with suppress(FileExistsError):
                        self.folder.mkdir(mode=0o700)
                    self.lock_file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # the last client removed the folder in between
                continue
            self._flock(deadline, TransportDown)
            if self._is_current():
                break
            os.close(self.lock_file)
        try:
            self.log.catch_up()
            living = [entry for entry, (pid, started) in self.ledger.clients.items() if _is_alive(pid, started)]
            if living:
                same_settings(url, self.ledger.settings, settings)
            else:
                self._begin_anew()
                self.commit([["settings", settings]])
            self.commit([["join", client, os.getpid(), _started(os.getpid())]])
            self.reap()
        except BaseException as problem:
            if isinstance(problem, CapacityExceeded) and not self._others(client):
                shutil.rmtree(self.folder, ignore_errors=True)
            self._let_go()  # the lock too
            raise
        fcntl.flock(self.lock_file, fcntl.LOCK_UN)

    @override
    def leave(self, client: str) -> None:
        # Without room for a last word the others learn from the kernel that this process has ended.
        with (
            suppress(TransportDown, CapacityExceeded),
            self.transaction(time.monotonic() + OPEN_TIMEOUT_S, PutTimeout),
        ):
            if self._others(client):
                self.commit([["leave", client]])
            else:
                shutil.rmtree(self.folder, ignore_errors=True)
        self._let_go()

    def _others(self, client: str) -> bool:
        """Whether another living client is in the plane."""
        entries = self.ledger.clients.items()
        return any(name != client and _is_alive(pid, started) for name, (pid, started) in entries)

    def _let_go(self) -> None:
        with self.thread_lock:
            self.drop_files()

    def drop_files(self) -> None:
        """Close the lock and the log, without a word to the others."""
        self.log.close()
        if self.lock_file >= 0:
            os.close(self.lock_file)
        self.lock_file = -1

    # ---- the plane -------------------------------------------------------------------------------------------------

    @override
    @contextmanager
    def transaction(self, deadline: float, error: type[DataPlaneError]) -> Iterator[Ledger]:
        if not self.thread_lock.acquire(timeout=max(deadline - time.monotonic(), 0.001)):
            raise _not_free(error)
        try:
            if self.depth == 0:
                self._flock(deadline, error)
                if not self._is_current():
                    fcntl.flock(self.lock_file, fcntl.LOCK_UN)
                    raise TransportDown(
                        f"the plane in {self.folder.name} is gone: every other client took this process for dead, or "
                        "somebody removed its files. Fix: open a new client."
                    )
                try:
                    self.log.catch_up()
                except BaseException:
                    fcntl.flock(self.lock_file, fcntl.LOCK_UN)
                    raise
            self.depth += 1
            try:
                yield self.ledger
            finally:
                self.depth -= 1
                if self.depth == 0:
                    fcntl.flock(self.lock_file, fcntl.LOCK_UN)
        finally:
            self.thread_lock.release()

    @override
    def commit(self, records: Sequence[Record]) -> None:
        for segment in self.log.commit(records):
            self._segment(segment).unlink(missing_ok=True)

    @override
    def write(self, segment: str, frame: FrameWriter) -> None:
        with room_for(f"a put of {frame.nbytes:,} bytes"):
            descriptor = os.open(self._unfinished(segment), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with room_for(f"a put of {frame.nbytes:,} bytes"):
                os.posix_fallocate(descriptor, 0, frame.nbytes)  # a full /dev/shm is an error here, not a SIGBUS later
                with mmap.mmap(descriptor, frame.nbytes) as target:
                    frame.write_into(target)
        finally:
            os.close(descriptor)

    @override
    def settle(self, segment: str) -> None:
        self.settled += 1
        if self.settled % REAP_EVERY == 0:
            self.reap()  # before the rename: a segment that no record names is garbage
        self._unfinished(segment).rename(self._segment(segment))

    @override
    def discard(self, segment: str) -> None:
        self._unfinished(segment).unlink(missing_ok=True)
        self._segment(segment).unlink(missing_ok=True)

    @override
    def frame(self, segment: str) -> Frame:
        descriptor = os.open(self._segment(segment), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return decode_frame(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
        finally:
            os.close(descriptor)

    @override
    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + min(seconds, 0.05)
        nap = 0.0002
        while time.monotonic() < deadline and not self.log.has_news:
            time.sleep(nap)
            nap = min(nap * 2, _LONGEST_NAP_S)

    @override
    def reap(self) -> None:
        for path in self.folder.glob("seg-*"):
            if path.name.removeprefix("seg-") not in self.ledger.segments:
                path.unlink(missing_ok=True)
        records: list[Record] = []
        records += [["unreserve", token] for token in self.ledger.reservations if not self._writer_lives(token)]
        records += [["leave", name] for name, (pid, s) in self.ledger.clients.items() if not _is_alive(pid, s)]
        for path in self.folder.glob("new-*"):
            if not self._writer_lives(path.name.removeprefix("new-")):
                path.unlink(missing_ok=True)
        if records:
            self.commit(records)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _writer_lives(self, segment: str) -> bool:
        pid = segment.split("-")[0]
        return any(pid == str(owner) and _is_alive(owner, started) for owner, started in self.ledger.clients.values())

    def _segment(self, segment: str) -> Path:
        return self.folder / f"seg-{segment}"

    def _unfinished(self, segment: str) -> Path:
        return self.folder / f"new-{segment}"

    def _flock(self, deadline: float, error: type[DataPlaneError]) -> None:
        nap = 0.0001
        while True:
            if self.lock_file < 0:
                raise TransportDown("the client was closed by another thread. Fix: open a new client.")
            try:
                fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise _not_free(error) from None
                time.sleep(nap)
                nap = min(nap * 2, 0.002)

    def _is_current(self) -> bool:
        """Whether the lock file we hold is still the plane's."""
        try:
            return os.stat(self.folder / "lock").st_ino == os.fstat(self.lock_file).st_ino
        except FileNotFoundError:
            return False

    def _begin_anew(self) -> None:
        for path in (*self.folder.glob("seg-*"), *self.folder.glob("new-*")):
            path.unlink(missing_ok=True)
        self.log.begin()


def _drop_files_in_child() -> None:
    for plane in list(_planes):
        plane.drop_files()


# A forked child (a DataLoader's worker) would keep its parent's lock alive when the parent is killed inside a call.
os.register_at_fork(after_in_child=_drop_files_in_child)


def _not_free(error: type[DataPlaneError]) -> DataPlaneError:
    return error(
        "the plane's lock was not free before the deadline; another client is stopped inside a call, or very slow. "
        "Fix: wait longer, or look for a stopped process."
    )


def _started(pid: int) -> int:
    """When a process began, so that a reused pid is not taken for it; 0 where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def _is_alive(pid: int, started: int) -> bool:
    return started != 0 and _started(pid) == started
