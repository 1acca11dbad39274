"""Labels by searching token ids: the older ways, kept for processors without a template and for comparison.

Both go wrong on valid conversations (a user who types the marker, an answer that repeats); nothing here is used where
labels can be proven. O(tokens · turns).

Shapes: B rows, S tokens.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.spans.chat import IGNORE_INDEX

logger = logging.getLogger(__name__)

# Processors whose template opens every turn with <|im_start|> and closes it with <|im_end|>.
IMSTART_PROCESSORS = frozenset(
    {
        "Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen2_5OmniProcessor", "Qwen3VLProcessor", "Qwen3VLMoeProcessor",
        "Qwen3OmniMoeProcessor",
    }
)  # fmt: skip
_STOP_WORDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>")


def find_pattern(
    template: Int[Tensor, " S"],
    pattern: Int[Tensor, " n"],
    search_start_index: int = 0,
    allow_first_token_mismatch: bool = False,
) -> tuple[int, int]:
    """The first place at or after ``search_start_index`` where ``pattern`` stands, half-open; (-1, -1) if none."""
    size = len(pattern)
    for place in range(search_start_index, len(template) - size + 1):
        same = template[place : place + size] == pattern
        if bool(same.all()) or (allow_first_token_mismatch and bool(same[1:].all())):
            return place, place + size
    return -1, -1


def assistant_text(message: dict[str, Any]) -> str:
    """The text of a message: its string, or its text parts joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        return "".join(
            part.get("text", "") for part in content if isinstance(part, dict) and part.get("type") == "text"
        )
    return ""


def decode_single_token(tokenizer: Any, token_id: int) -> str:
    """Decode one id, given as int, list or tensor, whichever the tokenizer takes; else the number itself."""
    for form in (token_id, [token_id], torch.tensor([token_id])):
        with contextlib.suppress(Exception):  # tokenizers differ in what they refuse and how
            decoded: str = tokenizer.decode(form)
            return decoded
    return str(token_id)


def assistant_marker(tokenizer: Any) -> list[int] | None:
    """Ids of ``<|im_start|>assistant\\n``; None where the tokenizer does not know the mark."""
    start = _known_id(tokenizer, "<|im_start|>")
    if start is None:
        return None
    try:
        role = tokenizer.encode("assistant\n", add_special_tokens=False)
    except Exception:  # a tokenizer that cannot encode has no marker
        return None
    return [start, *role] if role else None


def stop_token_id(tokenizer: Any) -> int | None:
    """Id of ``<|im_end|>``; None where the tokenizer does not know it."""
    return _known_id(tokenizer, "<|im_end|>")


def _known_id(tokenizer: Any, word: str) -> int | None:
    try:
        found = tokenizer.convert_tokens_to_ids(word)
    except Exception:  # not every tokenizer has the method, or knows the word
        return None
    return None if found is None or found == getattr(tokenizer, "unk_token_id", None) else found


def searched_labels(
    input_ids: Int[Tensor, "B S"], conversations: Sequence[Sequence[dict[str, Any]]], processor: Any
) -> Int[Tensor, "B S"]:
    """Tokenize each answer alone and search it forward; label it and a stop token behind it. Not shifted."""
    tokenizer = getattr(processor, "tokenizer", processor)
    stops = {*_STOP_WORDS, getattr(tokenizer, "eos_token", None)}
    rows = []
    for ids, conversation in zip(input_ids, conversations, strict=False):
        labels = torch.full_like(ids, IGNORE_INDEX)
        at = 0
        for message in conversation:
            text = assistant_text(message) if message.get("role") == "assistant" else ""
            if not text:
                continue
            start, end = _search(ids, text, tokenizer, at)
            if start < 0:
                logger.warning("an answer of %d characters was not found behind token %d.", len(text), at)
                break
            if end < len(ids) and decode_single_token(tokenizer, int(ids[end])).strip() in stops:
                end += 1
            labels[start:end] = ids[start:end]
            at = end
        rows.append(labels)
    return torch.stack(rows)


def _search(ids: Int[Tensor, " S"], text: str, tokenizer: Any, at: int) -> tuple[int, int]:
    found = (-1, -1)
    for form in dict.fromkeys((text, text.lstrip())):
        encoded = tokenizer(form, add_special_tokens=False, return_tensors="pt")["input_ids"]
        found = find_pattern(ids, torch.as_tensor(encoded)[0].to(ids.device), at)
        if found[0] >= 0:
            break
    return found


def labels_between(input_ids: Int[Tensor, "B S"], marker: Sequence[int], stop: int) -> Int[Tensor, "B S"]:
    """Label what follows each marker, through the first stop id. Not shifted."""
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    pattern = torch.tensor(list(marker), dtype=input_ids.dtype, device=input_ids.device)
    for row, ids in enumerate(input_ids):
        at = 0
        while True:
            start, begin = find_pattern(ids, pattern, at)
            if start < 0:
                break
            stops = (ids[begin:] == stop).nonzero().flatten()
            at = begin + int(stops[0]) + 1 if len(stops) else len(ids)
            labels[row, begin:at] = ids[begin:at]
    return labels


def template_labels(
    input_ids: Int[Tensor, "B S"],
    conversations: Sequence[Sequence[dict[str, Any]]],
    processor: Any,
    fallback: Callable[..., Tensor],
) -> Tensor:
    """Labels between role markers: the known ones, those of the tokenizer's own template, or ``fallback``'s labels."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if type(processor).__name__ in IMSTART_PROCESSORS:
        marker, stop = assistant_marker(tokenizer), stop_token_id(tokenizer)
        if marker is not None and stop is not None:
            return labels_between(input_ids, marker, stop)
    derived = derive_markers(tokenizer)
    if derived is not None:
        return labels_between(input_ids, *derived)
    return fallback(input_ids, conversations, processor)


def derive_markers(tokenizer: Any) -> tuple[list[int], int] | None:
    """The ids between a question and an answer, and the one behind the answer, from the template; None if unclear."""
    if not hasattr(tokenizer, "apply_chat_template"):
        return None
    word = "XSENTINELMARKERX"
    try:
        question = [{"role": "user", "content": "u"}]
        asked = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=False)
        chat = tokenizer.apply_chat_template(
            [*question, {"role": "assistant", "content": word}], tokenize=False, add_generation_prompt=False
        )
        if not chat.startswith(asked) or chat.count(word) != 1:
            return None
        header, _, closing = chat[len(asked) :].partition(word)
        marker = tokenizer.encode(header, add_special_tokens=False)
        stop = tokenizer.encode(closing, add_special_tokens=False)
    except Exception:  # a template or tokenizer that refuses the probe has no markers to offer
        return None
    return (marker, stop[0]) if marker and stop else None
