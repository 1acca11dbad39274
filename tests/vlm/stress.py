"""Stress conversations for a processor, checked token by token against the oracle."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

from PIL import Image

from spanwise.spans.chat import UnprovenSpanError
from spanwise.vlm import VLMCollator
from spanwise.vlm.tokens import media_token_ids
from tests.reference.chat_stress import CATEGORIES, conversation
from tests.reference.label_oracle import expected_labels
from tests.vlm import processors
from tests.vlm.rendered import RENDERERS

PLAIN_CATEGORIES = tuple(category for category in CATEGORIES if category != "tool_calls")


@dataclass
class Outcome:
    """What became of the conversations of one family."""

    family: str
    labelled: int = 0
    refused: int = 0
    wrong: int = 0

    @property
    def total(self) -> int:
        return self.labelled + self.refused + self.wrong


def image(seed: int) -> Image.Image:
    """A small image in one of several modes."""
    mode = ("RGB", "RGBA", "L", "P", "LA")[seed % 5]
    return Image.new("RGB", (60, 40), (seed * 37 % 256, 90, 200)).convert(mode)


def as_parts(messages: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """The same chat with content as parts, and an image before or behind some questions."""
    rng = random.Random(seed)
    changed = []
    for message in messages:
        parts: list[dict[str, Any]] = [{"type": "text", "text": message["content"]}]
        if message["role"] == "user" and rng.random() < 0.5:
            parts.insert(rng.choice((0, 1)) if seed % 2 else 0, {"type": "image", "image": image(seed)})
        changed.append({"role": message["role"], "content": parts})
    return changed


def rows(name: str, repeats: int) -> list[dict[str, Any]]:
    """Conversations of every category for one family."""
    _, header, stop, system = RENDERERS[name]
    chats = [
        conversation(category, seed, header=header, stop=stop, system=system)
        for category in PLAIN_CATEGORIES
        for seed in range(repeats)
    ]
    return [{"conversation": as_parts(chat, seed)} for seed, chat in enumerate(chats)]


def run(name: str, repeats: int, processor: Any = None) -> Outcome:
    """Collate each conversation and compare its labels with the oracle's."""
    processor = processor or processors.build(name)
    collator = VLMCollator(processor, allow_unlabelled=True)
    outcome = Outcome(collator.family.name)
    media = media_token_ids(processor)
    for row in rows(name, repeats):
        try:
            batch = collator([row])
        except UnprovenSpanError:
            outcome.refused += 1
            continue
        full = [*batch["input_ids"][0].tolist()]
        expected = expected_labels_of(name, full, int(batch["labels"][0, -1]), processor, media, row)
        if batch["labels"][0].tolist() == expected[1:]:
            outcome.labelled += 1
        else:
            outcome.wrong += 1
    return outcome


def expected_labels_of(
    name: str, shortened: list[int], last_label: int, processor: Any, media: set[int], row: dict[str, Any]
) -> list[int]:
    """The oracle's labels; the id that the shift took from the row's end is found by trying the closings."""
    pieces = RENDERERS[name][0](copy.deepcopy(row["conversation"]))
    tokenizer = processor.tokenizer
    candidates = [last_label] if last_label >= 0 else tokenizer("\n x ")["input_ids"] + tokenizer.all_special_ids
    for last in candidates:
        try:
            return expected_labels([*shortened, last], tokenizer, media, pieces)
        except AssertionError:
            continue
    raise AssertionError(f"{name}: tokens do not spell the chat {pieces}")
