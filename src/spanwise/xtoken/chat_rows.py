"""Chats: each side renders them with its own template; what the assistant said is aligned turn by turn.

Template text differs between models and is not paired. An assistant turn has two parts: what was said, aligned by
bytes, and its closing text (``<|im_end|>`` here, ``<|eot_id|>`` there), one pair. Where a template changes what was
said so that it cannot be found, the turn is left unpaired. O(characters) per chat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spanwise.spans.chat import AssistantSpans
from spanwise.spans.fold import Flags
from spanwise.spans.locate import LocatedTokens, inside_any, span_of
from spanwise.spans.profile import Profile
from spanwise.xtoken.rows import Document, joined_text
from spanwise.xtoken.segments import Segment
from spanwise.xtoken.texts import checked_text
from spanwise.xtoken.tokenizing import encode_texts


@dataclass(frozen=True)
class RenderedChat:
    """One side of a chat: its rendering, its tokens, and the character spans of the assistant's turns."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]]
    located: LocatedTokens

    @property
    def trained(self) -> Flags:
        """bool [n]: the token lies wholly in what the assistant said, closing text included."""
        return inside_any(self.located, self.spans, len(self.ids))


def render_chat(spans_of: AssistantSpans, document: Document, ctx_length: int, profile: Profile) -> RenderedChat:
    """Render and tokenize one side of a chat; at most ``ctx_length`` tokens."""
    text, spans = spans_of([dict(message) for message in document.messages or []], tools=document.tools)
    checked_text(text, document.place)
    # The template writes the control tokens; the tokenizer must not add them a second time.
    (ids,) = encode_texts([text], spans_of.tok, ctx_length, add_special_tokens=False)
    return RenderedChat(text, ids, spans, LocatedTokens(text, np.array(ids, dtype=np.int64), profile))


def chat_segments(messages: Sequence[Mapping[str, Any]], student: RenderedChat, teacher: RenderedChat) -> list[Segment]:
    """What is paired of a chat: per assistant turn what was said, and the closing text."""
    said = [_said(message) for message in messages if message.get("role") == "assistant"]
    if not len(said) == len(student.spans) == len(teacher.spans):
        return []
    segments: list[Segment] = []
    for content, mine, theirs in zip(said, student.spans, teacher.spans, strict=True):
        if content is None:
            continue
        my_parts, their_parts = _parts(student, mine, content), _parts(teacher, theirs, content)
        if my_parts is None or their_parts is None:
            continue
        (my_body, my_closing), (their_body, their_closing) = my_parts, their_parts
        left, right = _run(student, my_body, to_end=False), _run(teacher, their_body, to_end=False)
        if left and right:
            segments.append(Segment(left, right, text=content))
        left, right = _run(student, my_closing, to_end=True), _run(teacher, their_closing, to_end=True)
        if left and right:
            segments.append(Segment(left, right, closing=True))
    return segments


def _said(message: Mapping[str, Any]) -> str | None:
    if message.get("tool_calls"):
        return None  # printed differently by every template
    content = joined_text(message.get("content"))
    return content if isinstance(content, str) else None


Range = tuple[int, int]


def _parts(side: RenderedChat, span: Range, content: str) -> tuple[Range, Range] | None:
    """Character ranges of what was said, with blanks that the template puts before it, and of the closing text."""
    turn = side.text[span[0] : span[1]]
    core = content.strip()
    if turn.count(core) != 1 and not turn.lstrip().startswith(core):
        return None
    if not core and len(turn.split()) > 1:
        return None  # nothing was said, and what stands there is more than a stop token: an empty thinking block
    at = len(turn) - len(turn.lstrip()) if turn.lstrip().startswith(core) else turn.index(core)
    end = at + len(core)
    if turn[:at].strip() == "":
        at = 0
    else:
        lead = content[: len(content) - len(content.lstrip())]
        at -= len(lead) if turn.endswith(lead, 0, at) else 0
    trail = content[len(content.rstrip()) :] if core else ""
    end += len(trail) if turn.startswith(trail, end) else 0
    return (span[0] + at, span[0] + end), (span[0] + end, span[1])


def _run(side: RenderedChat, characters: Range, *, to_end: bool) -> Range | None:
    """The tokens of a range of characters, if they begin exactly where it does (and end there, if asked)."""
    if characters[0] == characters[1]:
        return None
    tokens = span_of(side.located.inside(*characters))
    if tokens[0] == tokens[1]:
        return None
    begins, ends = side.located.covers(*characters, tokens)
    return tokens if begins and (ends or not to_end) else None
