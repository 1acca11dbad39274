"""Special tokens that users type are text of theirs: reported, and on request broken up so that they stay text.

A tokenizer turns ``<|im_end|>`` into its special token wherever it stands. Labels stay right (they are proven in
characters), but the model then reads a turn that nobody took. O(characters) with one compiled pattern per tokenizer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from spanwise.vlm.checks import KINDS
from spanwise.vlm.media import Conversation

logger = logging.getLogger(__name__)
ZERO_WIDTH_SPACE = "\u200b"
_GIVEN_ROLES = ("user", "system", "tool")


def break_up_specials(conversations: Sequence[Conversation], processor: Any, *, change: bool) -> list[Any]:
    """The conversations, with special tokens in what was given to the model broken by a zero-width space.

    Args:
        conversations: not changed.
        processor: for its tokenizer's special tokens and its own placeholders, which need not be special.
        change: False only logs a warning that names the rows.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    placeholders = (getattr(processor, f"{kind}_token", None) for kind in KINDS)
    known = {*getattr(tokenizer, "all_special_tokens", ()), *placeholders}
    words = sorted((word for word in known if isinstance(word, str) and len(word) > 1), key=lambda w: (-len(w), w))
    if not words:
        return list(conversations)
    pattern = re.compile("|".join(re.escape(word) for word in words))
    typed = [row for row, conversation in enumerate(conversations) if _types_special(conversation, pattern)]
    if not typed:
        return list(conversations)
    if not change:
        logger.warning(
            "users type special tokens in rows %s of a batch of %d; they are never labelled, but they are tokenized as "
            "special. Pass sanitize=True to keep them text.", typed, len(conversations),
        )  # fmt: skip
        return list(conversations)
    return [_broken(conversation, pattern) for conversation in conversations]


def _types_special(conversation: Conversation, pattern: re.Pattern[str]) -> bool:
    return any(
        pattern.search(text)
        for message in conversation
        if message.get("role") in _GIVEN_ROLES
        for text in _texts(message)
    )


def _texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    if isinstance(content, (list, tuple)):
        return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return []


def _broken(conversation: Conversation, pattern: re.Pattern[str]) -> list[dict[str, Any]]:
    def broken(text: str) -> str:
        return pattern.sub(lambda match: match[0][0] + ZERO_WIDTH_SPACE + match[0][1:], text)

    copied = []
    for message in conversation:
        content = message.get("content")
        if message.get("role") not in _GIVEN_ROLES:
            copied.append(dict(message))
        elif isinstance(content, str):
            copied.append({**message, "content": broken(content)})
        elif isinstance(content, (list, tuple)):
            parts = [
                {**part, "text": broken(part["text"])}
                if isinstance(part, dict) and isinstance(part.get("text"), str)
                else part
                for part in content
            ]
            copied.append({**message, "content": parts})
        else:
            copied.append(dict(message))
    return copied
