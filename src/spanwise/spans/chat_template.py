"""Rendering a chat: the template behind a tokenizer or processor, its marks, and what frames an assistant turn.

A chat template is somebody's program. It is only ever run, never parsed for meaning, with one exception: the
``{% generation %}`` marks that some templates carry are turned into private-use characters, so that the rendering
itself says where they were. What stands between a user's text and the answer, and what closes an answer, is learned
once per template from a rendered probe. Each rendering costs O(length of the chat).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]

_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


class UnprovenSpanError(ValueError):
    """What the assistant said in a turn cannot be proven from its template; nothing is guessed instead."""


class ChatTemplate:
    """One chat template with its tools and variables, ready to render.

    Args:
        source: a tokenizer, a processor, or any object with ``apply_chat_template(messages, tokenize=False, …)``.
        tools: passed to the template where given.
        template_kwargs: further variables of the template (``enable_thinking=False``, ``chat_template=…``).
    """

    def __init__(self, source: Any, tools: Sequence[Any] | None = None, **template_kwargs: Any) -> None:
        if not hasattr(source, "apply_chat_template"):
            raise ValueError(
                f"a {type(source).__name__} was given to render a chat; expected a tokenizer or processor with "
                "apply_chat_template. An image processor or a bare vocabulary was probably passed. "
                "Fix: pass the tokenizer, or the processor that holds it."
            )
        self.source = source
        self.options: dict[str, Any] = dict(template_kwargs) if tools is None else {"tools": tools, **template_kwargs}
        self.text = _template_text(source, tools, template_kwargs.get("chat_template"))
        if self.text is None and getattr(source, "chat_template", "unknown") is None:
            raise ValueError(
                f"{self.name} has no chat template; expected one, since only a template says how a chat is rendered. "
                "A base model's tokenizer was probably loaded. Fix: set tokenizer.chat_template, or load the "
                "instruction-tuned model's tokenizer."
            )

    @property
    def name(self) -> str:
        """How errors name this template."""
        where = getattr(self.source, "name_or_path", "") or ""
        return f"{type(self.source).__name__}{f' ({where})' if where else ''}"

    def render(self, messages: Sequence[Message], *, prompt: bool = False, text: str | None = None) -> str:
        """The chat as one string; with the generation prompt; through another template text. Lets errors pass."""
        options = self.options if text is None else {**self.options, "chat_template": text}
        chat: str = self.source.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt, **options
        )
        return chat

    def attempt(self, messages: Sequence[Message], *, prompt: bool = False, text: str | None = None) -> str | None:
        """As :meth:`render`; None where the template rejects the messages, whatever it raises."""
        try:
            return self.render(messages, prompt=prompt, text=text)
        except Exception:  # a template may raise anything, and any of it means no
            return None

    def marked_spans(self, messages: Sequence[Message], chat: str) -> list[tuple[int, int]] | None:
        """Character spans of ``{% generation %}`` blocks in ``chat``; None without marks or where they do not agree.

        The marks are rendered as private-use characters; taking these out again must give ``chat`` exactly.
        """
        if self.text is None or not _GENERATION.search(self.text):
            return None
        opening, closing = absent_strings(2, chat)

        def visible(match: re.Match[str]) -> str:
            mark = closing if match[2] else opening
            return f"{{%{match[1]} if true %}}{{{{ '{mark}' }}}}{{% endif {match[3]}%}}"

        marked = self.attempt(messages, text=_GENERATION.sub(visible, self.text))
        if marked is None or marked.replace(opening, "").replace(closing, "") != chat:
            return None
        spans: list[tuple[int, int]] = []
        at, begin = 0, None
        for piece in re.split(f"({opening}|{closing})", marked):
            if piece == opening:
                begin = at
            elif piece == closing:
                if begin is not None and begin < at:
                    spans.append((begin, at))
                begin = None
            else:
                at += len(piece)
        return spans

    def literals(self) -> tuple[str, ...]:
        """The texts of added and special tokens, longest first; a user who types one has typed text."""
        tokenizer = getattr(self.source, "tokenizer", self.source)
        added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else ()
        known = {*added, *getattr(tokenizer, "all_special_tokens", ())}
        return tuple(sorted((word for word in known if word), key=lambda word: (-len(word), word)))


@dataclass(frozen=True)
class TurnFrame:
    """What a template puts around an assistant turn.

    Attributes:
        bridges: what stands between a user's text and an answer, with the part of it that comes after the generation
            prompt and so belongs to the assistant (a leading space, an empty thinking block).
        closing: what closes an answer, up to its stop token.
        last_closing: the same at the end of a chat, where some templates differ.
        has_prompt: the template knows ``add_generation_prompt``.
    """

    bridges: tuple[tuple[str, str], ...]
    closing: str
    last_closing: str
    has_prompt: bool


def learn_frame(template: ChatTemplate, *, user_parts: bool, assistant_parts: bool) -> TurnFrame | None:
    """Learn a :class:`TurnFrame` from a probe of two exchanges; None where the template rejects the probe.

    Args:
        template: the template.
        user_parts: the chat at hand gives user content as a list of parts, not as a string.
        assistant_parts: likewise for the assistant.
    """
    words = absent_strings(4, "")
    probe = [
        text_message(role, word, parts=assistant_parts if role == "assistant" else user_parts)
        for role, word in zip(("user", "assistant") * 2, words, strict=True)
    ]
    chat = template.attempt(probe)
    pieces = None if chat is None else split_once_each(chat, words)
    if pieces is None:
        return None
    _, bridge_1, after_1, bridge_2, after_2 = pieces
    bare = template.attempt(probe[:1])
    has_prompt = template.attempt(probe[:1], prompt=True) != bare
    bridges = []
    for bridge, length, user in ((bridge_1, 1, words[0]), (bridge_2, 3, words[2])):
        prompted = template.attempt(probe[:length], prompt=True) or ""
        bridges.append((bridge, _lead(bridge, prompted.partition(user)[2], has_prompt=has_prompt)))
    longest_first = tuple(sorted(set(bridges), key=lambda pair: -len(pair[0])))
    return TurnFrame(longest_first, *_closings(after_1, after_2, template.literals()), has_prompt)


def _lead(bridge: str, prompted: str, *, has_prompt: bool) -> str:
    """The part of a bridge after the generation prompt. Without a prompt only blanks can be the assistant's."""
    if not bridge.startswith(prompted):
        return ""
    rest = bridge[len(prompted) :]
    return rest if has_prompt or not rest.strip() else ""


def _closings(after: str, after_last: str, literals: Sequence[str]) -> tuple[str, str]:
    """What closes a turn: common to what follows one in the middle and one at the end, through the stop token.

    Without a stop token it is all that is common, unless both go on: then what is common may be the accident of two
    words that begin alike, and only blanks are taken.
    """
    size = 0
    while size < min(len(after), len(after_last)) and after[size] == after_last[size]:
        size += 1
    common = after[:size]
    stop = _first_literal(common, literals)
    if stop is not None:
        return common[:stop], common[:stop]
    if common not in (after, after_last):
        common = common[: len(common) - len(common.lstrip())]
    last_stop = _first_literal(after_last, literals)
    if last_stop is not None and not after_last[last_stop:].strip():
        return common, after_last[:last_stop]
    return common, common


def _first_literal(text: str, literals: Sequence[str]) -> int | None:
    """Where the first added token of ``text`` ends; None if there is none."""
    found = [(text.find(word), -len(word)) for word in literals if word in text]
    if not found:
        return None
    start, negative_length = min(found)
    return start - negative_length


def text_message(role: str, text: str, *, parts: bool) -> dict[str, Any]:
    """A message that is one text, as a string or as a list of one part."""
    return {"role": role, "content": [{"type": "text", "text": text}] if parts else text}


def absent_strings(count: int, text: str) -> tuple[str, ...]:
    """``count`` different private-use words that ``text`` does not contain, none part of another."""
    variant = 0
    while True:
        words = tuple(f"\ue0f0{variant}\ue0f1{number}\ue0f2" for number in range(count))
        if not any(word in text for word in words):
            return words
        variant += 1


def split_once_each(text: str, words: Sequence[str]) -> list[str] | None:
    """The pieces around ``words``, if each occurs exactly once and in order; else None."""
    pieces = []
    rest = text
    for word in words:
        if text.count(word) != 1:
            return None
        piece, found, rest = rest.partition(word)
        if not found:
            return None
        pieces.append(piece)
    return [*pieces, rest]


def _template_text(source: Any, tools: Sequence[Any] | None, chosen: str | None) -> str | None:
    """The Jinja text that ``source`` will render with; None where an object does not show it."""
    known = getattr(source, "chat_template", None)
    if isinstance(known, Mapping):
        if chosen is not None:
            return known.get(chosen, chosen)
        return known.get("tool_use" if tools is not None and "tool_use" in known else "default")
    return chosen if chosen is not None else known if isinstance(known, str) else None
