"""Conversations with images through TRL's vision collator, and through transformers' own template call.

``way`` is ``assistant`` (TRL, assistant_only_loss, a template with generation marks), ``default`` (TRL as it comes),
``completion`` (TRL, prompt and completion: the last answer is trained on), ``mask`` (transformers' assistant mask, the
same marks) or ``plain`` (transformers, no labels).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from benchmarks.peer_sides.serve import measured, serve
from benchmarks.peer_sides.vision_work import Chat, marked_template, read_chats, released, timed_batch
from tests.vlm import processors

Collate = Callable[[Sequence[Chat]], Any]


def collator(processor: Any, name: str, way: str) -> Collate:
    """What turns conversations into a batch."""
    processor = copy.copy(processor)
    if way in ("assistant", "mask"):
        processor.chat_template = marked_template(name)
    if way in ("mask", "plain"):
        return lambda chats: processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=way == "mask",
            processor_kwargs={"padding": True, "padding_side": "right"},
        )  # fmt: skip
    collate = DataCollatorForVisionLanguageModeling(
        processor, assistant_only_loss=way == "assistant", completion_only_loss=way == "completion"
    )
    return lambda chats: collate([example(chat, way) for chat in chats])


def example(chat: Chat, way: str) -> dict[str, Any]:
    """A row as TRL wants it: images apart, placeholders in the text."""
    images = [part["image"] for message in chat for part in message["content"] if part["type"] == "image"]
    bare = [
        {
            "role": message["role"],
            "content": [{"type": "image"} if part["type"] == "image" else part for part in message["content"]],
        }
        for message in chat
    ]
    if way == "completion":
        return {"images": images, "prompt": bare[:-1], "completion": bare[-1:]}
    return {"images": images, "messages": bare}


class Theirs:
    """Every way of the two libraries."""

    def labels(self, name: str, file: str, way: str) -> list[dict[str, Any]]:
        """Ids and labels of every conversation, or what was raised."""
        collate = collator(processors.build(name), name, way)
        found: list[dict[str, Any]] = []
        for chat in read_chats(file):
            try:
                batch = collate([chat])
            except Exception as error:  # whatever it is, the conversation has no labels
                found.append({"error": f"{type(error).__name__}: {error}"})
            else:
                found.append({"ids": batch["input_ids"][0].tolist(), "labels": batch["labels"][0].tolist()})
        return found

    def collate(self, name: str, way: str, repeats: int) -> list[dict[str, float]]:
        """Seconds of the same batch, the first call left out."""
        collate, chats = collator(released(name), name, way), timed_batch()
        collate(chats)
        return [measured(lambda: collate(chats))[0] for _ in range(repeats)]


if __name__ == "__main__":
    serve(Theirs())
