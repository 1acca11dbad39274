"""A model configuration from the fields of a recipe. transformers takes any field and builds something: a misspelt
``hiden_size`` would train another model than the one that was meant, so every field must be one that the model knows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from spanwise.train.nearest import did_you_mean

# What transformers itself turns into today's fields.
OLDER_NAMES = frozenset({"rope_theta", "rope_scaling", "torch_dtype", "attn_implementation"})


def model_config(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    """The configuration of random weights.

    Args:
        fields: ``student.model`` of a recipe, ``model_type`` among them.
        defaults: what stands where ``fields`` says nothing (vocabulary, special ids).

    Raises:
        ValueError: the type or a field is unknown, or values do not fit each other.
    """
    from transformers import CONFIG_MAPPING

    if "model_type" not in fields:
        raise ValueError(
            f"student.model has the fields {', '.join(fields)}; expected model_type among them (llama, qwen2, …), "
            "which says what to build. Fix: add student.model.model_type."
        )
    kind = fields["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"student.model.model_type is {kind!r}, which transformers does not know; expected a name as llama, qwen2 "
            f"or spanwise_mlm. It is probably misspelt{did_you_mean(kind, CONFIG_MAPPING) or '.'} Fix: take the "
            "model_type that stands in the config.json of such a model."
        )
    own = {name: value for name, value in fields.items() if name != "model_type"}
    config_class: Any = CONFIG_MAPPING[kind]
    _check_names(config_class, own, "student.model")
    try:
        return config_class(**{**defaults, **own})
    except Exception as error:  # each family checks in its own way
        reason = str(error).strip().splitlines()[-1].strip()
        raise ValueError(
            f"student.model is no {kind} that can be built ({reason}); expected fields that fit each other. One was "
            "probably changed without the others. Fix: change the value it names."
        ) from error


def _check_names(config_class: Any, fields: Mapping[str, Any], where: str) -> None:
    parts = getattr(config_class, "sub_configs", {})
    known = _known_names(config_class) | set(parts)
    for name, value in fields.items():
        if name not in known:
            raise ValueError(
                f"{where}.{name} is no field of {config_class.__name__}; expected one, since any other would be "
                f"ignored. It is probably misspelt{did_you_mean(name, known) or '.'} Fix: correct it, or take it out."
            )
        inner = parts.get(name)
        if isinstance(value, Mapping) and hasattr(inner, "to_dict"):
            _check_names(inner, value, f"{where}.{name}")


def _known_names(config_class: Any) -> set[str]:
    """Every name that a configuration takes: its own fields, what all have in common, their other and older names."""
    names = set(inspect.signature(config_class.__init__).parameters) | set(getattr(config_class, "attribute_map", {}))
    if dataclasses.is_dataclass(config_class):
        names |= {field.name for field in dataclasses.fields(config_class)}
    for part in getattr(config_class, "sub_configs", {}).values():
        # Families with a text part also take its fields at the top.
        names |= _known_names(part) if hasattr(part, "to_dict") else set()
    with contextlib.suppress(Exception):  # a family that cannot be built from defaults alone
        names |= set(config_class().to_dict())
    return names | OLDER_NAMES
