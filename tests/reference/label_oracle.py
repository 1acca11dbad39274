"""Which tokens the assistant produced, by counting bytes: no offsets, no templates, no spans of the code under test.

Every token of a byte-level vocabulary stands for known bytes. Laid end to end without media tokens they must give the
chat that a hand-written renderer printed, and a token is a label if all its bytes are something said.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tests.reference.chat_oracle import Piece


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + place): byte for place, byte in enumerate(hidden)}


ALPHABET = byte_alphabet()


def expected_labels(
    input_ids: Sequence[int], tokenizer: Any, media_ids: Collection[int], pieces: Sequence[Piece]
) -> list[int]:
    """Labels of a row without padding, not shifted. Fails where tokens and pieces are not the same bytes."""
    said = b"".join((b"\1" if spoken else b"\0") * len(text.encode()) for text, spoken in pieces)
    text = "".join(text for text, _ in pieces).encode()
    special = tokenizer.added_tokens_decoder
    labels, at = [], 0
    for token_id in input_ids:
        if token_id in media_ids:
            labels.append(-100)
            continue
        if token_id in special:
            own = str(special[token_id]).encode()
        else:
            own = bytes(ALPHABET[sign] for sign in tokenizer.convert_ids_to_tokens(token_id))
        assert text[at : at + len(own)] == own, (at, text[at : at + 40], own)
        labels.append(token_id if set(said[at : at + len(own)]) == {1} else -100)
        at += len(own)
    assert at == len(text), (text[at:], "was not printed")
    return labels
