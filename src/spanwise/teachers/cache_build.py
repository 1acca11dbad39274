"""Run a teacher once over a text and keep what it says.

One forward per batch that holds something new; what an earlier, interrupted run kept whole is not scored again. Memory
is the teacher's plus one batch of its scores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from spanwise.teachers.cache_store import CacheIdentity
from spanwise.teachers.cache_writer import CacheWriter
from spanwise.teachers.documents import documents_of, split_scores
from spanwise.teachers.teacher import ScoreRequest, Teacher


@dataclass(frozen=True)
class CacheProgress:
    """How far a cache is.

    Attributes:
        done: documents seen in this run.
        total: documents in all, where known.
        new_tokens: tokens scored in this run.
        seconds: since its start.
        bytes_per_token: on the disk so far.
    """

    done: int
    total: int | None
    new_tokens: int
    seconds: float
    bytes_per_token: float

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the pace of this run; None where the total is unknown."""
        return None if self.total is None or not self.done else self.seconds / self.done * (self.total - self.done)

    def __str__(self) -> str:
        of = "" if self.total is None else f" of {self.total:,}"
        left = "" if self.seconds_left is None else f", {_duration(self.seconds_left)} left"
        size = f", {self.bytes_per_token:.1f} bytes per token" if self.bytes_per_token else ""
        pace = self.new_tokens / max(self.seconds, 1e-9)
        return f"{self.done:,}{of} documents, {pace:,.0f} tokens/s{left}{size}"


def build_cache(
    teacher: Teacher,
    requests: Iterable[ScoreRequest],
    path: str | os.PathLike[str],
    *,
    identity: CacheIdentity,
    word_start: Bool[Tensor, " V"] | None = None,
    total: int | None = None,
    report: Callable[[CacheProgress], None] | None = None,
    shard_bytes: int = 64 << 20,
) -> dict[str, Any]:
    """Score every document of ``requests`` that the cache at ``path`` does not hold, and finish it.

    Args:
        teacher: anything that returns top-k scores.
        requests: batches; only their ids, mask and segments are read. Temperature and k are the identity's.
        path: folder of the cache, new or begun.
        identity: whose scores, and how many are kept.
        word_start: ids that start a word or end the text; needed when the identity's fields name next_word_mass.
        total: documents in all, for the estimate of what is left.
        report: called after every batch.
        shard_bytes: size from which a shard is sealed.

    Returns:
        The numbers of the header: documents, tokens, bytes, bytes_per_token, mean_k, largest_k, mean_tail_mass,
        largest_tail_mass.
    """
    if ("next_word_mass" in identity.fields) != (word_start is not None):
        raise ValueError(
            f"the cache keeps {', '.join(identity.fields)} and word_start was "
            f"{'left out' if word_start is None else 'given'}; expected word_start exactly "
            "where next_word_mass is kept. One of the two was probably left out. Fix: give both or neither."
        )
    begun, done, new_tokens = time.monotonic(), 0, 0
    with CacheWriter(path, identity, shard_bytes=shard_bytes) as writer:
        for request in requests:
            documents = documents_of(request)
            # All of a batch or nothing of it: what a row gets depends, in its last bits, on the batch it is scored in,
            # and a cache is to be the same wherever an earlier run was cut off.
            if any(document.key not in writer for document in documents):
                scores = teacher.score(wanted_of(request, identity, word_start))
                for document, part in zip(documents, split_scores(documents, scores), strict=True):
                    new_tokens += writer.add(document, part)
            done += len(documents)
            if report is not None:
                report(CacheProgress(done, total, new_tokens, time.monotonic() - begun, writer.bytes_per_token))
        return writer.finish()


def wanted_of(
    request: ScoreRequest, identity: CacheIdentity, word_start: Bool[Tensor, " V"] | None = None
) -> ScoreRequest:
    """What a teacher is asked about a batch for a cache of this identity."""
    return replace(
        request,
        temperature=identity.temperature,
        top_k=min(identity.k.cap, identity.vocab_size),
        shared_ids=None,
        statistics=True,
        word_start=word_start,
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
