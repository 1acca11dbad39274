"""Write a cache of teacher scores: append documents, survive kill -9 and full disks, go on where the last run was.

Documents are appended to one open shard, unbuffered, each as a frame with its checksum: what was added is kept even
when the process is killed in the middle of the next one. A full shard is flushed, renamed and entered into the
manifest, which itself is replaced in one step. The next writer takes over whole frames that no manifest names and cuts
off what is not whole. Memory: about 150 bytes per document (the index of what is there), nothing per token.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from spanwise.loading import file_digest
from spanwise.teachers.cache_frame import CacheError, decode, encode
from spanwise.teachers.cache_store import (
    INDEX,
    MANIFEST,
    SHARD_START,
    CacheIdentity,
    Manifest,
    Shard,
    damaged,
    differences,
    frame_headers,
    index_bytes,
    read_frame,
    whole_frames,
    write_whole,
)
from spanwise.teachers.documents import Document, DocumentScores, document_key

OPEN_SHARD = "{}.open"
LOCK = ".lock"


class CacheDiskError(OSError):
    """The disk took no more; everything added before is whole."""


@dataclass
class _Totals:
    """What an open shard holds so far."""

    documents: int = 0
    tokens: int = 0
    positions: int = 0
    entries: int = 0
    largest_k: int = 0
    tail_mass: float = 0.0
    largest_tail_mass: float = 0.0

    def add(self, tokens: int, scores: DocumentScores) -> None:
        tail = np.exp(scores.log_tail.astype(np.float64))
        self.documents += 1
        self.tokens += tokens
        self.positions += len(scores.counts)
        self.entries += len(scores.ids)
        self.largest_k = max(self.largest_k, int(scores.counts.max(initial=0)))
        self.tail_mass += float(tail.sum())
        self.largest_tail_mass = max(self.largest_tail_mass, float(tail.max(initial=0.0)))


class CacheWriter:
    """Appends documents to a cache, or goes on with one that was begun.

    Args:
        path: folder of the cache; made where it is missing.
        identity: whose scores; a cache of another identity is refused.
        shard_bytes: size from which a shard is sealed.

    Use it as a context manager: leaving it seals the open shard. ``finish`` makes the cache readable.
    """

    def __init__(self, path: str | os.PathLike[str], identity: CacheIdentity, *, shard_bytes: int = 64 << 20) -> None:
        self.folder = Path(path)
        self.identity = identity
        self.shard_bytes = shard_bytes
        make_folder(self.folder)
        self._lock = _lock(self.folder)
        self._where: dict[bytes, tuple[int, int, int]] = {}
        self._file: int | None = None
        self._offset = 0
        self._totals = _Totals()
        self._reading: tuple[int, int] | None = None
        try:
            self._open_or_start()
        except BaseException:
            self._unlock()
            raise

    def _open_or_start(self) -> None:
        if not (self.folder / MANIFEST).is_file():
            strangers = [entry.name for entry in self.folder.iterdir() if entry.name != LOCK]
            if strangers:
                raise CacheError(
                    f"'{self.folder}' is no cache of teacher scores but holds {', '.join(sorted(strangers)[:3])}; "
                    "expected a new or empty folder. The path probably belongs to something else. Fix: name another "
                    "folder."
                )
            self.manifest = Manifest(self.identity)
            self.manifest.write(self.folder)
            return
        self.manifest = Manifest.read(self.folder)
        different = differences(self.identity, self.manifest.identity)
        if different:
            raise CacheError(
                f"'{self.folder}' holds scores of another run ({different}); expected the same teacher, tokenizer and "
                "settings. The cache is probably of an earlier recipe. Fix: delete the folder or name another one."
            )
        for number, shard in enumerate(self.manifest.shards):
            path = self.folder / shard.file
            if not path.is_file() or path.stat().st_size != shard.bytes:
                raise damaged(path, f"it is not {shard.bytes:,} bytes long")
            for header, offset in frame_headers(path):
                self._where[header.key] = (number, header.size, offset)
        self._take_over()

    def _take_over(self) -> None:
        """Make a shard of the whole frames in a file that no manifest names: an earlier writer was killed there."""
        sealed = self._shard_name()
        for path in (self.folder / OPEN_SHARD.format(sealed), self.folder / sealed):
            if not path.is_file():
                continue
            end = len(SHARD_START)
            number = len(self.manifest.shards)
            for header, offset, scores in whole_frames(path):
                self._where[header.key] = (number, header.size, offset)
                self._totals.add(header.tokens, scores)
                end = offset + header.size
            open_path = path.rename(self.folder / OPEN_SHARD.format(sealed))
            if not self._totals.documents:
                open_path.unlink()
                return
            os.truncate(open_path, end)
            self._file, self._offset = os.open(open_path, os.O_RDWR), end
            return

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CacheDiskError:
            if error is None:  # else the first error says more
                raise

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def __len__(self) -> int:
        return len(self._where)

    def keys(self) -> frozenset[bytes]:
        """The documents that are there."""
        return frozenset(self._where)

    def add(self, document: Document | np.ndarray, scores: DocumentScores) -> int:
        """Append a document (or its ids), cut to the cache's k; its tokens, 0 for one that was there already."""
        ids = document.ids if isinstance(document, Document) else document
        key = document_key(ids)
        return 0 if key in self._where else self.add_frame(frame_of(self.identity, key, len(ids), scores))

    def add_frame(self, frame: bytes) -> int:
        """Append a document that :func:`frame_of` has encoded, here or elsewhere; its tokens, 0 if it was there."""
        decoded = decode(frame)
        if decoded is None or decoded[0].size != len(frame):
            raise CacheError(
                f"{len(frame):,} bytes were given as the scores of a document and are no whole frame; expected what "
                "frame_of returns. They were probably damaged on the way. Fix: score the document again."
            )
        # Totals are of the scores as they are stored, as they will be when another writer takes the shard over.
        header, stored = decoded
        if header.key in self._where:
            return 0
        self._append(frame)
        self._where[header.key] = (len(self.manifest.shards), len(frame), self._offset - len(frame))
        self._totals.add(header.tokens, stored)
        if self._offset >= self.shard_bytes:
            self.seal()
        return header.tokens

    def _append(self, frame: bytes) -> None:
        try:
            if self._file is None:
                path = self.folder / OPEN_SHARD.format(self._shard_name())
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
                self._offset = 0
                frame_or_start = SHARD_START + frame
            else:
                frame_or_start = frame
            _write_all(self._file, frame_or_start, self._offset)
        except OSError as error:
            raise self._disk_error(error) from error
        self._offset += len(frame_or_start)

    def _disk_error(self, error: OSError) -> CacheDiskError:
        if self._file is not None:
            os.ftruncate(self._file, self._offset)
        return CacheDiskError(
            error.errno,
            f"the cache at '{self.folder}' could not grow ({error.strerror}) after {len(self._where):,} documents, "
            "all of which are whole; expected room on the disk. The disk is probably full. Fix: free some space, lower "
            "k.cap or k.mass, and start the same command again; it goes on where it was",
        )

    def read(self, key: bytes) -> DocumentScores | None:
        """A document that was added, from the open shard too; None where there is none."""
        place = self._where.get(key)
        if place is None:
            return None
        number, size, offset = place
        if number == len(self.manifest.shards) and self._file is not None:
            return read_frame(self._file, self.folder / self._shard_name(), key, size, offset)
        path = self.folder / self.manifest.shards[number].file
        if self._reading is None or self._reading[0] != number:
            if self._reading is not None:
                os.close(self._reading[1])
            self._reading = (number, os.open(path, os.O_RDONLY))
        return read_frame(self._reading[1], path, key, size, offset)

    @property
    def bytes_per_token(self) -> float:
        """Of what was written so far, the open shard included; 0 where nothing was."""
        shards = self.manifest.shards
        size = sum(shard.bytes for shard in shards) + (self._offset if self._file is not None else 0)
        return size / max(sum(shard.tokens for shard in shards) + self._totals.tokens, 1)

    def seal(self) -> None:
        """Flush the open shard, give it its name and enter it into the manifest."""
        if self._file is None:
            return
        name = self._shard_name()
        if not self._totals.documents:  # the disk was full at the first document
            os.close(self._file)
            self._file = None
            (self.folder / OPEN_SHARD.format(name)).unlink()
            return
        try:
            os.fsync(self._file)
            path = (self.folder / OPEN_SHARD.format(name)).rename(self.folder / name)
            shard = Shard(name, self._offset, file_digest(path), **vars(self._totals))
            manifest = replace(self.manifest, shards=(*self.manifest.shards, shard), index_sha256=None)
            manifest.write(self.folder)
        except OSError as error:
            raise self._disk_error(error) from error
        os.close(self._file)
        self.manifest, self._file, self._totals = manifest, None, _Totals()

    def finish(self) -> dict[str, Any]:
        """Seal, write the index and mark the cache as complete; the header's numbers.

        A finished cache can be opened again with a writer, which then adds to it.
        """
        self.seal()
        try:
            write_whole(self.folder / INDEX, index_bytes([(key, *place) for key, place in self._where.items()]))
            self.manifest = replace(self.manifest, index_sha256=file_digest(self.folder / INDEX))
            self.manifest.write(self.folder)
        except OSError as error:
            raise self._disk_error(error) from error
        return self.manifest.summary()

    def close(self) -> None:
        """Seal the open shard and let go of the folder. Closing twice is harmless."""
        if self._lock is None:
            return
        try:
            self.seal()
        finally:
            if self._file is not None:
                os.close(self._file)
                self._file = None
            if self._reading is not None:
                os.close(self._reading[1])
                self._reading = None
            self._unlock()

    def _shard_name(self) -> str:
        return f"shard-{len(self.manifest.shards):05d}.scores"

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def frame_of(identity: CacheIdentity, key: bytes, tokens: int, scores: DocumentScores) -> bytes:
    """A document's scores as a cache of this identity keeps them."""
    missing = [name for name in identity.fields if getattr(scores, name) is None]
    if missing:
        raise CacheError(
            f"the scores of a document lack {', '.join(missing)}, which this cache keeps; expected all of "
            f"{', '.join(identity.fields)}. The teacher probably cannot say it. Fix: leave the field out of the "
            "identity's fields."
        )
    kept = replace(
        identity.k.cut(scores),
        entropy=scores.entropy if "entropy" in identity.fields else None,
        next_word_mass=scores.next_word_mass if "next_word_mass" in identity.fields else None,
    )
    return encode(key, tokens, kept)


def make_folder(folder: Path) -> None:
    """Make a cache's folder where it is missing; one that cannot be written is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644))
    except OSError as error:
        raise CacheError(
            f"the cache's folder '{folder}' cannot be written ({error.strerror}); expected a folder on a disk with "
            "room that this user may write to. A part of the path is probably a file, or another user's. Fix: name "
            "another folder in cache.folder."
        ) from error


def _lock(folder: Path) -> int | None:
    """The kernel's lock on a folder; a killed writer frees it."""
    file = os.open(folder / LOCK, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise CacheError(
            f"another process is writing the cache at '{folder}'; expected one writer. The same command is probably "
            "running twice. Fix: wait for it, or name another folder."
        ) from None
    return file


def _write_all(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
