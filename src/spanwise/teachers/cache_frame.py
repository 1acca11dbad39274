"""One document's scores as bytes: fewer where little mass is left, small where numbers are alike, checked when read.

A frame is a fixed header (key, sizes, CRC-32) and a zstd-compressed safetensors blob. Numbers of several bytes are laid
down plane by plane (all low bytes, then all high ones), so that the nearly constant planes compress away. Precision:
log-probabilities, log tail and entropy are float16, so that a stored value x is off by at most |x|/2048 (and the
probability-weighted error of a position by at most its entropy/2048); the observed log-probability is exact float32.
Encoding and decoding are O(entries); about 3 to 4 bytes an entry for a vocabulary of 50,000.

Shapes: P scored positions, E entries.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from spanwise.teachers.documents import OPTIONAL_FIELDS, DocumentScores, keep_top

FRAME = struct.Struct("<4s16sIIIII")  # mark, key, tokens, entries, stored bytes, raw bytes, CRC-32 of all the rest
MARK = b"SWd1"
# A document of this many raw bytes is no document; a header that says so is damaged.
MOST_RAW_BYTES = 1 << 31


class CacheError(ValueError):
    """A cache of scores that cannot be used as asked: another teacher, tokenizer or text, damaged, or unfinished."""


@dataclass(frozen=True)
class TopK:
    """How many entries a position keeps: as few as reach ``mass``, at least ``floor``, at most ``cap``."""

    floor: int = 4
    cap: int = 64
    mass: float = 0.99

    def __post_init__(self) -> None:
        if not (1 <= self.floor <= self.cap <= 65_535 and 0 < self.mass <= 1):
            raise ValueError(
                f"k was given floor={self.floor}, cap={self.cap}, mass={self.mass}; expected 1 ≤ floor ≤ cap ≤ 65535 "
                "and 0 < mass ≤ 1. Two of them were probably swapped. Fix: for example floor=4, cap=64, mass=0.99."
            )

    def cut(self, scores: DocumentScores) -> DocumentScores:
        """``scores`` with as many entries per position as this rule asks for."""
        width = int(scores.counts.max(initial=0))
        filled = np.arange(width)[None] < scores.counts[:, None]
        mass = np.zeros(filled.shape, dtype=np.float64)
        mass[filled] = np.exp(scores.logp, dtype=np.float64)
        enough = 1 + (np.cumsum(mass, axis=1) < self.mass).sum(1)
        return keep_top(scores, np.clip(enough, self.floor, self.cap))


@dataclass(frozen=True)
class FrameHeader:
    """What a frame says about itself."""

    key: bytes
    tokens: int
    entries: int
    stored: int
    raw: int
    checksum: int

    @property
    def size(self) -> int:
        """Bytes of the whole frame."""
        return FRAME.size + self.stored

    @classmethod
    def read(cls, data: bytes) -> FrameHeader | None:
        """The header at the start of ``data``; None where there is none."""
        if len(data) < FRAME.size:
            return None
        mark, key, tokens, entries, stored, raw, checksum = FRAME.unpack_from(data)
        if mark != MARK or raw > MOST_RAW_BYTES:
            return None
        return cls(key, tokens, entries, stored, raw, checksum)


def encode(key: bytes, tokens: int, scores: DocumentScores) -> bytes:
    """The frame of one document."""
    from safetensors.numpy import save

    most = int(scores.ids.max(initial=0))
    planes = {
        "k": _planes(scores.counts.astype("<u2"), 1 if scores.counts.max(initial=0) < 256 else 2),
        "ids": _planes(scores.ids.astype("<u4"), max(1, (most.bit_length() + 7) // 8)),
        "logp": _planes(scores.logp.astype("<f2"), 2),
        "log_tail": _planes(scores.log_tail.astype("<f2"), 2),
        "observed_logp": _planes(scores.observed_logp.astype("<f4"), 4),
    }
    for name in OPTIONAL_FIELDS:
        values = getattr(scores, name)
        if values is not None:
            planes[name] = _planes(values.astype("<f2"), 2)
    raw = save(planes)
    stored = _zstd().compress(raw, asbytes=True)
    start = (MARK, key, tokens, len(scores.ids), len(stored), len(raw))
    checksum = zlib.crc32(stored, zlib.crc32(FRAME.pack(*start, 0)))
    return FRAME.pack(*start, checksum) + stored


def decode(data: bytes) -> tuple[FrameHeader, DocumentScores] | None:
    """The frame at the start of ``data``; None where it is cut short or its checksum does not fit."""
    from safetensors.numpy import load

    header = FrameHeader.read(data)
    if header is None or len(data) < header.size:
        return None
    stored = data[FRAME.size : header.size]
    start = FRAME.pack(MARK, header.key, header.tokens, header.entries, header.stored, header.raw, 0)
    if zlib.crc32(stored, zlib.crc32(start)) != header.checksum:
        return None
    planes = load(_zstd().decompress(stored, decompressed_size=header.raw, asbytes=True))
    optional = {name: _whole(planes[name], "<f2").astype(np.float32) for name in planes if name in OPTIONAL_FIELDS}
    return header, DocumentScores(
        counts=_whole(planes["k"], "<u2").astype(np.int64),
        ids=_whole(planes["ids"], "<u4").astype(np.int64),
        logp=_whole(planes["logp"], "<f2").astype(np.float32),
        log_tail=_whole(planes["log_tail"], "<f2").astype(np.float32),
        observed_logp=_whole(planes["observed_logp"], "<f4"),
        **optional,
    )


def _planes(values: np.ndarray, count: int) -> np.ndarray:
    """The lowest ``count`` bytes of every little-endian value, one plane per byte."""
    raw = np.frombuffer(values.tobytes(), dtype=np.uint8).reshape(len(values), values.dtype.itemsize)
    return np.ascontiguousarray(raw[:, :count].T)


def _whole(planes: np.ndarray, dtype: str) -> np.ndarray:
    """The values whose byte planes these are."""
    full = np.zeros((planes.shape[1], np.dtype(dtype).itemsize), dtype=np.uint8)
    full[:, : len(planes)] = planes.T
    return full.reshape(-1).view(dtype)


def _zstd() -> Any:  # pyarrow ships no types
    import pyarrow

    return pyarrow.Codec("zstd")
