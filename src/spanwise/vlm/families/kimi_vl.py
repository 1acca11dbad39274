"""Kimi-VL: a media run per image, no special tokens beyond the template's."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

FAMILY = FamilySpec(
    "Kimi-VL",
    ("KimiVLProcessor",),
    call="text_and_media",
    cast=None,
    options={"add_special_tokens": False},
    media_tokens=("<|media_start|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"),
)
