"""Valid conversations on which labels go wrong when they are searched for instead of proven."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

TEXTS = (
    "Yes.",
    "The answer is 42.",
    "你好，世界",
    "def f(x):\n    return x\n",
    "naïve café 🙂🇫🇷",
    "1",
    "a  b   c",
    '{"key": [1, 2, 3]}',
    "It's - well - complicated…",
    "مرحبا",
)
CATEGORIES = (
    "plain",
    "injected_turn",
    "quoted_stop",
    "answer_equals_user",
    "repeated_phrase",
    "empty_answer",
    "leading_newline",
    "trailing_blanks",
    "tool_calls",
    "system_quotes_answer",
    "odd_characters",
)
ODD = (
    "\ue0f00\ue0f10\ue0f2",
    "a\u2028b\u0085",
    "\x00\x07",
    "👩‍👩‍👧‍👦",
    "{{ content }}",
    "{% generation %}x",
    "\u200b",
    "</think>\n\n",
)


def conversation(
    category: str, seed: int, *, header: str, stop: str, system: bool = True, strict_tools: bool = True
) -> list[dict[str, Any]]:
    """One conversation of a category.

    Args:
        category: one of ``CATEGORIES``.
        seed: makes it reproducible.
        header: how the template opens an assistant turn, for users who type it.
        stop: how it closes one, for assistants who quote it.
        system: the template takes a system message.
        strict_tools: tool messages carry identifiers of nine characters.
    """
    rng = random.Random(f"{category}-{seed}")
    messages: list[dict[str, Any]] = []
    if system and rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(TEXTS)})
    for _ in range(rng.choice((1, 1, 2, 3))):
        question, answer = rng.choice(TEXTS), rng.choice(TEXTS)
        if category == "injected_turn":
            question = f"{question}{stop}\n{header}{answer}{stop}\n{rng.choice(('', header))}"
        elif category == "quoted_stop":
            answer = f"{answer} {stop} {header}{rng.choice(TEXTS)}"
        elif category == "answer_equals_user":
            answer = question
        elif category == "repeated_phrase":
            answer = question = answer * rng.randint(2, 4)
        elif category == "empty_answer":
            answer = rng.choice(("", " ", "\n"))
        elif category == "leading_newline":
            answer = rng.choice(("\n", "\n\n", " \n", "\t")) + answer
        elif category == "trailing_blanks":
            answer += rng.choice(("\n", "  ", "\n\n", "\n \n"))
        elif category == "odd_characters":
            question, answer = rng.choice(ODD) + question, rng.choice(ODD) + answer + rng.choice(ODD)
        elif category == "system_quotes_answer" and messages and messages[0]["role"] == "system":
            messages[0]["content"] = f"Say: {header}{answer}{stop}"
        messages.append({"role": "user", "content": question})
        if category == "tool_calls":
            messages += _tool_exchange(rng, strict=strict_tools)
        messages.append({"role": "assistant", "content": answer})
    return messages


def _tool_exchange(rng: random.Random, *, strict: bool) -> Sequence[dict[str, Any]]:
    identifier = "".join(rng.choice("abc123") for _ in range(9))
    function = {"name": rng.choice(("look", "add")), "arguments": {"q": rng.choice(TEXTS), "n": rng.randint(0, 9)}}
    call = {"type": "function", "function": function} | ({"id": identifier} if strict else {})
    answer = {"role": "tool", "content": rng.choice(TEXTS)} | ({"tool_call_id": identifier} if strict else {})
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, answer]
