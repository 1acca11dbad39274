"""What the pipeline must know about a model family: plain data, no code path of its own.

A family is found by its processor's class name, because names are what differs between transformers, remote code and
the versions of both. Adding a family is adding a file with one ``FamilySpec`` and one row to the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

CallStyle = Literal["batched_template", "text_and_media", "per_sample"]

# Every tensor with an axis of tokens, by name (a shape that looks like it may be an accident), and that axis.
TOKEN_AXES = {
    "input_ids": -1,
    "attention_mask": -1,
    "labels": -1,
    "token_type_ids": -1,
    "mm_token_type_ids": -1,
    "position_ids": -1,
    "cross_attention_mask": 1,  # [B, S, images, tiles]
}
TOKEN_KEYS = frozenset(TOKEN_AXES)


@dataclass(frozen=True)
class FamilySpec:
    """One model family.

    Attributes:
        name: how errors, tables and ``VLMCollator.family`` name it.
        processors: class names of its processor, in every spelling in use.
        call: how a processor that is not transformers' own is called: one batched ``apply_chat_template``; rendered
            texts with flat media lists; or one call per sample (its collate function does that).
        images: the processor's argument for images.
        videos: its argument for videos.
        cast: dtype of ``pixel_values`` and ``pixel_values_videos``; None keeps the processor's.
        options: further arguments of every processor call.
        media_tokens: texts of the tokens that stand for media, where the processor does not name them itself.
        drop: keys that the processor of remote code makes and its model does not take. transformers' own keeps them.
        two_way: media tokens attend both ways, so documents of this family cannot be packed.
        three_axes: the model counts positions of media in time, height and width, so packs need its
            ``get_rope_index``.
        image_tokens: how many tokens the images of one conversation become, from their sizes, where the processor
            does not say it or says it wrong.
    """

    name: str
    processors: tuple[str, ...]
    call: CallStyle = "batched_template"
    images: str = "images"
    videos: str = "videos"
    cast: torch.dtype | None = torch.bfloat16
    options: Mapping[str, Any] = field(default_factory=dict)
    media_tokens: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    two_way: bool = False
    three_axes: bool = False
    image_tokens: Callable[[Any, Sequence[tuple[int, int]]], list[int]] | None = None
