"""LLaVA-OneVision: tiles in any resolution for an image that stands alone, one tile each for several; videos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spanwise.vlm.families.spec import FamilySpec


def image_tokens(processor: Any, sizes: Sequence[tuple[int, int]]) -> list[int]:
    """The processor's own count, which knows no conversations: of several images each is one tile and a line's end."""
    if len(sizes) > 1:
        tile = processor.num_image_tokens + 1
        return [tile - (processor.vision_feature_select_strategy == "default")] * len(sizes)
    counted = processor._get_num_multimodal_tokens(image_sizes=[list(size) for size in sizes])
    return [int(count) for count in counted.num_image_tokens]


FAMILY = FamilySpec(
    "LLaVA-OneVision",
    ("LlavaOnevisionProcessor", "LlavaOneVisionProcessor"),
    call="text_and_media",
    cast=None,
    options={"do_sample_frames": False},
    media_tokens=("<image>", "<video>"),
    image_tokens=image_tokens,
)
