"""Rows become documents: the tokens of every side, what of them belongs together, and what the student is trained on.

One :class:`Reader` serves all batches of a collator. What a tokenizer is asked to do is only what its owner would do
with it; tables for chats, completions and ids are made on first use. O(tokens) beyond tokenizing.

Sides: 0 is the student, 1… the teachers that have tokens of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from spanwise.spans.chat import AssistantSpans
from spanwise.spans.encode import inserted_ids
from spanwise.spans.fold import Flags
from spanwise.spans.locate import LocatedTokens
from spanwise.spans.profile import Profile, profile_of
from spanwise.spans.table import TokenTable, token_table
from spanwise.xtoken.chat_rows import chat_segments, render_chat
from spanwise.xtoken.rows import Document, read_row
from spanwise.xtoken.segments import Segment
from spanwise.xtoken.tokenizing import end_id

Tokenize = Callable[[list[str], Any, int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Encoded:
    """A document as every side sees it.

    Attributes:
        ids: tokens per side.
        segments: per teacher side (from 1 on), what is aligned; index 0 is empty.
        trained: bool [student tokens], or None: all of them.
        loss_multiplier: the row's weight.
        index: the row's ``idx``.
        unfound: nothing of the text was found again in the student's tokens, so there is nothing to train on.
    """

    ids: list[list[int]]
    segments: list[list[Segment]]
    trained: Flags | None
    loss_multiplier: float
    index: Any
    unfound: bool = False


class Reader:
    """Reads rows for a student and its teachers.

    Args:
        tokenizers: one per side.
        tables: their token tables where they are known already, else None.
        lengths: most tokens per side.
        tokenize: texts, tokenizer, length, divisor → ids and mask.
        append_eos: end every text with EOS.
        whole: read one token more than fits, so that a document that does not fit can be told from one that does.
    """

    def __init__(
        self,
        tokenizers: Sequence[Any],
        tables: Sequence[TokenTable | None],
        lengths: Sequence[int],
        *,
        tokenize: Tokenize,
        append_eos: bool,
        whole: bool,
    ) -> None:
        self.tokenizers = list(tokenizers)
        self.tables = list(tables)
        self.lengths = [length + whole for length in lengths]
        self.tokenize = tokenize
        self.append_eos = append_eos
        self._profiles: dict[int, Profile] = {}
        self._spans = [AssistantSpans(tokenizer) for tokenizer in tokenizers]

    def __getstate__(self) -> dict[str, Any]:
        """Without the profiles, which are soon made again."""
        return self.__dict__ | {"_profiles": {}}

    def read(self, rows: Sequence[Any]) -> list[Encoded]:
        """All documents of a batch, in order."""
        documents = [read_row(row, place, self._spell) for place, row in enumerate(rows)]
        plain = [place for place, document in enumerate(documents) if document.messages is None]
        ids: list[list[list[int]]] = [[] for _ in documents]
        for side in range(len(self.tokenizers)):
            for place, tokens in zip(plain, self._tokens([documents[p] for p in plain], side), strict=True):
                ids[place].append(tokens)
        return [
            self._chat(document) if document.messages is not None else self._text(document, tokens)
            for document, tokens in zip(documents, ids, strict=True)
        ]

    def _tokens(self, documents: list[Document], side: int) -> list[list[int]]:
        length, tokenizer = self.lengths[side], self.tokenizers[side]
        given = [document.student_ids if side == 0 else None for document in documents]
        texts = [document.text for document, ids in zip(documents, given, strict=True) if ids is None]
        rows: list[list[int]] = []
        if texts:
            table, mask = self.tokenize(texts, tokenizer, length, 1)
            sizes = mask.sum(dim=1).tolist()
            rows = [row[:size] for row, size in zip(table.tolist(), sizes, strict=True)]
        fresh = iter(rows)
        kept = slice(-length, None) if getattr(tokenizer, "truncation_side", "right") == "left" else slice(length)
        tokens = [next(fresh) if ids is None else list(ids[kept]) for ids in given]
        ended = [
            mine
            for document, mine in zip(documents, tokens, strict=True)
            if self._ends(document) and len(mine) < length
        ]
        end = end_id(tokenizer) if ended else None
        if ended and end not in inserted_ids(tokenizer)[1]:
            for mine in ended:
                mine += [end] * (mine[-1:] != [end])  # a text may spell its end out
        return tokens

    def _ends(self, document: Document) -> bool:
        return self.append_eos or document.completion_start is not None

    def _text(self, document: Document, ids: list[list[int]]) -> Encoded:
        trained, unfound = None, False
        if document.completion_start is not None:
            mine = ids[0]
            eos = bool(mine) and mine[-1] == end_id(self.tokenizers[0])
            spelled = np.array(mine[:-1] if eos else mine, dtype=np.int64)
            located = LocatedTokens(document.text, spelled, self.profile(0))
            # A tokenizer that writes the end itself writes it behind a text that it cut, too: no end to learn from.
            ended = len(mine) < self.lengths[0] or located.whole
            trained = located.inside(document.completion_start, len(document.text))
            trained, unfound = np.append(trained, np.full(int(eos), ended)), not located.found
        whole = [Segment((0, len(ids[0])), (0, len(theirs)), text=document.text) for theirs in ids[1:]]
        segments: list[list[Segment]] = [[], *([segment] for segment in whole)]
        return Encoded(ids, segments, trained, document.loss_multiplier, document.index, unfound)

    def _chat(self, document: Document) -> Encoded:
        sides = [
            render_chat(self._spans[side], document, self.lengths[side], self.profile(side))
            for side in range(len(self.tokenizers))
        ]
        segments = [[], *(chat_segments(document.messages or [], sides[0], teacher) for teacher in sides[1:])]
        ids = [side.ids for side in sides]
        unfound = not sides[0].located.found
        return Encoded(ids, segments, sides[0].trained, document.loss_multiplier, document.index, unfound)

    def profile(self, side: int) -> Profile:
        """How a side's tokens are read."""
        if side not in self._profiles:
            table = self.tables[side]
            if table is None:
                table = self.tables[side] = token_table(self.tokenizers[side])
            self._profiles[side] = profile_of(self.tokenizers[side], table)
        return self._profiles[side]

    def _spell(self, ids: Sequence[int], place: int) -> str:
        """The text of a student's ids: their bytes without control tokens at the edges and without a dummy prefix."""
        profile = self.profile(0)
        tokens = np.array(ids, dtype=np.int64)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < profile.table.size:
            raise ValueError(
                f"input_ids of row {place} reach from {tokens.min()} to {tokens.max()}; expected 0 to "
                f"{profile.table.size - 1}, the ids of the student's tokenizer. They were probably made by another "
                "tokenizer or hold padding such as -100. Fix: tokenize with the student's tokenizer, without padding."
            )
        if profile.table.kind == "wordpiece" or not profile.known[tokens].all():
            why = "its pieces leave out blanks" if profile.table.kind == "wordpiece" else "some are the unknown token"
            raise ValueError(
                f"input_ids of row {place} cannot be read back ({why}); expected ids that spell their text, since the "
                "teachers tokenize it. The student's tokenizer is probably of a kind that rewrites what it reads. "
                "Fix: pass 'text' instead of 'input_ids'."
            )
        text = np.flatnonzero(~profile.special[tokens])
        core = tokens[text[0] : text[-1] + 1] if len(text) else tokens[:0]
        spelled = profile.table.join(core.tolist())
        if profile.dummy != "none":
            spelled = spelled.removeprefix(b" ")
        try:
            return spelled.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"input_ids of row {place} spell bytes that are no UTF-8 (byte {error.start}: "
                f"{spelled[error.start : error.start + 4]!r}); expected ids of a whole text, since the teachers "
                "tokenize it. The ids were probably cut inside a character. Fix: cut documents between characters, or "
                "pass 'text'."
            ) from error
