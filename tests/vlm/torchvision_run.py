"""Run in a process of its own: every real processor with torchvision, videos and audio included. Prints JSON lines."""

from __future__ import annotations

import json
from typing import Any

from tests.vlm import torchvision_target

torchvision_target.put_first()

import numpy as np
import torch
from PIL import Image

from spanwise.vlm import VLMCollator
from spanwise.vlm.tokens import media_token_ids
from tests.vlm import processors
from tests.vlm.rendered import RENDERERS
from tests.vlm.stress import run


def said(name: str, *parts: dict[str, Any]) -> dict[str, Any]:
    """One question with media: what was labelled, how many media tokens, which keys."""
    processor = processors.build(name)
    row = {
        "conversation": [
            {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]},
        ]
    }
    batch = VLMCollator(processor)([row])
    labels = batch["labels"][0]
    media = media_token_ids(processor)
    return {
        "name": name,
        "said": processor.tokenizer.decode(labels[labels != -100]),
        "media_tokens": sum(int(token) in media for token in batch["input_ids"][0]),
        "keys": sorted(batch),
    }


def main() -> None:
    torch.set_num_threads(1)
    for name in processors.BUILDERS:
        if name in RENDERERS:
            seen = run(name, 2)
            found = {"family": seen.family, "labelled": seen.labelled, "refused": seen.refused, "wrong": seen.wrong}
            print(json.dumps({"stress": name, **found}), flush=True)
    image = {"type": "image", "image": Image.new("RGB", (60, 40), (200, 10, 10))}
    frames = [Image.new("RGB", (56, 56), (20 * place, 0, 0)) for place in range(4)]
    wave = np.sin(np.arange(8_000, dtype=np.float32) / 9)
    print(json.dumps({"image": said("phi4_multimodal", image)}), flush=True)
    for name in ("qwen2_vl", "llava_onevision", "internvl"):
        print(json.dumps({"video": said(name, {"type": "video", "video": frames})}), flush=True)
    for name in ("qwen3_omni", "phi4_multimodal", "gemma4"):
        print(json.dumps({"audio": said(name, {"type": "audio", "audio": wave})}), flush=True)


if __name__ == "__main__":
    main()
