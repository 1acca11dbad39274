"""The log under ``shm://``: records that every process replays into a ledger of its own.

A writer appends behind the committed length, where nobody looks yet, and then publishes with a single aligned
eight-byte store, so a record is there whole or not at all. Two numbers lead the file: a magic and the committed length.
All of it happens under the plane's lock. O(records since the last look) to catch up; the log is compacted once it
outgrows the state it describes.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from spanwise.dataplane.errors import CapacityExceeded, TransportDown
from spanwise.dataplane.ledger import Ledger, Record
from spanwise.dataplane.ledger_state import from_record, to_record

MAGIC = b"SPWINDEX"
HEAD_BYTES = 64
RECORD = struct.Struct("<II")
COMPACT_BYTES = 1 << 20
RESERVE_BYTES = 1 << 16
FREEING = {"clear", "leave", "unreserve", "ack", "release"}
FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM}


class SharedLog:
    """One process's handle on the log of a plane, and the ledger that the log tells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = -1
        self.head: Any = None
        self.position = HEAD_BYTES
        self.set_aside = 0  # bytes of the log that are known to be allocated
        self.compact_at = COMPACT_BYTES
        self.ledger = Ledger()

    @property
    def has_news(self) -> bool:
        """Whether somebody published since the last look. Needs no lock."""
        head = self.head
        return head is None or head[1] != self.position

    def catch_up(self) -> None:
        """Apply what was published since the last look; an absent log is begun."""
        path = self.folder / "index"
        try:
            inode = path.stat().st_ino
        except FileNotFoundError:
            self.begin()
            inode = path.stat().st_ino
        if self.file < 0 or os.fstat(self.file).st_ino != inode:
            self._open()
        committed = self.head[1]
        if committed == self.position:
            return
        if not self.position < committed <= os.fstat(self.file).st_size:
            raise self._damaged()
        records = self._records(os.pread(self.file, committed - self.position, self.position))
        with self._replayed_anew_if_interrupted():
            for record in records:
                if record[0] == "snapshot":
                    self.ledger = from_record(record[1])
                else:
                    self.ledger.apply(record)
            self.position = committed

    def commit(self, records: Sequence[Record]) -> list[str]:
        """Publish records and apply them here; returns the segments that nothing refers to any more."""
        data = b"".join(framed(record) for record in records)
        self._append(data, from_reserve=all(record[0] in FREEING for record in records))
        self._publish(self.position + len(data))
        with self._replayed_anew_if_interrupted():
            freed = [segment for record in records for segment in self.ledger.apply(record)]
            self.position += len(data)
        if self.position > self.compact_at:
            with suppress(CapacityExceeded):  # the records are in; a long log does no harm
                self.compact()
        return freed

    def close(self) -> None:
        """Let go of the file."""
        if self.file >= 0:
            os.close(self.file)
        self.file = -1
        self.head = None

    def _records(self, data: bytes) -> list[Record]:
        """The records in the log's next bytes; TransportDown where they are not what a client wrote."""
        records, at = [], 0
        while at < len(data):
            size, crc = RECORD.unpack_from(data, at) if at + RECORD.size <= len(data) else (len(data), 0)
            payload = data[at + RECORD.size : at + RECORD.size + size]
            if len(payload) != size or zlib.crc32(payload) != crc:
                raise self._damaged()
            records.append(msgspec.msgpack.decode(payload))
            at += RECORD.size + size
        return records

    def _damaged(self) -> TransportDown:
        return TransportDown(
            f"the index of the plane in {self.folder} is damaged behind byte {self.position}; something else probably "
            "wrote into it. Fix: end the plane's processes, remove this folder, and put the samples again."
        )

    @contextmanager
    def _replayed_anew_if_interrupted(self) -> Iterator[None]:
        """A ledger that was left in the middle of a record (Ctrl-C) is dropped; the log tells everything again."""
        try:
            yield
        except BaseException:
            self.position = HEAD_BYTES
            self.ledger = Ledger()
            raise

    def _open(self) -> None:
        if self.file >= 0:
            os.close(self.file)
        self.file = os.open(self.folder / "index", os.O_RDWR | os.O_CLOEXEC)
        self.position = HEAD_BYTES
        self.set_aside = 0
        self.ledger = Ledger()
        if os.pread(self.file, len(MAGIC), 0) != MAGIC or os.fstat(self.file).st_size < HEAD_BYTES:
            self.close()
            raise self._damaged()
        self.head = memoryview(mmap.mmap(self.file, HEAD_BYTES)).cast("Q")

    def _append(self, data: bytes, *, from_reserve: bool) -> None:
        """Write behind the committed length, where nobody looks yet: what fails here leaves the plane as it was.

        RESERVE_BYTES behind the end stay allocated, and only records that free something may use them up: on a full
        /dev/shm samples can still be cleared.
        """
        end = self.position + len(data)
        with room_for(f"{len(data):,} bytes of the index"):
            if end + RESERVE_BYTES > self.set_aside:
                try:
                    os.posix_fallocate(self.file, self.position, len(data) + 2 * RESERVE_BYTES)
                    self.set_aside = end + 2 * RESERVE_BYTES
                except OSError:
                    if not from_reserve:
                        raise
            if os.pwrite(self.file, data, self.position) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _publish(self, committed: int) -> None:
        """The atomic write: one aligned eight-byte store."""
        self.head[1] = committed

    def begin(self, snapshot: Record | None = None) -> None:
        """A new log in place of the old one, for everybody: empty, or with everything so far as its first record."""
        body = b"" if snapshot is None else framed(["snapshot", snapshot])
        fresh = self.folder / "index.new"
        try:
            with room_for(f"an index of {HEAD_BYTES + len(body):,} bytes"):
                fresh.touch(mode=0o600)
                fresh.write_bytes(struct.pack("<8sQ", MAGIC, HEAD_BYTES + len(body)).ljust(HEAD_BYTES, b"\0") + body)
        except CapacityExceeded:
            fresh.unlink(missing_ok=True)
            raise
        fresh.replace(self.folder / "index")
        self._open()

    def compact(self) -> None:
        """Replace the log by what it says, if that is much shorter."""
        snapshot = to_record(self.ledger)
        size = len(msgspec.msgpack.encode(snapshot))
        self.compact_at = max(COMPACT_BYTES, 4 * size)
        if self.position <= self.compact_at:
            return
        self.begin(snapshot)
        self.catch_up()


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """CapacityExceeded where the kernel says that there is no room for what is written inside."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in FULL:
            raise
        raise CapacityExceeded(
            f"shared memory has no room for {what} ({problem.strerror}); nothing was changed. It is probably full, or "
            "smaller than the batches in flight. Fix: clear samples, set max_bytes, or give the container more shared "
            "memory (--shm-size)."
        ) from problem


def framed(record: Record) -> bytes:
    payload = msgspec.msgpack.encode(record)
    return RECORD.pack(len(payload), zlib.crc32(payload)) + payload
