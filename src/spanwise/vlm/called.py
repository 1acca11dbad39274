"""Objects that are not transformers' own: called in their family's style, labelled by a builder that looks at ids.

Remote code and test doubles promise no offsets and no template that can be rendered twice, so nothing is proven here;
everything behind the call is the one pipeline. O(tokens) beside the object's own work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from spanwise.batch import BatchedDataDict
from spanwise.vlm.media import copied_in_rgb, flat_media
from spanwise.vlm.pipeline import Example, Settings, conversations_of, finished
from spanwise.vlm.tokens import drop_overlong

Call = Callable[[list[Any], list[Example]], dict[str, Any]]


def collate_called(
    examples: Sequence[Example], processor: Any, settings: Settings, call: Call | None = None
) -> BatchedDataDict:
    """Collate rows with any other object: called in its family's style, labelled by ``settings.builder``."""
    conversations: list[Any] = copied_in_rgb(conversations_of(examples, need_assistant=False))
    kept = list(range(len(examples)))
    if settings.drop_overlong and settings.max_length is not None:
        conversations, kept = drop_overlong(conversations, processor, settings.max_length)
    rows = [examples[row] for row in kept]
    common = _template_call if settings.family.call == "batched_template" else _media_call
    batch = (call or common(processor, settings))(conversations, rows)
    if settings.hook is not None:
        batch = settings.hook(batch, processor)
    if settings.builder is not None and "labels" not in batch:
        batch["labels"] = settings.builder(batch["input_ids"], conversations, processor)
    after = replace(settings, hook=None, allow_unlabelled=True, labels="template")
    done = finished(batch, conversations, rows, processor, after)
    if len(kept) < len(examples):
        done["left_out"] = {"overlong": len(examples) - len(kept)}
    return done


def _template_call(processor: Any, settings: Settings) -> Call:
    """One batched ``apply_chat_template`` that tokenizes."""

    def call(conversations: list[Any], _: list[Example]) -> dict[str, Any]:
        arguments: dict[str, Any] = {"padding": True, "truncation": True}
        if settings.max_length is not None:
            arguments |= {"padding": "max_length", "max_length": settings.max_length}
            arguments["truncation"] = not settings.drop_overlong
        return dict(
            processor.apply_chat_template(
                conversations, tokenize=True, return_tensors="pt", return_dict=True, **arguments
            )
        )

    return call


def _media_call(processor: Any, settings: Settings) -> Call:
    """Rendered texts and flat media lists in one call."""

    def call(conversations: list[Any], _: list[Example]) -> dict[str, Any]:
        texts = [processor.apply_chat_template(conversation, tokenize=False) for conversation in conversations]
        images, videos = flat_media(conversations)
        named = {settings.family.images: images, settings.family.videos: videos}
        return dict(processor(text=texts, **named, padding=True, return_tensors="pt", **settings.family.options))

    return call
