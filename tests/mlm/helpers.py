"""A tokenizer of bare ids and small models, ours and transformers', for tests of this room."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from spanwise.mlm import RotaryTransformerMLMModel

PAD, MASK, BOS, EOS = 0, 1, 2, 3
SIZES = {
    "vocab_size": 30, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": PAD,
}  # fmt: skip
XLM_SIZES = {"vocab_size": 30, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "pad_index": PAD, "pad_token_id": PAD}
# One layer attends to all, the other to two tokens on each side.
SPECIAL = {"cls_token_id": BOS, "sep_token_id": EOS, "bos_token_id": BOS, "eos_token_id": EOS}
WINDOW = {"local_attention": 4, "global_attn_every_n_layers": 2, "attn_implementation": "sdpa"}
BACKBONES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", SIZES),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", SIZES | SPECIAL | WINDOW),
    "xlm": ("XLMWithLMHeadModel", "XLMConfig", XLM_SIZES),
    "flaubert": ("FlaubertWithLMHeadModel", "FlaubertConfig", XLM_SIZES),
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES | {"bos_token_id": None, "eos_token_id": None}),
}


def backbone(name: str, *, sharp: bool = False) -> Any:
    """A transformers model with random weights; ``sharp`` ones make what it says depend on every token and place."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kind, config, sizes = BACKBONES[name]
        model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()
        for parameter in model.parameters() if sharp else ():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.4)
    return model


class IdTokenizer:
    """Ids in, ids out as text; PAD 0, MASK 1, BOS 2, EOS 3."""

    pad_token_id, mask_token_id, bos_token_id, eos_token_id = PAD, MASK, BOS, EOS

    def __init__(self, size: int = 30) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def batch_decode(self, ids: torch.Tensor, skip_special_tokens: bool = True) -> list[str]:
        first = 4 if skip_special_tokens else 0
        return [" ".join(str(token) for token in row if token >= first) for row in ids.tolist()]


def small_model(size: int = 30, seed: int = 0, **options: object) -> RotaryTransformerMLMModel:
    """Two layers of 16 channels, with a head that is not nearly uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        arguments = {"dropout": 0.0, "rotary_emb_dim": 4, "max_length": 64, **options}
        model = RotaryTransformerMLMModel(size, 16, 2, 2, **arguments)
        torch.nn.init.normal_(model.output_layer.linear.weight, std=0.7)
    return model.eval()


def ragged_batch(lengths: list[int], width: int, seed: int = 0, size: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, size, (len(lengths), width), generator=generator)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return ids.masked_fill(~mask, PAD), mask
