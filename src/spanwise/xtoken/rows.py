"""What a row of data says: its text, or its chat, and on what of it the student is trained.

Five kinds, looked for in the order of ``ROW_KINDS``: ``message_log``, ``messages``, ``prompt`` + ``completion``,
``text`` and ``input_ids``; anything else is refused with the keys it has. O(characters).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spanwise.xtoken.texts import checked_text

# The kinds of rows and the columns that each needs; a row that fits several is of the first of them.
ROW_KINDS: dict[str, tuple[str, ...]] = {
    "message_log": ("message_log",),
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
    "input_ids": ("input_ids",),
}
KINDS_IN_WORDS = ", ".join(" + ".join(columns) for columns in ROW_KINDS.values())


def row_kind(row: Mapping[str, Any]) -> str | None:
    """The kind of a row: the first whose columns all hold something; None where there is none.

    >>> row_kind({"prompt": "a", "text": "b"}), row_kind({"text": None})
    ('text', None)
    """
    for kind, columns in ROW_KINDS.items():
        if all(row.get(column) is not None for column in columns):
            return kind
    return None


@dataclass(frozen=True)
class Document:
    """One row.

    Attributes:
        text: what both sides tokenize; empty for chats, which each side renders itself.
        messages: the chat, or None.
        tools: the chat's tools, or None.
        completion_start: the character where what is trained on begins; None: everything is.
        student_ids: ids given instead of a text.
        loss_multiplier: the row's ``sample_mask``.
        index: the row's ``idx``.
        place: where it stands in its batch, for errors.
    """

    text: str
    messages: Sequence[Mapping[str, Any]] | None
    tools: Sequence[Any] | None
    completion_start: int | None
    student_ids: tuple[int, ...] | None
    loss_multiplier: float
    index: Any
    place: int


def read_row(row: Any, place: int, spell: Callable[[Sequence[int], int], str]) -> Document:
    """Read one row. ``spell`` turns a student's ids into their text (and refuses what is none)."""
    if not isinstance(row, Mapping):
        raise ValueError(
            f"row {place} is a {type(row).__name__}; expected a dict with a text. The data set probably yields bare "
            "strings. Fix: {'text': row}."
        )
    text, messages, start, ids = "", None, None, None
    kind = row_kind(row)
    if kind == "message_log":
        text = "".join(_content(entry, place) for entry in _entries(row["message_log"], "message_log", place))
    elif kind == "messages":
        # A columnar file gives every message the keys of all others; a template would take a key without value for one.
        messages = [
            {key: value for key, value in message.items() if value is not None or key == "content"}
            for message in _entries(row["messages"], "messages", place)
        ]
    elif kind == "prompt":
        prompt = checked_text(row["prompt"], place)
        text, start = prompt + checked_text(row["completion"], place), len(prompt)
    elif kind == "text":
        text = checked_text(row["text"], place)
    elif kind == "input_ids":
        ids = _ids(row["input_ids"], place)
        text = spell(ids, place)
    else:
        raise ValueError(
            f"row {place} has the keys {sorted(map(str, row))} and no text; expected one of {KINDS_IN_WORDS}. "
            "The column is probably named otherwise, or empty. "
            "Fix: rename the column to 'text', or drop rows without one."
        )
    index = place if row.get("idx") is None else row["idx"]
    return Document(text, messages, row.get("tools"), start, ids, _multiplier(row, place), index, place)


def _multiplier(row: Mapping[str, Any], place: int) -> float:
    given = row.get("loss_multiplier")
    try:
        multiplier = 1.0 if given is None else float(given)
    except (TypeError, ValueError):
        multiplier = float("nan")
    if not math.isfinite(multiplier):
        raise ValueError(
            f"the loss_multiplier of row {place} is {given!r}; expected a finite number. It was probably computed by a "
            "division by 0, or read as text. Fix: 1.0 for a row like any other, 0.0 for one that is not to count."
        )
    return multiplier


def _ids(value: Any, place: int) -> tuple[int, ...]:
    try:
        return tuple(operator.index(token) for token in value)
    except TypeError as error:
        raise ValueError(
            f"input_ids of row {place} are {str(value)[:60]!r} ({error}); expected the whole numbers of one row. A "
            "batch of rows, or another column, was probably passed. Fix: one row each, {'input_ids': [5, 6, 7]}."
        ) from error


def _entries(value: Any, key: str, place: int) -> list[Mapping[str, Any]]:
    entries = list(value) if isinstance(value, (list, tuple)) else []
    if not entries or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(
            f"'{key}' of row {place} is {str(value)[:60]!r}; expected a list of dicts with content. The chat was "
            f"probably stored as JSON text or is empty. Fix: parse it, {{'{key}': json.loads(…)}}, or drop such rows."
        )
    return entries


def joined_text(content: Any) -> Any:
    """Content as templates take it: the texts of a list of parts joined, anything else as it is.

    >>> joined_text([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}])
    'ab'
    """
    if not isinstance(content, (list, tuple)):
        return content
    texts = [part.get("text") for part in content if isinstance(part, Mapping)]
    return "".join(text for text in texts if isinstance(text, str))


def _content(entry: Mapping[str, Any], place: int) -> str:
    content = joined_text(entry.get("content"))
    if content is None:
        raise ValueError(
            f"a message of row {place} has the keys {sorted(map(str, entry))} and no content; expected text. The "
            "message is probably a tool call. Fix: give such rows as {'messages': […]}; the chat template renders them."
        )
    return checked_text(content, place)
