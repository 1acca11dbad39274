"""Conversations in the form that their template reads: some print parts only, and nothing at all for a string.

LLaVA's and Idefics' templates are of that kind, and both forms are valid conversations; so strings become parts of one
text where a probe shows that they would be lost. One or two renderings of a probe per batch that holds strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spanwise.spans.chat_template import ChatTemplate, absent_strings, text_message
from spanwise.vlm.media import Conversation


def as_template_reads(conversations: Sequence[Conversation], source: Any) -> list[Any]:
    """The conversations, with strings as parts where the template of ``source`` prints only parts; none is changed."""
    strings = any(isinstance(message.get("content"), str) for conversation in conversations for message in conversation)
    if not strings or not _prints_parts_only(ChatTemplate(source)):
        return list(conversations)
    return [[_in_parts(message) for message in conversation] for conversation in conversations]


def _prints_parts_only(template: ChatTemplate) -> bool:
    words = absent_strings(2, "")
    printed = []
    for parts in (False, True):
        probe = [text_message(role, word, parts=parts) for role, word in zip(("user", "assistant"), words, strict=True)]
        chat = template.attempt(probe)
        printed.append(chat is not None and all(word in chat for word in words))
    return printed == [False, True]


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
