"""A teacher on disk: scores that were taken once, read back for any batch order, packing or padding.

Reading decodes about a million tokens a second on one core and keeps nothing, so memory is that of one batch whatever
the size of the cache. The model itself is not needed.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np

from spanwise.teachers.cache_frame import CacheError
from spanwise.teachers.cache_store import CacheReader
from spanwise.teachers.documents import DocumentScores, documents_of, join_scores, keep_top
from spanwise.teachers.precision import Precision
from spanwise.teachers.scores import Form, TeacherScores
from spanwise.teachers.teacher import ScoreRequest

logger = logging.getLogger(__name__)


class CachedTeacher:
    """Scores rows from a finished cache.

    Args:
        path: folder of the cache.
        tokenizer: fingerprint of the tokenizer that makes the rows; another one than the cache's is refused.
        teacher: fingerprint of the model whose scores are expected; another one is refused.

    Where the request names no ``top_k``, all that the cache keeps is returned.
    """

    forms: frozenset[Form] = frozenset({"topk", "observed"})

    def __init__(
        self, path: str | os.PathLike[str], *, tokenizer: str | None = None, teacher: str | None = None
    ) -> None:
        self._reader = CacheReader(Path(path))
        self.manifest = self._reader.manifest
        self.identity = self.manifest.identity
        self.name = self.identity.name
        self.vocab_size = self.identity.vocab_size
        self.context_length = self.identity.context_length
        for what, wanted, found, shown in (
            ("tokenizer", tokenizer, self.identity.tokenizer, self.identity.tokenizer),
            ("teacher", teacher, self.identity.teacher, f"{self.identity.teacher} ({self.name})"),
        ):
            if wanted is not None and wanted != found:
                self._reader.close()
                raise CacheError(
                    f"the cache at '{path}' was made with the {what} {shown} and this run has the {what} {wanted}; "
                    f"expected one {what}. The recipe was probably changed after the cache was built. "
                    f"Fix: name the {what} the cache was built with, or build another cache: spanwise cache RECIPE."
                )

        held = self.manifest.summary()
        logger.info(
            "%s (fingerprint %s) from '%s': %d documents, %d tokens, mean k %.1f, mean tail mass %.3f, largest %.3f",
            self.name,
            self.identity.teacher,
            path,
            held["documents"],
            held["tokens"],
            held["mean_k"],
            held["mean_tail_mass"],
            held["largest_tail_mass"],
        )

    def score(self, request: ScoreRequest) -> TeacherScores:
        """Read the documents of a batch; one that the cache lacks is an error that names it."""
        refuse_what_topk_lacks(request, self.name, self.identity.temperature, self.identity.fields)
        documents = documents_of(request)
        parts: list[DocumentScores] = []
        for document in documents:
            part = self._reader.read(document.key)
            if part is None:
                raise CacheError(
                    f"the cache at '{self._reader.folder}' has no scores for {document}; expected every document of "
                    "the training text. The text, the context length or the tokenizer's options are probably not those "
                    "the cache was built with. Fix: build it from this recipe: spanwise cache RECIPE."
                )
            if len(part.counts) != len(document.ids) - 1:
                raise CacheError(
                    f"the cache at '{self._reader.folder}' has {len(part.counts)} positions for {document}; expected "
                    f"{len(document.ids) - 1}. The file was probably put together by hand. Fix: build the cache again."
                )
            parts.append(part if request.top_k is None else keep_top(part, np.full(len(part.counts), request.top_k)))
        return join_scores(request, documents, parts, temperature=self.identity.temperature)

    def precision(self) -> Precision:
        """What the whole cache holds of the teacher's distributions."""
        held = self.manifest.summary()
        numbers = (held["mean_k"], held["mean_tail_mass"], held["largest_tail_mass"])
        return Precision(self.name, self.identity.teacher, *numbers)

    def verify(self) -> None:
        """Read the whole cache once and compare the checksum of every shard."""
        self._reader.verify()

    def close(self) -> None:
        """Close the files."""
        self._reader.close()


def refuse_what_topk_lacks(request: ScoreRequest, name: str, temperature: float, fields: tuple[str, ...]) -> None:
    """Say by name what a source of top-k scores cannot give."""
    if request.temperature != temperature:
        raise ValueError(
            f"scores at temperature {request.temperature:g} were asked of {name}, which has them at {temperature:g}; "
            "expected equal temperatures, since the mass of what top-k leaves out is known at one only. The loss's "
            f"temperature was probably changed. Fix: set loss.temperature to {temperature:g}, or build a cache at "
            f"{request.temperature:g} from a local model."
        )
    if request.shared_ids is not None:
        raise ValueError(
            f"the logits of a shared set of ids were asked of {name}, which has top-k scores; expected a teacher in "
            "this process or in another one on this machine. Fix: ask it for top-k scores; projected_kl takes them."
        )
    if request.word_start is not None and "next_word_mass" not in fields:
        raise ValueError(
            f"the probability that the next token starts a word was asked of {name}, which has "
            f"{', '.join(fields) or 'no statistics'}; expected next_word_mass among them. The cache was probably built "
            "for another loss, or the teacher is a server, which cannot say it. Fix: turn the loss's debiasing off, or "
            "build the cache with word starts."
        )
