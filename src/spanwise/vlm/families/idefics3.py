"""Idefics3 and SmolVLM: tiles in rows and columns, each named by a token of its own."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))

FAMILY = FamilySpec(
    "Idefics3/SmolVLM",
    ("Idefics3Processor", "SmolVLMProcessor"),
    media_tokens=("<image>", "<fake_token_around_image>", "<global-img>", *_TILES),
)
