"""Phi-4-multimodal: images and audio, told apart by ``input_mode``; the tokenizer holds the chat template."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from spanwise.vlm.families.spec import FamilySpec

_GLOBAL_TOKENS = 256 + 1 + 16  # the whole image in small, the mark behind it, the ends of its lines


def image_tokens(processor: Any, sizes: Sequence[tuple[int, int]]) -> list[int]:
    """The image processor's rule on sizes alone: crops that cover the image, each second patch that is no padding."""
    return [_crop_tokens(processor.image_processor, *size) for size in sizes]


def _crop_tokens(images: Any, height: int, width: int) -> int:
    side, patch, most = images.size["height"], images.patch_size, images.dynamic_hd
    columns, rows = math.ceil(width / side), math.ceil(height / side)
    if columns * rows > most:
        ratios = {(i, j) for i in range(1, most + 1) for j in range(1, most + 1) if i * j <= most}
        ordered = sorted(ratios, key=lambda ratio: ratio[0] * ratio[1])
        columns, rows = images.find_closest_aspect_ratio(width / height, ordered, width, height, side)
    wide, high = side * columns / width, side * rows / height
    below = side * rows - int(height * wide) if wide < high else 0
    beside = 0 if wide < high else side * columns - int(width * high)
    seen_columns = _seen(columns, side // patch, beside // patch)
    seen_rows = _seen(rows, side // patch, below // patch)
    return _GLOBAL_TOKENS + seen_rows * seen_columns + seen_rows


def _seen(crops: int, patches: int, hidden: int) -> int:
    """Every second patch of each crop along one side, without the patches hidden at its end."""
    shown = crops * patches - hidden
    return sum(math.ceil(min(max(shown - crop * patches, 0), patches) / 2) for crop in range(crops))


FAMILY = FamilySpec(
    "Phi-4-multimodal",
    ("Phi4MultimodalProcessor", "Phi4MMProcessor"),
    call="text_and_media",
    cast=None,
    media_tokens=("<|image|>", "<|audio|>", "<|endoftext10|>", "<|endoftext11|>"),
    drop=("input_image_embeds", "image_sizes", "image_attention_mask"),
    image_tokens=image_tokens,
)
