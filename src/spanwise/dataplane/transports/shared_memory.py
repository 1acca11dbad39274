"""``shm://name``: processes of one machine share a plane in /dev/shm, and any of them may be killed at any moment.

The ledger is a replicated log. One file holds records; a writer appends behind the committed length and then publishes
with a single eight-byte store, so a record is there whole or not at all. Each process replays the log into its own
ledger. An flock guards it: the kernel frees it when its holder dies. A put writes its frame to a file of its own,
renames it under the lock and publishes it with one record. What dead processes leave (half-written frames,
reservations, stale planes) is reaped by whoever comes next; the last living client removes everything. Where /dev/shm
is full a put is refused and nothing changes; the log keeps room in reserve for the records that free something.

Reads are views of private copy-on-write mappings: zero-copy, safe to write into, valid after the file is gone.
O(records since the last transaction) to catch up; the log is compacted once it outgrows the state it describes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import shutil
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import override

from spanwise.dataplane.errors import CapacityExceeded, DataPlaneError, PutTimeout, TransportDown
from spanwise.dataplane.frame_writer import FrameWriter
from spanwise.dataplane.frames import Frame, decode_frame
from spanwise.dataplane.ledger import Ledger, Record
from spanwise.dataplane.ledger_state import from_record, to_record
from spanwise.dataplane.transports.local import LocalClient, Plane
from spanwise.dataplane.transports.settings import plane_settings, same_settings

ROOT = Path("/dev/shm")  # noqa: S108 (the point of this transport)
HEAD_BYTES = 64
RECORD = struct.Struct("<II")
COMPACT_BYTES = 1 << 20
RESERVE_BYTES = 1 << 16
FREEING = {"clear", "leave", "unreserve", "ack", "release"}
FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM}
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


class SharedMemoryPlane(Plane):
    """One process's handle: lock file, log, its replica of the ledger."""

    copies = False
    name = "shm"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.thread_lock = threading.RLock()
        self.depth = 0
        self.lock_file = -1
        self.log = -1
        self.head: Any = None
        self.position = HEAD_BYTES
        self.set_aside = 0  # bytes of the log that are known to be allocated
        self.compact_at = COMPACT_BYTES
        self.settled = 0
        self.ledger = Ledger()

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
            self._catch_up()
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
            for descriptor in (self.log, self.lock_file):
                if descriptor >= 0:
                    os.close(descriptor)
            self.log = self.lock_file = -1
            self.head = None

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
                self._catch_up()
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
        data = b"".join(_framed(record) for record in records)
        self._append(data, from_reserve=all(record[0] in FREEING for record in records))
        self._publish(self.position + len(data))
        for record in records:
            for segment in self.ledger.apply(record):
                self._segment(segment).unlink(missing_ok=True)
        self.position += len(data)
        if self.position > self.compact_at:
            with suppress(CapacityExceeded):  # the records are in; a long log does no harm
                self._compact()

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
        head = self.head
        while time.monotonic() < deadline and head is not None and head[1] == self.position:
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
        pid = int(segment.split("-")[0])
        return any(pid == owner and _is_alive(pid, started) for owner, started in self.ledger.clients.values())

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

    def _catch_up(self) -> None:
        path = self.folder / "index"
        try:
            inode = path.stat().st_ino
        except FileNotFoundError:
            self._replace_log(None)
            inode = path.stat().st_ino
        if self.log < 0 or os.fstat(self.log).st_ino != inode:
            self._open_log()
        committed = self.head[1]
        if committed == self.position:
            return
        data = os.pread(self.log, committed - self.position, self.position)
        at = 0
        while at < len(data):
            size, crc = RECORD.unpack_from(data, at)
            payload = data[at + RECORD.size : at + RECORD.size + size]
            if len(payload) != size or zlib.crc32(payload) != crc:
                raise TransportDown(
                    f"the index of {self.folder.name} is damaged at byte {self.position + at}; something else wrote "
                    "into it. Fix: close every client of this plane and open it anew."
                )
            record = msgspec.msgpack.decode(payload)
            if record[0] == "snapshot":
                self.ledger = from_record(record[1])
            else:
                self.ledger.apply(record)
            at += RECORD.size + size
        self.position = committed

    def _open_log(self) -> None:
        if self.log >= 0:
            os.close(self.log)
        self.log = os.open(self.folder / "index", os.O_RDWR | os.O_CLOEXEC)
        self.head = memoryview(mmap.mmap(self.log, HEAD_BYTES)).cast("Q")
        self.position = HEAD_BYTES
        self.set_aside = 0
        self.ledger = Ledger()

    def _append(self, data: bytes, *, from_reserve: bool) -> None:
        """Write behind the committed length, where nobody looks yet: what fails here leaves the plane as it was.

        RESERVE_BYTES behind the end stay allocated, and only records that free something may use them up: on a full
        /dev/shm samples can still be cleared.
        """
        end = self.position + len(data)
        with room_for(f"{len(data):,} bytes of the index"):
            if end + RESERVE_BYTES > self.set_aside:
                try:
                    os.posix_fallocate(self.log, self.position, len(data) + 2 * RESERVE_BYTES)
                    self.set_aside = end + 2 * RESERVE_BYTES
                except OSError:
                    if not from_reserve:
                        raise
            if os.pwrite(self.log, data, self.position) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _publish(self, committed: int) -> None:
        """The atomic write: one aligned eight-byte store."""
        self.head[1] = committed

    def _replace_log(self, snapshot: Record | None) -> None:
        body = b"" if snapshot is None else _framed(["snapshot", snapshot])
        fresh = self.folder / "index.new"
        try:
            with room_for(f"an index of {HEAD_BYTES + len(body):,} bytes"):
                fresh.write_bytes(
                    struct.pack("<8sQ", b"SPWINDEX", HEAD_BYTES + len(body)).ljust(HEAD_BYTES, b"\0") + body
                )
        except CapacityExceeded:
            fresh.unlink(missing_ok=True)
            raise
        fresh.replace(self.folder / "index")

    def _compact(self) -> None:
        snapshot = to_record(self.ledger)
        size = len(msgspec.msgpack.encode(snapshot))
        self.compact_at = max(COMPACT_BYTES, 4 * size)
        if self.position <= self.compact_at:
            return
        self._replace_log(snapshot)
        self._open_log()
        self._catch_up()

    def _begin_anew(self) -> None:
        for path in (*self.folder.glob("seg-*"), *self.folder.glob("new-*")):
            path.unlink(missing_ok=True)
        self._replace_log(None)
        self._open_log()


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """CapacityExceeded where the kernel says that there is no room for what is written inside."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in FULL:
            raise
        raise CapacityExceeded(
            f"{ROOT} has no room for {what} ({problem.strerror}); nothing was changed. It is probably full, or smaller "
            "than the batches in flight. Fix: clear samples, set max_bytes, or give the container more shared memory "
            "(--shm-size)."
        ) from problem


def _framed(record: Record) -> bytes:
    payload = msgspec.msgpack.encode(record)
    return RECORD.pack(len(payload), zlib.crc32(payload)) + payload


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
