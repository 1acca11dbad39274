"""The model families, one small file each, and how a processor finds its own."""

from __future__ import annotations

from typing import Any

from spanwise.vlm.families import (
    default,
    gemma3,
    gemma4,
    idefics3,
    internvl,
    kimi_k25,
    kimi_vl,
    llava,
    llava_onevision,
    nemotron_omni,
    nemotron_parse,
    phi4_multimodal,
    pixtral,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_omni,
    qwen3_vl,
)
from spanwise.vlm.families.spec import TOKEN_AXES, TOKEN_KEYS, FamilySpec

DEFAULT = default.FAMILY
FAMILIES = (
    qwen2_vl.FAMILY,
    qwen2_5_vl.FAMILY,
    qwen3_vl.FAMILY,
    qwen3_omni.FAMILY,
    llava.FAMILY,
    llava_onevision.FAMILY,
    gemma3.FAMILY,
    gemma4.FAMILY,
    phi4_multimodal.FAMILY,
    kimi_vl.FAMILY,
    kimi_k25.FAMILY,
    nemotron_parse.FAMILY,
    nemotron_omni.FAMILY,
    internvl.FAMILY,
    idefics3.FAMILY,
    pixtral.FAMILY,
    DEFAULT,
)
_BY_PROCESSOR = {name: family for family in FAMILIES for name in family.processors}


def family_of(processor: Any) -> FamilySpec:
    """The family whose processor this is, by class name, base classes included; ``default`` if none claims it.

    >>> family_of(type("Qwen2_5_VLProcessor", (), {})()).name, family_of(object()).name
    ('Qwen2.5-VL', 'default')
    """
    for base in type(processor).__mro__:
        if base.__name__ in _BY_PROCESSOR:
            return _BY_PROCESSOR[base.__name__]
    return DEFAULT


__all__ = ["DEFAULT", "FAMILIES", "TOKEN_AXES", "TOKEN_KEYS", "FamilySpec", "family_of"]
