"""Where the tokens of a known text lie in it: which of them are wholly inside given characters.

The text's own bytes are taken for a second tokenizer, one token per byte, and the two are placed on one axis as any two
tokenizers are; so NFC, ▁, dummy prefixes, control tokens and cuts need nothing of their own here. O(bytes).

Shapes: n tokens, N bytes of the text, K spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from spanwise.spans.fold import Flags, Positions, byte_offsets, swallowed_blanks
from spanwise.spans.placing import FAILED
from spanwise.spans.profile import Profile
from spanwise.spans.reconcile import UNKNOWN_MARKS, RowSide, reconcile
from spanwise.spans.table import TokenTable


class LocatedTokens:
    """The tokens of one row on the bytes of its text.

    Args:
        text: what was tokenized, as it was given to the tokenizer.
        ids: int64 [n]; they may end before the text does.
        profile: the tokenizer's.

    Attributes:
        found: something of the text was found again in the tokens, or there are none.
        whole: the tokens certainly go on to the end of the text: nothing was cut.
    """

    def __init__(self, text: str, ids: Positions, profile: Profile) -> None:
        whole = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
        tokens = RowSide(ids, profile, UNKNOWN_MARKS[1])
        found = reconcile(RowSide(whole, _bytes_profile(), UNKNOWN_MARKS[0]), tokens)
        self._character_at = byte_offsets(text)
        own_end = found.student.end[-1] if len(whole) else 0
        self._axis = np.append(found.student.start, own_end if own_end >= 0 else found.length)
        self._exact = np.concatenate([[True], found.student.end >= 0])
        self._toward = np.zeros(len(self._axis), dtype=np.int8)
        for first, last, word, word_end in swallowed_blanks(text.encode(), tokens.stripping()).T.tolist():
            self._toward[first + 1 : word + 1], self._toward[word_end:last] = -1, 1
        self._start = found.teacher.start
        self._end = np.append(found.teacher.start[1:], found.length)
        known = found.teacher.end >= 0
        self._end[known] = found.teacher.end[known]
        self._inserted = found.teacher.inserted
        gaps = np.array(found.gaps, dtype=np.int64)
        touched = np.searchsorted(gaps, self._end, side="left") > np.searchsorted(gaps, self._start, side="left")
        self._sure = ~touched
        self.found = found.quality != FAILED or not len(ids)
        self.whole = self.found and (int(found.teacher.end[-1]) if len(ids) else 0) >= int(self._axis[-1])

    def inside(self, start: int, end: int) -> Flags:
        """bool [n]: the token's characters lie wholly in ``[start, end)`` of the text. Inserted tokens do not."""
        low, high = self._edge(start, 1), self._edge(end, -1)
        held = (self._start >= low) & (self._end <= high) & (self._end > self._start)
        return held & self._sure & ~self._inserted

    def covers(self, start: int, end: int, tokens: tuple[int, int]) -> tuple[bool, bool]:
        """Whether a run of tokens begins exactly at ``start``, and ends exactly at ``end``."""
        first, last = tokens
        low, high = self._edge(start, 1), self._edge(end, -1)
        return bool(self._start[first] == low), bool(self._end[last - 1] == high)

    def _edge(self, character: int, step: int) -> int:
        """A character on the axis; one inside a unit that normalisation changed moves out of it, by ``step``.

        Blanks that a control token swallowed are nobody's: a place among them moves to the token's other edge.
        """
        place = int(self._character_at[character])
        step = int(self._toward[place]) or step
        while 0 < place < len(self._axis) - 1 and not self._exact[place]:
            place += step
        return int(self._axis[place])


def span_of(flags: Flags) -> tuple[int, int]:
    """Half-open range of the true entries, which are neighbours; (0, 0) where there is none.

    >>> span_of(np.array([False, True, True, False]))
    (1, 3)
    """
    true = np.flatnonzero(flags)
    return (int(true[0]), int(true[-1]) + 1) if len(true) else (0, 0)


def inside_any(located: LocatedTokens, spans: Sequence[tuple[int, int]], size: int) -> Flags:
    """bool [n]: wholly inside one of K spans of characters."""
    flags = np.zeros(size, dtype=bool)
    for start, end in spans:
        flags |= located.inside(start, end)
    return flags


@cache
def _bytes_profile() -> Profile:
    """A tokenizer whose ids are bytes."""
    no, yes = torch.zeros(256, dtype=torch.bool), torch.ones(256, dtype=torch.bool)
    table = TokenTable("plain", torch.arange(256, dtype=torch.uint8), torch.arange(257), no, yes, "bytes")
    nothing = np.zeros(256, dtype=np.int8)
    return Profile(table, "none", False, nothing, nothing, np.ones(256, dtype=np.int64))
