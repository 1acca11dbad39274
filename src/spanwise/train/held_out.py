"""Held-out text: whole documents, one at a time, and whether they can be measured before hours of training.

O(longest document) memory; the check reads up to the first document with text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spanwise.train.data import open_corpus, readable, rename_columns, row_kind, turn_text

if TYPE_CHECKING:
    from spanwise.train.recipe import Data


def documents(source: str | Sequence[str], *, columns: Mapping[str, str], most: int | None = None) -> Iterator[str]:
    """Whole held-out documents as text, one at a time. Turns of a chat are joined by blank lines."""
    corpus: Iterable[Any] = open_corpus(source, stream=True)
    for place, raw in enumerate(readable(corpus)):
        if most is not None and place >= most:
            return
        row = rename_columns(raw, columns, place)
        kind = row_kind(row, place)
        if kind == "prompt":
            yield row["prompt"] + row["completion"]
        elif kind == "text":
            yield row["text"]
        elif kind == "message_log":
            yield "".join(map(turn_text, row["message_log"]))
        elif kind == "messages":
            yield "\n\n".join(text for text in map(turn_text, row["messages"]) if text)
        elif kind is not None:
            raise ValueError(
                f"held-out row {place} is of the kind '{kind}'; expected text, prompt/completion or messages. Bits per "
                "byte are measured on text. Fix: name a held-out file with a text column in data.eval."
            )


def check_held_out(section: Data) -> None:
    """Refuse held-out text that cannot be measured."""
    if section.eval is None:
        return
    sources = [section.eval] if isinstance(section.eval, str) else section.eval
    try:
        if any(text.strip() for text in documents(section.eval, columns=section.columns)):
            return
    except FileNotFoundError as error:
        raise FileNotFoundError(f"data.eval: {error}") from error
    except ValueError as error:
        raise ValueError(f"data.eval: {error}") from error
    raise ValueError(
        f"data.eval ({', '.join(sources)}) holds no text; expected at least one document to measure on. It is probably "
        "empty, or its text stands under another name. Fix: check the file, or set data.columns."
    )
