"""Gemma 3 and 3n: a fixed run of soft tokens per image, which see each other both ways."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

FAMILY = FamilySpec(
    "Gemma 3",
    ("Gemma3Processor", "Gemma3nProcessor"),
    media_tokens=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    two_way=True,
)
