"""A vision-language model in a plain loop: VLMCollator, a Qwen2.5-VL of random weights, scikit-learn's digits.

Run: python examples/vlm_digits.py [STEPS]. It needs pip install 'spanwise[vlm]' scikit-learn and one to five minutes
on two cores. The same run from a recipe: spanwise train recipes/vlm-digits.yaml.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from spanwise.batch import for_trainer
from spanwise.train.digits import DIGITS, HELD_OUT, QUESTIONS, WORDS, digit_rows
from spanwise.train.vlm import with_other_images
from spanwise.train.vlm_processor import small_processor
from spanwise.vlm import VLMCollator


def small_model(tokenizer: Any) -> Qwen2_5_VLForConditionalGeneration:
    """Two layers of width 64 for text and for images."""
    ids = tokenizer.convert_tokens_to_ids
    text = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64,
        "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1],
    }  # fmt: skip
    marks = {name: ids(f"<|{word}|>") for name, word in (
        ("image_token_id", "image_pad"), ("video_token_id", "video_pad"),
        ("vision_start_token_id", "vision_start"), ("vision_end_token_id", "vision_end"),
    )}  # fmt: skip
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **marks)
    return Qwen2_5_VLForConditionalGeneration(config)


@torch.no_grad()
def exact_answers(model: Any, collate: Any, rows: list[dict[str, Any]]) -> float:
    """The share of rows whose every labelled token is the model's first choice."""
    right = 0
    for start in range(0, len(rows), 64):
        inputs = collate(rows[start : start + 64])
        labels = inputs.pop("labels")
        inputs.pop("shift_labels")
        chosen = model(**inputs).logits.argmax(-1)
        right += int(((chosen == labels) | (labels == -100)).all(dim=1).sum())
    return right / len(rows)


def main(steps: int = 600) -> None:
    """Train, then ask about digits that were held out, with their own image and with another."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    train, held_out = digit_rows(DIGITS), digit_rows(DIGITS + HELD_OUT)
    processor = small_processor([*QUESTIONS, *WORDS, "user", "assistant"], 320, pixels=56 * 56)
    collate = for_trainer(VLMCollator(processor))
    model = small_model(processor.tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, max(0.02, 1 - step / steps))
    )
    generator = torch.Generator().manual_seed(0)
    began = time.perf_counter()
    for step in range(steps):
        chosen = torch.randint(len(train), (32,), generator=generator).tolist()
        loss = model(**collate([train[row] for row in chosen])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    model.eval()
    print(f"exact answers: {exact_answers(model, collate, held_out):.3f}")
    print(f"with another row's image: {exact_answers(model, collate, with_other_images(held_out)):.3f}")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
