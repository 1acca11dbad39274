"""Qwen2-VL: 28-pixel cells, one placeholder between vision marks."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

FAMILY = FamilySpec(
    "Qwen2-VL",
    ("Qwen2VLProcessor",),
    call="text_and_media",
    cast=None,
    options={"do_sample_frames": False},
    media_tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    three_axes=True,
)
