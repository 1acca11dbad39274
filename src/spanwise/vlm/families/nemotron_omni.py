"""Nemotron-Nano-Omni: images, one video and one waveform per sample, each sample through the processor alone."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from spanwise.vlm.families.spec import FamilySpec


def image_tokens(processor: Any, sizes: Sequence[tuple[int, int]]) -> list[int]:
    """transformers' grid rule for this processor, and the two marks around an image; 1 where it has no such rule."""
    images = processor.image_processor
    grid = getattr(importlib.import_module(type(images).__module__), "get_patch_grid_size", None)
    if grid is None:
        return [1] * len(sizes)
    merge = round(1 / images.downsample_ratio)
    least, most = images.min_num_patches, images.max_num_patches
    budget = max((images.max_model_len - 4) * merge**2, least * len(sizes))
    budget = max(min(budget, most) if most else budget, least)
    grids = [grid(height, width, images.patch_size, merge, least, budget) for height, width in sizes]
    return [rows * columns // merge**2 + 2 for rows, columns in grids]


FAMILY = FamilySpec(
    "Nemotron-Nano-Omni",
    ("NemotronH_Nano_Omni_Reasoning_V3Processor", "NemotronH_Omni_Reasoning_V3Processor"),
    call="per_sample",
    media_tokens=("<image>", "<video>", "<so_embedding>", "<so_start>", "<so_end>", "<img>", "</img>"),
    image_tokens=image_tokens,
)
