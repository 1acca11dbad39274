"""What a row of data says: its text, or its chat, and on what of it the student is trained.

Six kinds: ``message_log``, ``messages``, ``prompt`` + ``completion``, ``text`` and ``input_ids``; anything else is
refused with the keys it has. O(characters).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spanwise.xtoken.texts import checked_text


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
    """

    text: str
    messages: Sequence[Mapping[str, Any]] | None
    tools: Sequence[Any] | None
    completion_start: int | None
    student_ids: tuple[int, ...] | None
    loss_multiplier: float
    index: Any


def read_row(row: Any, place: int, spell: Callable[[Sequence[int], int], str]) -> Document:
    """Read one row. ``spell`` turns a student's ids into their text (and refuses what is none)."""
    if not isinstance(row, Mapping):
        raise ValueError(
            f"row {place} is a {type(row).__name__}; expected a dict with a text. The data set probably yields bare "
            "strings. Fix: {'text': row}."
        )
    text, messages, start, ids = "", None, None, None
    if row.get("message_log") is not None:
        text = "".join(_content(entry, place) for entry in _entries(row["message_log"], "message_log", place))
    elif row.get("messages") is not None:
        messages = _entries(row["messages"], "messages", place)
        for message in messages:
            if isinstance(message.get("content"), str):
                checked_text(message["content"], place)
    elif row.get("prompt") is not None and row.get("completion") is not None:
        prompt = checked_text(row["prompt"], place)
        text, start = prompt + checked_text(row["completion"], place), len(prompt)
    elif row.get("text") is not None:
        text = checked_text(row["text"], place)
    elif row.get("input_ids") is not None:
        ids = tuple(int(token) for token in row["input_ids"])
        text = spell(ids, place)
    else:
        raise ValueError(
            f"row {place} has the keys {sorted(map(str, row))} and no text; expected one of message_log, messages, "
            "prompt + completion, text, input_ids. The column is probably named otherwise, or empty. "
            "Fix: rename the column to 'text', or drop rows without one."
        )
    multiplier = float(row.get("loss_multiplier", 1.0))
    return Document(text, messages, row.get("tools"), start, ids, multiplier, row.get("idx", place))


def _entries(value: Any, key: str, place: int) -> list[Mapping[str, Any]]:
    entries = list(value) if isinstance(value, (list, tuple)) else []
    if not entries or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(
            f"'{key}' of row {place} is {str(value)[:60]!r}; expected a list of dicts with content. The chat was "
            f"probably stored as JSON text or is empty. Fix: parse it, {{'{key}': json.loads(…)}}, or drop such rows."
        )
    return entries


def _content(entry: Mapping[str, Any], place: int) -> str:
    content = entry.get("content")
    if isinstance(content, (list, tuple)):
        content = "".join(part.get("text", "") for part in content if isinstance(part, Mapping))
    if content is None:
        raise ValueError(
            f"a message of row {place} has the keys {sorted(map(str, entry))} and no content; expected text. The "
            "message is probably a tool call. Fix: give such rows as {'messages': […]}; the chat template renders them."
        )
    return checked_text(content, place)
