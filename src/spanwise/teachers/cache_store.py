"""A cache of teacher scores on disk: what its folder holds, what its header says, and reading one document.

::

    manifest.json        the header: whose scores, at which temperature and k, how many, and the list of shards
    shard-00000.scores   a line that names the format, then frames end to end
    index.bin            one sorted 40-byte entry per document; memory-mapped, so that it costs no memory of its own

A reader keeps no scores: it finds a document by bisection and reads that document's bytes (one ``pread``), so memory
does not grow with the cache. Every frame carries a checksum that is compared at each read; sizes of all shards and the
checksum of the index are compared when the cache is opened.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from spanwise.loading import file_digest
from spanwise.teachers.cache_frame import FRAME, CacheError, FrameHeader, TopK, decode
from spanwise.teachers.documents import DocumentScores

FORMAT = "spanwise-scores"
VERSION = 1
SHARD_START = f"{FORMAT} {VERSION}\n".encode()
MANIFEST, INDEX = "manifest.json", "index.bin"
OPEN_SHARDS = 64


@dataclass(frozen=True)
class CacheIdentity:
    """Whose scores a cache holds; any difference makes it another cache.

    Attributes:
        teacher: fingerprint of the model that scored.
        tokenizer: fingerprint of its tokenizer.
        vocab_size: of that tokenizer.
        temperature: of the scores.
        k: how many entries a position keeps.
        fields: the optional scores that are kept (``entropy``, ``next_word_mass``).
        name: what to call the teacher in logs; not compared.
        context_length: tokens at which longer documents were cut, so that a run cuts them alike; not compared.
    """

    teacher: str
    tokenizer: str
    vocab_size: int
    temperature: float = 1.0
    k: TopK = field(default_factory=TopK)
    fields: tuple[str, ...] = ("entropy",)
    name: str = field(default="cached teacher", compare=False)
    context_length: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Shard:
    """One sealed file and what it holds."""

    file: str
    bytes: int
    sha256: str
    documents: int
    tokens: int
    positions: int
    entries: int
    largest_k: int
    tail_mass: float
    largest_tail_mass: float


@dataclass(frozen=True)
class Manifest:
    """The header of a cache."""

    identity: CacheIdentity
    shards: tuple[Shard, ...] = ()
    index_sha256: str | None = None

    @property
    def complete(self) -> bool:
        """True once the whole text was scored."""
        return self.index_sha256 is not None

    def summary(self) -> dict[str, Any]:
        """What the cache holds, in numbers: tokens, bytes_per_token, mean and largest k and tail mass."""
        tokens = sum(shard.tokens for shard in self.shards)
        positions = max(sum(shard.positions for shard in self.shards), 1)
        size = sum(shard.bytes for shard in self.shards)
        return {
            "documents": sum(shard.documents for shard in self.shards),
            "tokens": tokens,
            "bytes": size,
            "bytes_per_token": size / max(tokens, 1),
            "mean_k": sum(shard.entries for shard in self.shards) / positions,
            "largest_k": max((shard.largest_k for shard in self.shards), default=0),
            "mean_tail_mass": sum(shard.tail_mass for shard in self.shards) / positions,
            "largest_tail_mass": max((shard.largest_tail_mass for shard in self.shards), default=0.0),
        }

    def write(self, folder: Path) -> None:
        """Put the manifest in place in one step."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "complete": self.complete,
            "identity": asdict(self.identity),
            "summary": self.summary(),
            "index_sha256": self.index_sha256,
            "shards": [asdict(shard) for shard in self.shards],
        }
        write_whole(folder / MANIFEST, json.dumps(content, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of the cache in ``folder``."""
        try:
            content = json.loads((folder / MANIFEST).read_bytes())
            if content["format"] != FORMAT or content["version"] != VERSION:
                raise CacheError(
                    f"'{folder}' holds {content['format']} of version {content['version']}; expected {FORMAT} of "
                    f"version {VERSION}. Another release of Spanwise wrote it. Fix: build it again: spanwise cache "
                    "RECIPE."
                )
            named = content["identity"]
            identity = CacheIdentity(**named | {"k": TopK(**named["k"]), "fields": tuple(named["fields"])})
            shards = tuple(Shard(**shard) for shard in content["shards"])
            return cls(identity, shards, content["index_sha256"])
        except (FileNotFoundError, NotADirectoryError):
            raise CacheError(
                f"there is no cache of teacher scores at '{folder}' (it has no {MANIFEST}); expected a folder that "
                "'spanwise cache' wrote. The path is probably misspelt, or the cache was not built yet. "
                "Fix: spanwise cache RECIPE."
            ) from None
        except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise CacheError(
                f"'{folder / MANIFEST}' cannot be read ({type(error).__name__}: {error}); expected what 'spanwise "
                "cache' wrote. The file was probably edited or cut short. Fix: restore it, or build the cache again."
            ) from None


def differences(wanted: CacheIdentity, found: CacheIdentity) -> str:
    """What two identities disagree on, in words; empty where they agree."""
    pairs = ((f.name, getattr(wanted, f.name), getattr(found, f.name)) for f in fields(CacheIdentity) if f.compare)
    return "; ".join(f"{name}: {had} in the cache, {want} now" for name, want, had in pairs if want != had)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under another name, flush it to the disk and rename it: it is there whole or as it was."""
    staging = path.with_name(f"{path.name}.writing")
    with staging.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    staging.rename(path)


def index_bytes(entries: list[tuple[bytes, int, int, int]]) -> bytes:
    """``index.bin``: columns of sorted keys (as two big-endian halves), shard, size and offset."""
    entries = sorted(entries)
    count = len(entries)
    keys = np.frombuffer(b"".join(entry[0] for entry in entries), dtype=">u8").reshape(count, 2)
    columns = [keys[:, 0].astype("<u8"), keys[:, 1].astype("<u8")]
    columns += [np.asarray([entry[place] for entry in entries], dtype="<u8") for place in (1, 2, 3)]
    return b"".join(np.ascontiguousarray(column).tobytes() for column in columns)


class CacheReader:
    """Finds and reads documents of a finished cache. Holds an index map and at most 64 open files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        if not self.manifest.complete:
            raise CacheError(
                f"the cache at '{folder}' is unfinished ({self.manifest.summary()['tokens']:,} tokens so far); "
                "expected a finished one. The run that wrote it was probably stopped. Fix: start the same command "
                "again; it goes on where it was."
            )
        for shard in self.manifest.shards:
            self._check_size(shard)
        self._columns = self._open_index()
        self._files: OrderedDict[int, int] = OrderedDict()

    def _check_size(self, shard: Shard) -> None:
        path = self.folder / shard.file
        size = path.stat().st_size if path.is_file() else -1
        if size != shard.bytes:
            there = "missing" if size < 0 else f"{size:,} bytes long"
            raise CacheError(
                f"'{path}' is {there}; expected {shard.bytes:,} bytes. It was probably copied incompletely. "
                "Fix: copy it again, or delete the folder and build the cache again."
            )

    def _open_index(self) -> np.ndarray:
        path = self.folder / INDEX
        count = self.manifest.summary()["documents"]
        if not path.is_file() or path.stat().st_size != 40 * count or file_digest(path) != self.manifest.index_sha256:
            raise CacheError(
                f"'{path}' is not the index that the manifest names; expected {40 * count:,} bytes with its checksum. "
                "It was probably copied incompletely or damaged. Fix: copy it again, or build the cache again."
            )
        if not count:
            return np.zeros((5, 0), dtype="<u8")
        return np.memmap(path, dtype="<u8", mode="r", shape=(5, count))

    def __contains__(self, key: bytes) -> bool:
        return self._find(key) is not None

    def _find(self, key: bytes) -> int | None:
        high, low = int.from_bytes(key[:8], "big"), int.from_bytes(key[8:], "big")
        place = bisect_left(self._columns[0], high)
        while place < self._columns.shape[1] and self._columns[0, place] == high:
            if self._columns[1, place] == low:
                return place
            place += 1
        return None

    def read(self, key: bytes) -> DocumentScores | None:
        """The scores of the document with this key; None where the cache has none."""
        place = self._find(key)
        if place is None:
            return None
        number, size, offset = (int(self._columns[column, place]) for column in (2, 3, 4))
        return read_frame(self._file(number), self.folder / self.manifest.shards[number].file, key, size, offset)

    def _file(self, number: int) -> int:
        if number in self._files:
            self._files.move_to_end(number)
            return self._files[number]
        if len(self._files) >= OPEN_SHARDS:
            os.close(self._files.popitem(last=False)[1])
        self._files[number] = os.open(self.folder / self.manifest.shards[number].file, os.O_RDONLY)
        return self._files[number]

    def verify(self) -> None:
        """Compare the checksum of every shard, reading all of them once. An error names the damaged file."""
        for shard in self.manifest.shards:
            if file_digest(self.folder / shard.file) != shard.sha256:
                raise damaged(self.folder / shard.file, "its checksum is another than the manifest's")

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def read_frame(file: int, path: Path, key: bytes, size: int, offset: int) -> DocumentScores:
    """One document from an open shard; an error names the shard where it is damaged."""
    found = decode(os.pread(file, size, offset))
    if found is None or found[0].key != key:
        raise damaged(path, f"the document at byte {offset:,} does not fit its checksum")
    return found[1]


def damaged(path: Path, how: str) -> CacheError:
    """The error for a file whose content changed after it was written."""
    return CacheError(
        f"'{path}' is damaged: {how}; expected what was written. The disk or a copy probably flipped or lost bytes. "
        "Fix: copy the file again, or delete it together with manifest.json's entry by building the cache again."
    )


def whole_frames(path: Path) -> Iterator[tuple[FrameHeader, int, DocumentScores]]:
    """The whole frames from the start of a shard, with their offsets; ends at the first that is cut or damaged."""
    with path.open("rb") as file:
        offset = len(SHARD_START)
        if file.read(offset) != SHARD_START:
            return
        while True:
            start = file.read(FRAME.size)
            header = FrameHeader.read(start)
            found = None if header is None else decode(start + file.read(header.stored))
            if found is None:
                return
            yield found[0], offset, found[1]
            offset += found[0].size


def frame_headers(path: Path) -> Iterator[tuple[FrameHeader, int]]:
    """The headers of a sealed shard's frames with their offsets; payloads are not read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        offset = len(SHARD_START)
        while offset < size:
            file.seek(offset)
            header = FrameHeader.read(file.read(FRAME.size))
            if header is None:
                raise damaged(path, f"there is no document at byte {offset:,}")
            yield header, offset
            offset += header.size
