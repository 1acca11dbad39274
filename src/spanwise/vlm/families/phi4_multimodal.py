"""Phi-4-multimodal: images and audio, told apart by ``input_mode``; the tokenizer holds the chat template."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

FAMILY = FamilySpec(
    "Phi-4-multimodal",
    ("Phi4MultimodalProcessor", "Phi4MMProcessor"),
    call="text_and_media",
    cast=None,
    media_tokens=("<|image|>", "<|audio|>", "<|endoftext10|>", "<|endoftext11|>"),
    drop=("input_image_embeds", "image_sizes", "image_attention_mask"),
)
