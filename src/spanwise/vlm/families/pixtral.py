"""Pixtral and Mistral Small 3: rows of patches with a token at the end of each row."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

FAMILY = FamilySpec(
    "Pixtral/Mistral3",
    ("PixtralProcessor", "Mistral3Processor"),
    media_tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
)
