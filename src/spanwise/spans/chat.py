"""What the assistant said: character spans of a rendered chat, and the tokens that lie inside them.

Searching for an answer's tokens in the prompt goes wrong when a user quotes it, when an answer is empty, repeats itself
or contains a stop token. Here the rendering itself proves the span, in four steps, each tried only if the one before
did not apply: the template's own ``{% generation %}`` marks; rendering again with answers replaced by private-use
characters and comparing; rendering prefixes of the chat; and otherwise an error that names the turn. A span starts
where the generation prompt ends and includes the closing stop token, because that is what a model must produce; a tool
call is something said, too.

Cost: two renderings for a plain chat, at most five more per turn where comparison needs them; O(characters) each.
Shapes: S tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from spanwise.spans.chat_template import (
    ChatTemplate,
    Message,
    TurnFrame,
    UnprovenSpanError,
    absent_strings,
    learn_frame,
    split_once_each,
    text_message,
)

Span = tuple[int, int]
IGNORE_INDEX = -100
MOST_FRAMES = 32


def assistant_spans(
    tok: Any, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, **template_kwargs: Any
) -> tuple[str, list[Span]]:
    """Render a chat and find what the assistant said in it.

    Args:
        tok: a tokenizer or processor with a chat template.
        messages: role and content (a string or a list of parts), as ``apply_chat_template`` takes them; not changed.
        tools: tools for templates that know them.
        template_kwargs: further variables of the template.

    Returns:
        The rendered chat, and half-open character spans in it, ascending and disjoint, one per assistant turn (as many
        as there are non-empty marks where the template has ``{% generation %}`` marks). No assistant turn: ``[]``.

    Raises:
        ValueError: the template rejects the chat, or prints list content as Python code.
        UnprovenSpanError: a turn's span cannot be proven; the message names the turn and the template.

    >>> class Plain:
    ...     chat_template = None
    ...     def apply_chat_template(self, messages, tokenize, add_generation_prompt):
    ...         text = "".join(f"<{m['role']}>{m['content']}</s>" for m in messages)
    ...         return text + ("<assistant>" if add_generation_prompt else "")
    >>> Plain.chat_template = "shown only to say that there is one"
    >>> chat = [{"role": "user", "content": "no"}, {"role": "assistant", "content": "no"}]
    >>> text, spans = assistant_spans(Plain(), chat)
    >>> text, [text[start:end] for start, end in spans]
    ('<user>no</s><assistant>no</s>', ['no</s>'])
    """
    return AssistantSpans(tok)(messages, tools=tools, **template_kwargs)


class AssistantSpans:
    """:func:`assistant_spans` for one tokenizer or processor, remembering what it learned about the template.

    What is remembered is keyed by the template's text and variables, at most ``MOST_FRAMES`` entries.
    """

    def __init__(self, tok: Any) -> None:
        self.tok = tok
        self._frames: dict[str, TurnFrame | None] = {}

    def __call__(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, **template_kwargs: Any
    ) -> tuple[str, list[Span]]:
        """See :func:`assistant_spans`."""
        template = ChatTemplate(self.tok, tools, **template_kwargs)
        chat = _render_or_explain(template, messages)
        _refuse_python_lists(template, messages, chat)
        turns = [turn for turn, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns:
            return chat, []
        marked = template.marked_spans(messages, chat)
        if marked is not None:
            return chat, _from_prompts(template, messages, chat, turns, marked)
        user_parts = any(_has_parts(message) for message in messages if message.get("role") != "assistant")
        assistant_parts = any(_has_parts(messages[turn]) for turn in turns)
        frame = self._frame(template, user_parts=user_parts, assistant_parts=assistant_parts)
        if frame is None:
            raise UnprovenSpanError(
                _unproven(template, turns[0], "rejects a plain exchange of two questions and answers")
            )
        return chat, _Comparison(template, messages, chat, frame).spans(turns)

    def _frame(self, template: ChatTemplate, *, user_parts: bool, assistant_parts: bool) -> TurnFrame | None:
        key = repr((template.text, sorted(template.options.items()), user_parts, assistant_parts))
        if key not in self._frames:
            if len(self._frames) >= MOST_FRAMES:
                self._frames.clear()
            self._frames[key] = learn_frame(template, user_parts=user_parts, assistant_parts=assistant_parts)
        return self._frames[key]


class _Comparison:
    """Proves the spans of one chat by comparing renderings of it."""

    def __init__(self, template: ChatTemplate, messages: Sequence[Message], chat: str, frame: TurnFrame) -> None:
        self.template = template
        self.messages = messages
        self.chat = chat
        self.frame = frame
        self.parts_anywhere = any(_has_parts(message) for message in messages)

    def spans(self, turns: Sequence[int]) -> list[Span]:
        found = self._all_at_once(turns)
        if found is None:
            found = [self._replaced(turn) or self._prefixes(turn) for turn in turns]
        proven: list[Span] = []
        for turn, span in zip(turns, found, strict=True):
            begin = proven[-1][1] if proven else 0
            if span is None or not begin <= span[0] <= span[1] <= len(self.chat):
                why = "renders it in a way that changes when its text is replaced and is not a prefix of the whole"
                raise UnprovenSpanError(_unproven(self.template, turn, why))
            proven.append(span)
        return proven

    def _all_at_once(self, turns: Sequence[int]) -> list[Span | None] | None:
        """Replace every answer in one rendering and walk through the true one; None where one is not plain text."""
        if not all(_is_plain(self.messages[turn]) for turn in turns):
            return None
        words = absent_strings(len(turns), self.chat)
        replaced = list(self.messages)
        for turn, word in zip(turns, words, strict=True):
            replaced[turn] = self._said(turn, word)
        chat = self.template.attempt(replaced)
        pieces = None if chat is None else split_once_each(chat, words)
        if pieces is None or not self.chat.startswith(pieces[0]):
            return None
        spans: list[Span | None] = []
        at = len(pieces[0])
        for turn, after in zip(turns, pieces[1:], strict=True):
            end = next(
                (
                    at + len(text)
                    for text in _printed_forms(self.messages[turn])
                    if self.chat.startswith(text, at) and self.chat.startswith(after, at + len(text))
                ),
                None,
            )
            if end is None:
                return None
            spans.append(self._span(turn, before=at, after=end))
            at = end + len(after)
        return spans if at == len(self.chat) and None not in spans else None

    def _replaced(self, turn: int) -> Span | None:
        """Replace this turn alone; what is common before and after it gives the span, however the turn was printed."""
        (word,) = absent_strings(1, self.chat)
        pieces = self._with_turn(word, self.messages[:turn], self.messages[turn + 1 :], turn)
        if pieces is None or not self.chat.endswith(pieces[1]):
            return None
        after = len(self.chat) - len(pieces[1])
        before = len(pieces[0]) if self.chat.startswith(pieces[0]) and len(pieces[0]) <= after else None
        return self._span(turn, before=before, after=after)

    def _prefixes(self, turn: int) -> Span | None:
        """For templates that reject the replacement: what the chat begins with if it stops before or after this turn.

        The exchange around the turn (up to the next user message) is closed by a plain answer instead, so that
        templates that insist on alternating roles, or that print tools before the last user message, still render it.
        """
        (word,) = absent_strings(1, self.chat)
        later = turn + 1
        while later < len(self.messages) and self.messages[later].get("role") != "user":
            later += 1
        stopped_before = self._with_turn(word, self.messages[:turn], self.messages[later:], turn)
        stopped_after = self._with_turn(word, self.messages[: turn + 1], self.messages[later:], turn)
        if stopped_before is None or stopped_after is None or not self.chat.startswith(stopped_before[0]):
            return None
        closing = self.frame.closing
        until = stopped_after[0]
        end = until.rfind(closing) + len(closing) if closing in until else -1
        if not closing and self.frame.has_prompt:
            return None
        start = self._start(turn, len(stopped_before[0]))
        if start is None or end < start or not self.chat.startswith(until[:end]):
            return None
        return start, end

    def _with_turn(
        self, word: str, before: Sequence[Message], after: Sequence[Message], turn: int
    ) -> tuple[str, str] | None:
        """What stands before and after ``word`` when it is said between two parts of the chat."""
        chat = self.template.attempt([*before, self._said(turn, word), *after])
        pieces = None if chat is None else split_once_each(chat, [word])
        return None if pieces is None else (pieces[0], pieces[1])

    def _said(self, turn: int, word: str) -> dict[str, Any]:
        content = self.messages[turn].get("content")
        return text_message(
            "assistant", word, parts=_has_parts(self.messages[turn]) or (not content and self.parts_anywhere)
        )

    def _span(self, turn: int, *, before: int | None, after: int) -> Span | None:
        """The span of a turn whose text begins at ``before`` (None: unknown) and ends at ``after``."""
        last = turn == len(self.messages) - 1
        closing = self.frame.last_closing if last else self.frame.closing
        start = self._start(turn, before)
        if start is None or start > after or not self.chat.startswith(closing, after):
            return None
        return start, after + len(closing)

    def _start(self, turn: int, before: int | None) -> int | None:
        """Where the generation prompt of a turn ends, at the latest where its text begins."""
        if before is not None:
            for bridge, lead in self.frame.bridges:
                if self.chat.endswith(bridge, 0, before):
                    return before - len(lead)
        if self.frame.has_prompt and turn > 0:
            prompted = self.template.attempt(self.messages[:turn], prompt=True)
            if prompted is not None and self.chat.startswith(prompted):
                return len(prompted)
        return before


def tokens_inside(offsets: Int[Tensor, "S 2"] | Sequence[Span], spans: Sequence[Span]) -> Bool[Tensor, " S"]:
    """Which tokens lie inside one of the spans.

    A token that only reaches into a span is outside: part of it was given, so it is nothing that a model would produce.
    A token without characters counts where it stands inside, except at character 0 (special tokens that a tokenizer
    adds, and padding, have the offsets (0, 0)).

    Args:
        offsets: start and end characters of each token, half-open; S may be 0.
        spans: ascending and disjoint, as :func:`assistant_spans` returns them.

    >>> tokens_inside([(0, 0), (0, 4), (4, 5), (5, 9), (9, 11)], [(4, 9)]).tolist()
    [False, False, True, True, False]
    """
    edges = torch.as_tensor(offsets, dtype=torch.int64).reshape(-1, 2)
    if not spans:
        return torch.zeros(len(edges), dtype=torch.bool)
    limits = torch.tensor(spans, dtype=torch.int64)
    starts, ends = edges[:, 0].contiguous(), edges[:, 1]
    place = torch.searchsorted(limits[:, 0].contiguous(), starts, right=True) - 1
    span_end = limits[:, 1][place.clamp(min=0)]
    within = (place >= 0) & (ends <= span_end)
    return within & ((ends > starts) | ((starts > 0) & (starts < span_end)))


def span_labels(
    input_ids: Int[Tensor, " S"] | Sequence[int],
    offsets: Int[Tensor, "S 2"] | Sequence[Span],
    spans: Sequence[Span],
) -> Int64[Tensor, " S"]:
    """Labels, not shifted: the token's id where it lies inside a span (:func:`tokens_inside`), else -100.

    >>> span_labels([7, 8, 9], [(0, 2), (2, 3), (3, 5)], [(2, 5)]).tolist()
    [-100, 8, 9]
    """
    ids = torch.as_tensor(input_ids, dtype=torch.int64)
    return ids.masked_fill(~tokens_inside(offsets, spans), IGNORE_INDEX)


def _from_prompts(
    template: ChatTemplate, messages: Sequence[Message], chat: str, turns: Sequence[int], spans: Sequence[Span]
) -> list[Span]:
    """Marked spans that begin behind a blank which the generation prompt does not write: the blank is the answer's.

    Otherwise the first word, whose token begins with that blank, would lie inside no span.
    """
    if len(spans) != len(turns) or not any(chat[start - 1 : start].isspace() for start, _ in spans):
        return list(spans)
    moved = []
    for turn, (start, end) in zip(turns, spans, strict=True):
        prompt = template.attempt(messages[:turn], prompt=True) if chat[start - 1 : start].isspace() else None
        if prompt and chat.startswith(prompt) and len(prompt) <= start and not chat[len(prompt) : start].strip():
            start = len(prompt)
        moved.append((start, end))
    return moved


def _has_parts(message: Message) -> bool:
    return isinstance(message.get("content"), (list, tuple))


def _is_plain(message: Message) -> bool:
    """True for a message that is text and nothing else (no tool calls, no reasoning, no media)."""
    if any(value is not None and key not in ("role", "content") for key, value in message.items()):
        return False
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return isinstance(content, str)


def _printed_forms(message: Message) -> list[str]:
    """How templates print a plain text: as it is, or trimmed in one of the ways that templates trim."""
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    forms = [texts, *([text.lstrip(blanks) for text in texts] for blanks in (None, "\n"))]
    forms += [[text.strip(blanks) for text in texts] for blanks in (None, "\n")]
    forms.append([text.rstrip() for text in texts])
    return list(dict.fromkeys("".join(form) for form in forms))


def _render_or_explain(template: ChatTemplate, messages: Sequence[Message]) -> str:
    try:
        return template.render(messages)
    except Exception as error:  # a template may raise anything
        roles = [str(message.get("role")) for message in messages]
        lists = any(_has_parts(message) for message in messages)
        raise ValueError(
            f"the chat template of {template.name} could not render a chat with roles {roles} "
            f"({type(error).__name__}: {error}); expected roles, keys and content that this template knows. "
            + (
                "It probably expects content as a string and was given a list of parts. "
                "Fix: join the text parts into one string, or use the processor's template."
                if lists
                else "A role, an order of roles or a missing content is the likely cause. "
                "Fix: change the messages as the template's own words say."
            )
        ) from error


def _refuse_python_lists(template: ChatTemplate, messages: Sequence[Message], chat: str) -> None:
    """Refuse a template that prints a list of parts as Python code, which no model was trained on."""
    if not any(_has_parts(message) for message in messages) or "{'" not in chat:
        return
    (word,) = absent_strings(1, chat)
    probe = [
        {**message, "content": [_with_text(part, word) for part in message["content"]]}
        if _has_parts(message)
        else message
        for message in messages
    ]
    rendered = template.attempt(probe)
    if rendered is not None and repr(word) in rendered:  # private-use characters are escaped in Python code
        raise ValueError(
            f"the chat template of {template.name} prints list content as Python code ({{'type': 'text', …}}); "
            "expected a template that prints the text of each part. It was probably written for content that is a "
            "string. Fix: join the text parts into one string, or set a template that handles lists of parts."
        )


def _with_text(part: Any, word: str) -> Any:
    return {**part, "text": word} if isinstance(part, dict) and "text" in part else part


def _unproven(template: ChatTemplate, turn: int, why: str) -> str:
    shown = " ".join((template.text or "").split())[:80]
    return (
        f"what the assistant said in message {turn} cannot be proven: the chat template of {template.name} {why} "
        f"(it begins {shown!r}); expected a rendering in which the turn can be located. The template probably "
        "rewrites earlier turns or depends on what is said. Fix: put {% generation %} … {% endgeneration %} around the "
        "answer in the template, or drop this conversation."
    )
