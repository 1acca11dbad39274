"""Remote code and test doubles: called in their family's style, labelled by alignment or by a builder that sees ids.

They promise no offsets of what they replace. One with a chat template and a tokenizer of transformers still has its
labels proven, by aligning the rendered text's tokens around the media; for the others a builder must do. Everything
behind the call is the one pipeline. O(tokens) beside the object's own work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spanwise.batch import BatchedDataDict
from spanwise.spans.chat import AssistantSpans
from spanwise.vlm.audio import clips_of_rows, sampling_rate
from spanwise.vlm.checks import conversations_of, refuse_unreadable, renumbered, said_by_row
from spanwise.vlm.families import FamilySpec
from spanwise.vlm.labels import labels_of_row
from spanwise.vlm.media import copied_in_rgb, flat_media, gather
from spanwise.vlm.nemotron import omni_batch
from spanwise.vlm.pipeline import (
    Example,
    Settings,
    can_prove,
    finished,
    hooked,
    is_own_class,
    is_transformers,
    rendered_rows,
    template_source,
)
from spanwise.vlm.reading import as_template_reads
from spanwise.vlm.remote import kimi_vl_call, phi4_call
from spanwise.vlm.tokens import drop_overlong

# (processor, conversations, rows, max_length) -> what the processor makes of them
Call = Callable[[Any, list[Any], list[Example], int | None], dict[str, Any]]

# Families whose remote code is called neither by a template nor by texts and flat lists alone.
CALLS: dict[str, Call] = {
    "Kimi-VL": kimi_vl_call,
    "Nemotron-Nano-Omni": omni_batch,
    "Phi-4-multimodal": phi4_call,
}


def takes_common_call(processor: Any, family: FamilySpec) -> bool:
    """Whether the pipeline's own call suits: transformers' classes, and remote code of a family without its own."""
    own_style = family.name in CALLS or family.call == "per_sample"
    return can_prove(processor) and (is_own_class(processor) or not own_style)


def collate_called(
    examples: Sequence[Example],
    processor: Any,
    settings: Settings,
    call: Call | None = None,
    find: AssistantSpans | None = None,
) -> BatchedDataDict:
    """Collate rows with an object that is called in a style of its own.

    Args:
        examples: rows with "conversation"; not changed.
        processor: remote code, or any object that behaves like its family's processor.
        settings: ``labels="proven"`` aligns where it can; else, and for other objects, ``builder`` labels.
        call: how the object is called; None is its family's style.
        find: the span finder of an earlier call.
    """
    conversations: list[Any] = copied_in_rgb(conversations_of(examples, need_assistant=not settings.allow_unlabelled))
    if can_prove(processor):
        conversations = as_template_reads(conversations, template_source(processor))
        media = gather(conversations)
        heard = clips_of_rows(media.audio, examples, sampling_rate(processor))
        refuse_unreadable(conversations, replace(media, audio=heard), processor)
    kept = list(range(len(examples)))
    if settings.drop_overlong and settings.max_length is not None:
        conversations, kept = drop_overlong(conversations, processor, settings.max_length)
    if (call := call or CALLS.get(settings.family.name)) is None:
        _refuse_without_template(processor)
        call = _common_call(settings)

    def called(rows: Sequence[int]) -> dict[str, Any]:
        chats = [conversations[kept.index(row)] for row in rows]
        return call(processor, chats, [examples[row] for row in rows], settings.max_length)

    batch = said_by_row(called, kept, processor)
    if settings.hook is not None:
        batch = hooked(batch, processor, settings.hook)
    if settings.labels == "proven" and can_prove(processor):
        batch["labels"] = aligned_labels(batch, conversations, processor, find)
    elif settings.builder is not None and "labels" not in batch:
        batch["labels"] = settings.builder(batch["input_ids"], conversations, processor)
    rows = [examples[row] for row in kept]
    done = finished(batch, conversations, rows, processor, replace(settings, hook=None, labels="template"))
    if len(kept) < len(examples):
        done["left_out"] = {"overlong": len(examples) - len(kept)}
    return done


def _refuse_without_template(processor: Any) -> None:
    bare = is_transformers(processor) and template_source(processor) is None
    if bare or not hasattr(processor, "apply_chat_template"):
        raise ValueError(
            f"a {type(processor).__name__} without a chat template was given; expected a processor or tokenizer that "
            "renders conversations. It belongs to a base model, or is only a part of a processor. Fix: set "
            "processor.chat_template, or load the processor of the instruction-tuned model."
        )


def aligned_labels(
    batch: dict[str, Any], conversations: list[Any], processor: Any, find: AssistantSpans | None = None
) -> Tensor:
    """Labels [B, S], not shifted: the rendered chats' own tokens aligned with each row around its media."""
    rendered = rendered_rows(find or AssistantSpans(template_source(processor)), conversations)
    masks = batch.get("attention_mask", [None] * len(rendered))
    labels = []
    for row, (ids, mask, (text, spans)) in enumerate(zip(batch["input_ids"], masks, rendered, strict=True)):
        with renumbered(row):
            labels.append(labels_of_row(ids, mask, text, spans, offsets=None, replacements=None, processor=processor))
    return torch.stack(labels)


def _common_call(settings: Settings) -> Call:
    def by_template(processor: Any, conversations: list[Any], _: list[Example], max_length: int | None) -> Any:
        """One batched ``apply_chat_template`` that tokenizes."""
        arguments: dict[str, Any] = {"padding": True, "truncation": True}
        if max_length is not None:
            arguments |= {"padding": "max_length", "max_length": max_length}
            arguments["truncation"] = not settings.drop_overlong
        return dict(
            processor.apply_chat_template(
                conversations, tokenize=True, return_tensors="pt", return_dict=True, **arguments
            )
        )

    def by_media(processor: Any, conversations: list[Any], _: list[Example], max_length: int | None) -> Any:
        """Rendered texts and flat media lists in one call."""
        texts = [processor.apply_chat_template(conversation, tokenize=False) for conversation in conversations]
        images, videos = flat_media(conversations)
        named = {settings.family.images: images, settings.family.videos: videos}
        return dict(processor(text=texts, **named, padding=True, return_tensors="pt", **settings.family.options))

    return by_template if settings.family.call == "batched_template" else by_media
