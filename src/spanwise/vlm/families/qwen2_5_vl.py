"""Qwen2.5-VL: Qwen2-VL's layout with seconds per frame; its processor also serves LLaVA-OneVision-1.5."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

FAMILY = FamilySpec(
    "Qwen2.5-VL",
    ("Qwen2_5_VLProcessor",),
    call="text_and_media",
    cast=None,
    options={"do_sample_frames": False},
    media_tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    three_axes=True,
)
