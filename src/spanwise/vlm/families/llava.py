"""LLaVA 1.5 and 1.6: one square image, or tiles, behind ``<image>``."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

FAMILY = FamilySpec("LLaVA", ("LlavaProcessor", "LlavaNextProcessor"), media_tokens=("<image>",))
