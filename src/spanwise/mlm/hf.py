"""The rotary encoder as a transformers model, with the same weights under the same names.

Importing this module loads transformers; :mod:`spanwise.mlm.register` does it when transformers itself is imported, so
that ``AutoConfig`` and ``AutoModelForMaskedLM`` know checkpoints of this room. O(1) beyond the model.

Shapes: B rows, S width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from spanwise.batch import IGNORE_INDEX
from spanwise.mlm.hf_config import RotaryTransformerConfig
from spanwise.mlm.layers import RotaryEmbedding
from spanwise.mlm.model import RotaryTransformerMLMModel


class RotaryTransformerForMaskedLM(RotaryTransformerMLMModel, PreTrainedModel):
    """:class:`RotaryTransformerMLMModel` with transformers' arguments and output. Use the former where you can choose.

    ``labels`` are unshifted, -100 where nothing is trained on; the loss is their mean cross-entropy.
    """

    config_class = RotaryTransformerConfig
    base_model_prefix = ""
    main_input_name = "input_ids"

    def __init__(self, config: RotaryTransformerConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self._build(config.model_arguments())
        self.post_init()

    def forward(  # pyrefly: ignore[bad-override]  # transformers' argument names
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        segment_ids: Tensor | None = None,
        where: Tensor | None = None,
        return_dict: bool | None = None,
        **unused: Any,
    ) -> Any:
        """A MaskedLMOutput; with ``where`` the logits of the chosen positions, as the parent returns them."""
        logits = RotaryTransformerMLMModel.forward(
            self, input_ids, attention_mask, position_ids, segment_ids=segment_ids, where=where
        )
        if where is not None:
            return logits
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX
            )
        output: Any = MaskedLMOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.embed_tokens

    def set_input_embeddings(self, value: Any) -> None:
        """Take another token embedding, as transformers does where a vocabulary grows."""
        self.embed_tokens = value
        self.num_embeddings = self.arguments["num_embeddings"] = value.num_embeddings

    def get_output_embeddings(self) -> nn.Module:
        """The untied head."""
        return self.output_layer.linear

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        """Take another head."""
        self.output_layer.linear = new_embeddings

    def save_pretrained(self, folder: Any, **options: Any) -> None:  # pyrefly: ignore[bad-override]
        """Write config and safetensors as transformers does."""
        PreTrainedModel.save_pretrained(self, folder, **options)

    @classmethod
    def from_pretrained(cls, folder: Any, *arguments: Any, **options: Any) -> Any:  # pyrefly: ignore[bad-override]
        """Load as transformers does."""
        return super(RotaryTransformerMLMModel, cls).from_pretrained(folder, *arguments, **options)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, RotaryEmbedding):
            with torch.no_grad():
                module.inv_freq.copy_(RotaryEmbedding(2 * len(module.inv_freq)).inv_freq)
        elif hasattr(module, "reset_parameters") and not any(
            getattr(p, "_is_hf_initialized", False) for p in module.parameters(recurse=False)
        ):
            reset: Any = module.reset_parameters
            reset()
