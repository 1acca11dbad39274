"""Nemotron-Nano-Omni: images, one video and one waveform per sample, each sample through the processor alone."""

from __future__ import annotations

from spanwise.vlm.families.spec import FamilySpec

FAMILY = FamilySpec(
    "Nemotron-Nano-Omni",
    ("NemotronH_Nano_Omni_Reasoning_V3Processor", "NemotronH_Omni_Reasoning_V3Processor"),
    call="per_sample",
    media_tokens=("<image>", "<video>", "<so_embedding>", "<so_start>", "<so_end>", "<img>", "</img>"),
)
