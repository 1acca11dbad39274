"""What a teacher is: something that scores rows of its own tokens.

Where the scores come from (a model in this process, a file, a server, another process) is the teacher's business; a
loss and a trainer see only :class:`ScoreRequest` and TeacherScores.

Shapes: B rows, T teacher length, D documents, k ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from spanwise.teachers.scores import Form, TeacherScores


@dataclass(frozen=True)
class SharedPick:
    """What of the scores a loss will read that compares one set of tokens per document (projected KL).

    A teacher far away picks the sets and sends their columns, with values identical to the dense form; one nearby may
    ignore it.

    Attributes:
        rows: the positions that are read, counted through the batch (row · T + position).
        owner: the document of each.
        documents: D.
        k: size of a set.
    """

    rows: Int[Tensor, " N"]
    owner: Int[Tensor, " N"]
    documents: int
    k: int


@dataclass(frozen=True)
class ScoreRequest:
    """One batch to be scored.

    Attributes:
        input_ids: the teacher's tokens, padded on the right.
        token_mask: non-zero on real tokens.
        segment_ids: of a packed batch (0 = padding, 1…n within a row); documents must not see each other.
        temperature: at which truncated scores and statistics are taken.
        top_k: how many tokens per position; None asks for everything (dense logits).
        shared_ids: sorted ids per document; asks for these columns only.
        statistics: also fill observed log-probability, entropy and maximum probability.
        word_start: ids that start a word or end the text; asks for next_word_mass beside the statistics.
        pick: what will be read of a dense answer, for a teacher that would rather not send all of it.
    """

    input_ids: Int[Tensor, "B T"]
    token_mask: Int[Tensor, "B T"]
    segment_ids: Int[Tensor, "B T"] | None = None
    temperature: float = 1.0
    top_k: int | None = None
    shared_ids: Int[Tensor, "D k"] | None = None
    statistics: bool = False
    word_start: Bool[Tensor, " V"] | None = None
    pick: SharedPick | None = None


@runtime_checkable
class Teacher(Protocol):
    """A source of scores.

    Attributes:
        name: for logs and reports.
        vocab_size: size of the teacher's tokenizer; scores are about ids below it.
        forms: the forms that ``score`` can return; a loss that needs another one says so before the run.
    """

    name: str
    vocab_size: int
    forms: frozenset[Form]

    def score(self, request: ScoreRequest) -> TeacherScores:
        """Score a batch: entry t speaks about token t + 1. The result lies on the request's device."""
        ...

    def close(self) -> None:
        """Free what the teacher holds (a process, a connection, an open file). Closing twice is harmless."""
        ...


@runtime_checkable
class Bounded(Protocol):
    """A teacher that knows how long its rows may be.

    Attributes:
        context_length: tokens of a row that it can read, of a cache those that it was built with; None: any.
    """

    context_length: int | None


@runtime_checkable
class AskedAhead(Protocol):
    """A teacher that gains from hearing of a request before its scores are needed."""

    def announce(self, request: ScoreRequest) -> None:
        """``score`` will be called with this request, in the order of the announcements."""
        ...


def request_from_batch(
    batch: Mapping[str, Any],
    prefix: str,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    statistics: bool = False,
    word_start: Bool[Tensor, " V"] | None = None,
) -> ScoreRequest:
    """The request that a collated batch holds for the teacher under ``prefix`` (``teacher_`` or ``teacher_{i}_``)."""
    ids: Tensor = batch[f"{prefix}input_ids"]
    return ScoreRequest(
        input_ids=ids,
        token_mask=batch[f"{prefix}token_mask"].to(torch.long),
        segment_ids=batch.get(f"{prefix}segment_ids"),
        temperature=temperature,
        top_k=top_k,
        statistics=statistics,
        word_start=word_start,
    )
