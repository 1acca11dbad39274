"""A Qwen2.5-VL of random weights that fits the tiny processor: transformers' own class, two layers each."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration


def qwen2_5_vl_model(tokenizer: Any, hidden: int = 32) -> Qwen2_5_VLForConditionalGeneration:
    ids = tokenizer.convert_tokens_to_ids
    text = {
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": len(tokenizer), "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": None, "eos_token_id": ids("<|im_end|>"), "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_heads": 2, "out_hidden_size": hidden,
        "fullatt_block_indexes": [1], "window_size": 112, "patch_size": 14,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"), vision_end_token_id=ids("<|vision_end|>"),
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(config).eval()
