"""Texts as they come: refuse what no tokenizer can encode, and texts that are not those of the ids.

O(bytes) per text; the second check only runs for texts that a caller passes beside ids.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from spanwise.spans.placing import Tokens, gather

_WINDOW = 4


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
    """Half of the spelling's windows of four characters occur in the text, case and spaces aside."""
    mine, theirs = _plain(spelled), _plain(whole)
    size = min(_WINDOW, len(mine))
    windows = {mine[i : i + size] for i in range(len(mine) - size + 1)} if size else set()
    return 2 * sum(window in theirs for window in windows) >= len(windows)


def _plain(stream: bytes) -> str:
    text = unicodedata.normalize("NFKD", stream.decode("utf-8", "ignore").replace("▁", " ")).casefold()
    return "".join(character for character in text if not character.isspace() and not unicodedata.combining(character))
