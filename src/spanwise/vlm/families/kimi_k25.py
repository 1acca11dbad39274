"""Kimi-K2.5: its own processor leaves one placeholder per image, which the grid expands before the model sees it."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

FAMILY = FamilySpec(
    "Kimi-K2.5",
    ("KimiK25Processor", "Kimi_K25Processor"),
    call="per_sample",
    images="medias",
    cast=None,
    media_tokens=("<|media_start|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"),
)
