"""Place WordPiece-like tokens on the bytes of a known text by the offsets that their tokenizer reports.

Such pieces do not spell their text: case, accents and spaces are gone. So the text is encoded again; if that gives the
ids at hand, every token's offsets are taken, and believed only where the text there is, letter for letter, the piece.
Spaces between tokens belong to no token. Everything else is a gap, about which nothing is claimed.

One row, O(tokens) with a loop: these tokenizers are rare in distillation and never on the fast path.

Shapes: n tokens of one side, N bytes of the text.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spanwise.spans.encode import whole_texts
from spanwise.spans.fold import Positions
from spanwise.spans.placing import CANONICAL, FAILED, RESYNC, PlacedRow, Reconciled
from spanwise.spans.profile import Profile
from spanwise.spans.reconcile import UNKNOWN_MARKS, Reading, RowSide


def placed_by_offsets(
    text: str, ids: tuple[Positions, Positions], profiles: tuple[Profile, Profile], tokenizers: tuple[Any, Any]
) -> Reconciled:
    """Both sides of a row on the bytes of ``text``, one of them WordPiece-like and one whose bytes are the text."""
    whole = text.encode()
    rows: list[PlacedRow] = []
    gaps: set[int] = set()
    believed = True
    for number, (mine, profile, tokenizer) in enumerate(zip(ids, profiles, tokenizers, strict=True)):
        if profile.table.kind == "wordpiece":
            placed, unknown = _by_offsets(text, whole, mine, profile, tokenizer)
            gaps |= unknown
        else:
            placed = _by_bytes(whole, RowSide(mine, profile, UNKNOWN_MARKS[number]))
        believed = believed and placed is not None
        rows.append(placed or _nowhere(len(mine)))
    if not believed:
        return Reconciled(_nowhere(len(ids[0])), _nowhere(len(ids[1])), 1, [0], FAILED)
    return Reconciled(rows[0], rows[1], len(whole), sorted(gaps), RESYNC if gaps else CANONICAL)


def _nowhere(size: int) -> PlacedRow:
    flags = np.zeros(size, dtype=bool)
    return PlacedRow(np.zeros(size, dtype=np.int64), np.full(size, -1, dtype=np.int64), flags, 0, flags)


def _by_bytes(whole: bytes, side: RowSide) -> PlacedRow | None:
    """The side whose pieces spell the text, if they do."""
    side.other_dummy, side.other_specials = "none", ()
    for reading in side.readings():
        folded = side.folded(Reading(reading.lead, reading.trail), 0)
        if whole.startswith(folded.content) and not side.unknown.any():
            return folded.placed((0, len(folded.content)))
    return None


def _by_offsets(
    text: str, whole: bytes, ids: Positions, profile: Profile, tokenizer: Any
) -> tuple[PlacedRow | None, set[int]]:
    """The WordPiece side, and the byte positions about which it says nothing."""
    spans = _spans(text, ids, tokenizer)
    if spans is None:
        return None, set()
    byte_at = np.concatenate([[0], np.cumsum([len(character.encode()) for character in text])]).astype(np.int64)
    start, end = np.zeros(len(ids), dtype=np.int64), np.zeros(len(ids), dtype=np.int64)
    inserted = np.zeros(len(ids), dtype=bool)
    gaps: set[int] = set()
    reached = 0
    for token, (first, last) in enumerate(spans):
        low, high = int(byte_at[first]), int(byte_at[last])
        inserted[token] = first == last
        low, high = (reached, reached) if first == last else (max(low, reached), max(high, reached))
        if low > reached:
            gaps.add(reached)
        start[token], end[token] = low, high
        content = profile.table.bytes_of(int(ids[token]))
        if first != last and (not profile.known[ids[token]] or whole[low:high] != content):
            gaps.add(low)
        reached = high
    if reached < len(whole):
        gaps.add(reached)
    return PlacedRow(start, end, inserted, 0, np.ones(len(ids), dtype=bool)), gaps


def _spans(text: str, ids: Positions, tokenizer: Any) -> list[tuple[int, int]] | None:
    """Character offsets of the ids, if the tokenizer makes these ids of the text (or their beginning)."""
    wanted = ids.tolist()
    with whole_texts(tokenizer) as backend:
        for add_special_tokens in (True, False) if backend is not None else ():
            encoding = backend.encode(text, add_special_tokens=add_special_tokens)
            if encoding.ids[: len(wanted)] == wanted:
                return list(encoding.offsets[: len(wanted)])
    return None
