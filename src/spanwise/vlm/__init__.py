"""Collate functions for vision-language models: sixteen families, one pipeline, labels that are proven."""

from __future__ import annotations

from spanwise.vlm.collator import VLMCollator
from spanwise.vlm.families import FAMILIES, FamilySpec, family_of
from spanwise.vlm.packing import PackedDatasetWrapper, exact_lengths
from spanwise.vlm.pretokenized import PreTokenizedDatasetWrapper
from spanwise.vlm.robust import RobustCollate, make_robust_collate

__all__ = [
    "FAMILIES",
    "FamilySpec",
    "PackedDatasetWrapper",
    "PreTokenizedDatasetWrapper",
    "RobustCollate",
    "VLMCollator",
    "exact_lengths",
    "family_of",
    "make_robust_collate",
]
