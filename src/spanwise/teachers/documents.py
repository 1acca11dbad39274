"""A batch of scores as separate documents, and back: how scores leave memory and find their place again.

A document is an unpacked row or one segment of a packed row. Its identity is its token ids alone, so scores taken in
one order, packing or padding serve any other. A document of n tokens has n - 1 scored positions: the last one would
speak about a token that the document does not hold. O(B·T·K) time and memory.

Shapes: B rows, T teacher length, K top-k, P scored positions of a document (tokens - 1), E entries (sum of its k's).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.teachers.scores import TeacherScores
from spanwise.teachers.teacher import ScoreRequest

OPTIONAL_FIELDS = ("entropy", "next_word_mass")


@dataclass(frozen=True)
class Document:
    """Where a document lies in a batch, and its token ids."""

    row: int
    start: int
    ids: Int[np.ndarray, " n"]

    @cached_property
    def key(self) -> bytes:
        """16 bytes that name the document: a hash of its ids."""
        return document_key(self.ids)

    def __str__(self) -> str:
        shown = ", ".join(str(token) for token in self.ids[:8].tolist())
        where = f"row {self.row} of the batch" + (f" from token {self.start}" if self.start else "")
        more = ", …" if len(self.ids) > 8 else ""
        return f"{where}, {len(self.ids)} tokens [{shown}{more}], key {self.key.hex()}"


@dataclass(frozen=True)
class DocumentScores:
    """Top-k scores of one document, ragged: position p has ``counts[p]`` entries, by falling probability.

    Attributes:
        counts: entries per position.
        ids: token ids.
        logp: their log-probabilities.
        log_tail: log of the mass not listed.
        observed_logp: log-probability of the token that follows.
        entropy: optional.
        next_word_mass: optional.
    """

    counts: Int[np.ndarray, " P"]
    ids: Int[np.ndarray, " E"]
    logp: Float[np.ndarray, " E"]
    log_tail: Float[np.ndarray, " P"]
    observed_logp: Float[np.ndarray, " P"]
    entropy: Float[np.ndarray, " P"] | None = None
    next_word_mass: Float[np.ndarray, " P"] | None = None


def document_key(ids: Int[np.ndarray, " n"]) -> bytes:
    """The identity of a document: blake2b of its ids as little-endian int32.

    >>> document_key(np.array([1, 2])) == document_key(np.array([1, 2], dtype=np.int16))
    True
    """
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype="<i4").tobytes(), digest_size=16).digest()


def documents_of(request: ScoreRequest) -> list[Document]:
    """The documents of a batch that have something to score (two tokens or more), by row and place."""
    ids = request.input_ids.cpu().numpy()
    if request.segment_ids is not None:
        segments = request.segment_ids.cpu().numpy()
        return [
            Document(row, start, ids[row, start:end])
            for row in range(len(ids))
            for start, end in _runs(segments[row])
            if end - start > 1
        ]
    mask = request.token_mask.cpu().numpy() != 0
    lengths = mask.sum(1)
    if not np.array_equal(mask, np.arange(mask.shape[1])[None] < lengths[:, None]):
        row = int(np.flatnonzero((mask != (np.arange(mask.shape[1])[None] < lengths[:, None])).any(1))[0])
        raise ValueError(
            f"row {row} has padding before or between its tokens; expected padding on the right only. The tokenizer "
            "probably pads on the left. Fix: set padding_side='right' in the collator."
        )
    return [Document(row, 0, ids[row, :length]) for row, length in enumerate(lengths.tolist()) if length > 1]


def _runs(segments: Int[np.ndarray, " T"]) -> list[tuple[int, int]]:
    """Ranges of equal, non-zero segment id."""
    edges = np.flatnonzero(np.diff(segments)) + 1
    starts = [0, *edges.tolist()]
    ends = [*edges.tolist(), len(segments)]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if end > start and segments[start] > 0]


def split_scores(documents: Sequence[Document], scores: TeacherScores) -> list[DocumentScores]:
    """The top-k scores of a batch, one per document.

    Args:
        documents: of the batch that was scored.
        scores: in top-k form, with ``observed_logp``.
    """
    if scores.top_ids is None or scores.top_logp is None or scores.log_tail is None or scores.observed_logp is None:
        raise ValueError(
            f"scores of the form '{scores.form}'{'' if scores.observed_logp is not None else ' without observed_logp'} "
            "cannot be kept per document; expected top-k scores with statistics. The teacher was probably asked for "
            "dense logits. Fix: build the request with top_k=… and statistics=True."
        )
    ids, logp, tail, observed = (
        tensor.detach().cpu().numpy()
        for tensor in (scores.top_ids, scores.top_logp, scores.log_tail, scores.observed_logp)
    )
    extra = {name: _numpy(getattr(scores, name)) for name in OPTIONAL_FIELDS}
    result = []
    for document in documents:
        place = (document.row, slice(document.start, document.start + len(document.ids) - 1))
        listed = ids[place] >= 0
        result.append(
            DocumentScores(
                counts=listed.sum(1),
                ids=ids[place][listed],
                logp=logp[place][listed].astype(np.float32),
                log_tail=tail[place].astype(np.float32),
                observed_logp=observed[place].astype(np.float32),
                **{name: None if value is None else value[place].astype(np.float32) for name, value in extra.items()},
            )
        )
    return result


def join_scores(
    request: ScoreRequest,
    documents: Sequence[Document],
    parts: Sequence[DocumentScores],
    *,
    temperature: float,
) -> TeacherScores:
    """Lay the scores of documents back into the shape of a batch, on the request's device.

    Positions outside the documents, and the last of each, have no entries and all their mass in the tail.
    """
    rows, length = request.input_ids.shape
    counts = np.zeros((rows, length), dtype=np.int64)
    planes: dict[str, np.ndarray] = {}
    for name in ("log_tail", "observed_logp", *OPTIONAL_FIELDS):
        if all(getattr(part, name) is not None for part in parts):
            planes[name] = np.zeros((rows, length), dtype=np.float32)
    for document, part in zip(documents, parts, strict=True):
        place = (document.row, slice(document.start, document.start + len(document.ids) - 1))
        counts[place] = part.counts
        for name, plane in planes.items():
            plane[place] = getattr(part, name)
    width = max(int(counts.max(initial=0)), 1)
    top_ids = np.full((rows, length, width), -1, dtype=np.int64)
    top_logp = np.full((rows, length, width), -np.inf, dtype=np.float32)
    if parts:
        # Boolean assignment walks positions in row-major order, as the documents are ordered.
        filled = np.arange(width)[None, None] < counts[..., None]
        top_ids[filled] = np.concatenate([part.ids for part in parts])
        top_logp[filled] = np.concatenate([part.logp for part in parts])
    device = request.input_ids.device
    tensors: Mapping[str, Tensor] = {name: torch.from_numpy(plane).to(device) for name, plane in planes.items()}
    max_probability = np.where(counts > 0, np.exp(top_logp[..., 0]), 0.0).astype(np.float32)
    return TeacherScores(
        top_ids=torch.from_numpy(top_ids).to(device),
        top_logp=torch.from_numpy(top_logp).to(device),
        max_probability=torch.from_numpy(max_probability).to(device),
        temperature=temperature,
        **tensors,
    )


def keep_top(scores: DocumentScores, k: Int[np.ndarray, " P"]) -> DocumentScores:
    """The same scores with at most ``k[p]`` entries at position p; what is dropped joins the tail."""
    if (k >= scores.counts).all():
        return scores
    position = np.repeat(np.arange(len(scores.counts)), scores.counts)
    rank = np.arange(len(position)) - np.repeat(np.cumsum(scores.counts) - scores.counts, scores.counts)
    kept = rank < k[position]
    dropped = np.bincount(position[~kept], np.exp(scores.logp[~kept], dtype=np.float64), minlength=len(scores.counts))
    with np.errstate(divide="ignore"):
        tail = np.log(np.exp(scores.log_tail, dtype=np.float64) + dropped)
    return DocumentScores(
        counts=np.minimum(scores.counts, k),
        ids=scores.ids[kept],
        logp=scores.logp[kept],
        log_tail=tail.astype(np.float32),
        observed_logp=scores.observed_logp,
        entropy=scores.entropy,
        next_word_mass=scores.next_word_mass,
    )


def _numpy(tensor: Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.detach().cpu().numpy()
