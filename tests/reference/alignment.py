"""The oracle of alignment: where every token lies in a text, the slow and obvious way.

It reads pieces by itself, never asks a tokenizer for offsets, and moves boundaries across NFC by trying every prefix of
the text. It knows byte-level and SentencePiece tokenizers, with or without NFC and a dummy prefix.
"""

from __future__ import annotations

import json
import re
import unicodedata
from functools import cache
from typing import Any

Span = tuple[int, int]


@cache
def _traits(tokenizer: Any) -> tuple[bool, bool]:
    """(byte-level, NFC) from the tokenizer's own description."""
    head = tokenizer.backend_tokenizer.to_str().split(',"model":{')[0]
    state = json.loads(head + "}")
    return '"ByteLevel"' in json.dumps(state["decoder"]), '"NFC"' in json.dumps(state["normalizer"])


@cache
def _added(tokenizer: Any) -> dict[int, Any]:
    return tokenizer.added_tokens_decoder


def is_nfc(tokenizer: Any) -> bool:
    return _traits(tokenizer)[1]


@cache
def _byte_letters() -> dict[str, int]:
    table, extra = {}, 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            table[chr(byte)] = byte
        else:
            table[chr(256 + extra)] = byte
            extra += 1
    return table


def piece_bytes(tokenizer: Any, token_id: int) -> bytes:
    """What one id spells."""
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if token_id in _added(tokenizer):
        special = _added(tokenizer)[token_id].special
        return (piece if special or _traits(tokenizer)[0] else piece.replace("▁", " ")).encode()
    if _traits(tokenizer)[0]:
        return bytes(_byte_letters()[letter] for letter in piece)
    fallback = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    return bytes([int(fallback[1], 16)]) if fallback else piece.replace("▁", " ").encode()


def spans(tokenizer: Any, text: str, ids: list[int], leading: int = 0) -> list[Span]:
    """Byte spans of ``ids`` in what the tokenizer sees of ``text``: its NFC for tokenizers that compose.

    ``leading`` tokens were inserted before the text. Spaces that a dummy prefix put in count for nothing. Raises
    AssertionError if the ids do not spell the text: the oracle does not guess.
    """
    seen = (unicodedata.normalize("NFC", text) if is_nfc(tokenizer) else text).encode()
    found: list[Span] = [(0, 0)] * leading
    at, fresh = 0, True
    for token_id in ids[leading:]:
        content, start = piece_bytes(tokenizer, token_id), at
        rest = seen[at:].replace(b"\xe2\x96\x81", b" ")[: len(content)] if b"\xe2\x96\x81" in seen[at:] else b""
        if seen.startswith(content, at):
            at += len(content)
        elif rest and not _traits(tokenizer)[0] and rest.startswith(content):
            at += _stretched(seen[at:], len(content))
        else:
            assert fresh, (text, content, seen[at : at + 20])
            assert content.startswith(b" "), (text, content, seen[at : at + 20])
            folded = seen[at:].replace(b"\xe2\x96\x81", b" ")
            assert folded.startswith(content[1:]) or seen.startswith(content[1:], at)
            at += len(content) - 1 if seen.startswith(content[1:], at) else _stretched(seen[at:], len(content) - 1)
        found.append((start, at))
        fresh = token_id in _added(tokenizer) and _added(tokenizer)[token_id].special
    return found


def _stretched(seen: bytes, folded_length: int) -> int:
    """How many bytes of ``seen`` make ``folded_length`` bytes once ▁ is a space."""
    for size in range(len(seen) + 1):
        if len(seen[:size].replace(b"\xe2\x96\x81", b" ")) == folded_length and not seen[:size].endswith(
            (b"\xe2", b"\xe2\x96")
        ):
            return size
    raise AssertionError("no such prefix")


def to_nfc(text: str, position: int) -> int | None:
    """Where a byte position of ``text`` lies in NFC(text); None if it has no counterpart."""
    raw, whole = text.encode(), unicodedata.normalize("NFC", text)
    try:
        before, after = raw[:position].decode(), raw[position:].decode()
    except UnicodeDecodeError:
        low = position
        while raw[low] & 0xC0 == 0x80:
            low -= 1
        character = raw[low:].decode(errors="ignore")[0]
        start, end = to_nfc(text, low), to_nfc(text, low + len(character.encode()))
        if start is None or end is None or whole.encode()[start:end] != character.encode():
            return None
        return start + position - low
    left = unicodedata.normalize("NFC", before)
    return len(left.encode()) if left + unicodedata.normalize("NFC", after) == whole else None


def boundaries(
    tokenizer: Any, text: str, token_spans: list[Span], composed: bool
) -> list[tuple[int | None, int | None]]:
    """Token spans on the axis that two tokenizers share: NFC(text) if one of them composes, else the text."""
    if not composed or is_nfc(tokenizer):
        return [(start, end) for start, end in token_spans]
    move: dict[int, int | None] = {}
    for position in {p for span in token_spans for p in span}:
        move[position] = to_nfc(text, position)
    return [(move[start], move[end]) for start, end in token_spans]
