"""Gemma 4: soft tokens per image, audio, and a thinking channel before every answer (``gemma4_prefix_collate_fn``)."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

FAMILY = FamilySpec(
    "Gemma 4",
    ("Gemma4Processor", "Gemma4UnifiedProcessor"),
    media_tokens=("<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>"),
    two_way=True,  # the larger models; which one will be trained, the processor does not say
)
