"""Qwen3-VL: 32-pixel cells, timestamps between the frames of a video."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

FAMILY = FamilySpec(
    "Qwen3-VL",
    ("Qwen3VLProcessor", "Qwen3VLMoeProcessor"),
    call="text_and_media",
    cast=None,
    options={"do_sample_frames": False},
    media_tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    three_axes=True,
)
