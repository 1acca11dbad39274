"""LLaVA-OneVision: tiles in any resolution, videos; spelt in two ways."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

FAMILY = FamilySpec(
    "LLaVA-OneVision",
    ("LlavaOnevisionProcessor", "LlavaOneVisionProcessor"),
    call="text_and_media",
    cast=None,
    options={"do_sample_frames": False},
    media_tokens=("<image>", "<video>"),
)
