"""The configuration of the rotary encoder as a transformers model.

It stands apart from the model because transformers may ask for configurations while its own model classes are still
being loaded: nothing here may import them. O(1).
"""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from spanwise.mlm.model import MODEL_TYPE, RotaryTransformerMLMModel


class RotaryTransformerConfig(PreTrainedConfig):
    """The constructor's arguments of :class:`RotaryTransformerMLMModel`, under their own names."""

    model_type = MODEL_TYPE
    attribute_map = {"vocab_size": "num_embeddings"}  # noqa: RUF012  # transformers' own declaration

    def __init__(
        self, num_embeddings: int = 30522, d_model: int = 384, num_layers: int = 4, nhead: int = 6, **options: Any
    ) -> None:
        known = signature(RotaryTransformerMLMModel.__init__).parameters
        self.num_embeddings, self.d_model, self.num_layers, self.nhead = num_embeddings, d_model, num_layers, nhead
        for name, parameter in known.items():
            if parameter.default is not Parameter.empty:
                setattr(self, name, options.pop(name, parameter.default))
        rest: Any = {"tie_word_embeddings": False, **options}  # transformers checks its own names
        super().__init__(**rest)

    def _get_generation_parameters(self) -> dict[str, Any]:
        return {}  # max_length is the model's room here, not a setting of generation

    def model_arguments(self) -> dict[str, Any]:
        """What the model's constructor takes."""
        names = set(RotaryTransformerMLMModel.__init__.__annotations__) - {"return"}
        return {name: getattr(self, name) for name in names}
