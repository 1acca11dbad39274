"""Qwen3-Omni: images, videos and audio, padded on the right."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

FAMILY = FamilySpec(
    "Qwen3-Omni",
    ("Qwen3OmniMoeProcessor", "Qwen2_5OmniProcessor"),
    call="text_and_media",
    cast=None,
    options={"padding_side": "right"},
    media_tokens=(
        "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|audio_start|>", "<|audio_end|>",
        "<|audio_pad|>",
    ),
    three_axes=True,
)  # fmt: skip
