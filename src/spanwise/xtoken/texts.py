"""Texts as they come: refuse what no tokenizer can encode, and texts that are not those of the ids.

O(bytes) per text; the second check only runs for texts that a caller passes beside ids, and costs O(characters² / 64)
where a tokenizer rewrote its text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from spanwise.spans.placing import Tokens, gather

# Too few characters prove nothing: a normaliser or an unknown token may have rewritten every one of them.
_SHORT = 8
_LONGEST = 20_000


def checked_text(text: object, row: int) -> str:
    """The text itself; lone surrogates and other objects are refused by name."""
    if not isinstance(text, str):
        raise ValueError(
            f"row {row} holds a text of type {type(text).__name__}; expected str. The column was probably read as "
            "bytes, numbers or with missing values. Fix: decode or drop such rows before collating."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"row {row} holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; expected "
            "text that UTF-8 can hold. It was probably cut inside a pair of JSON escapes. "
            "Fix: text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')."
        ) from error
    return text


def refuse_other_texts(texts: Sequence[str], sides: tuple[Tokens, Tokens]) -> None:
    """Raise where a text has next to nothing in common with what its ids spell."""
    rows = len(sides[0].bounds) - 1
    if len(texts) != rows:
        raise ValueError(
            f"{len(texts)} texts were given for {rows} rows of ids; expected one per row. The texts probably belong to "
            "another batch. Fix: pass the texts of exactly these rows, or None."
        )
    for row, text in enumerate(texts):
        whole = checked_text(text, row).encode()
        for name, side in zip(("student", "teacher"), sides, strict=True):
            spelled = _spelled(side, row)
            if spelled not in whole and not _resembles(spelled, whole):
                raise ValueError(
                    f"text {row} is {text[:40]!r} and the {name}'s ids of that row spell "
                    f"{spelled[:40].decode('utf-8', 'replace')!r}; expected the text that was tokenized. The texts are "
                    "probably in another order than the rows. Fix: pass the texts of exactly these rows, or None."
                )


def _spelled(side: Tokens, row: int) -> bytes:
    ids = side.ids[side.bounds[row] : side.bounds[row + 1]]
    profile = side.profile
    ids = ids[~profile.special[ids] & profile.known[ids]]
    return gather(profile.flat, profile.offsets[ids], profile.lengths[ids]).tobytes().strip()


def _resembles(spelled: bytes, whole: bytes) -> bool:
    """Three quarters of the spelling's characters occur in the text in their order, case and spaces aside.

    What interrupts a spelling (unknown tokens, literals of control tokens, marks that a normaliser takes off) leaves
    the order of the rest alone, while another text of that length rarely shares two thirds.
    """
    mine, theirs = _plain(spelled)[:_LONGEST], _plain(whole)
    return len(mine) < _SHORT or 4 * _longest_common_subsequence(mine, theirs) >= 3 * len(mine)


def _longest_common_subsequence(first: str, second: str) -> int:
    """Its length, by whole numbers as bit vectors: one bit per character of ``first``, zero where it was matched."""
    places: dict[str, int] = {}
    for at, character in enumerate(first):
        places[character] = places.get(character, 0) | 1 << at
    everything = (1 << len(first)) - 1
    unmatched = everything
    for character in second:
        met = unmatched & places.get(character, 0)
        unmatched = (unmatched + met | unmatched - met) & everything
    return len(first) - unmatched.bit_count()


def _plain(stream: bytes) -> str:
    text = unicodedata.normalize("NFKD", stream.decode("utf-8", "ignore").replace("▁", " ")).casefold()
    return "".join(character for character in text if not character.isspace() and not unicodedata.combining(character))
