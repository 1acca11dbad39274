"""Run in a process of its own: every real processor with torchvision, videos and audio included. Prints JSON lines."""

from __future__ import annotations

import json
from typing import Any

from tests.vlm import torchvision_target

torchvision_target.put_first()

import numpy as np
import torch
from PIL import Image

from spanwise.vlm import VLMCollator, collate_fns
from spanwise.vlm.tokens import media_token_ids
from tests.vlm import processors
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
    return told(name, VLMCollator(processor)([row]))


def told(name: str, batch: Any) -> dict[str, Any]:
    """What stands in a batch of one row."""
    processor = processors.build(name)
    labels = batch["labels"][0]
    media = media_token_ids(processor)
    return {
        "name": name,
        "said": processor.tokenizer.decode(labels[labels != -100]),
        "media_tokens": sum(int(token) in media for token in batch["input_ids"][0]),
        "keys": sorted(batch),
    }


def sound_of_a_video(frames: Any, wave: Any) -> dict[str, Any]:
    """Qwen3-Omni: a clip of its own before a video with sound, read as ``qwen_omni_utils`` reads them."""
    collate_fns.HAVE_QWEN_OMNI_UTILS = True
    collate_fns.process_mm_info = lambda conversation, use_audio_in_video: ([wave[:3200], wave], None, [frames])
    parts = [{"type": "audio", "audio": "a.wav"}, {"type": "video", "video": "b.mp4"}]
    question = {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}
    row = {"conversation": [question, {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]}]}
    processor = processors.build("qwen3_omni")
    batch = collate_fns.qwen3_omni_collate_fn([row], processor, use_audio_in_video=True)
    ids = batch["input_ids"][0].tolist()
    ends = [
        ids.index(processor.tokenizer.convert_tokens_to_ids(f"<|{word}|>")) for word in ("vision_start", "vision_end")
    ]
    heard = ids[slice(*ends)].count(processor.audio_token_id)
    clips = batch["feature_attention_mask"].sum(-1).tolist()
    return told("qwen3_omni", batch) | {
        "heard_inside": heard,
        "heard": ids.count(processor.audio_token_id),
        "clips": clips,
    }


def grids_of_kimi(image: Any) -> dict[str, Any]:
    question = {"role": "user", "content": [image, image, {"type": "text", "text": "what?"}]}
    row = {"conversation": [question, {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]}]}
    batch = collate_fns.kimi_k25_vl_collate_fn([row], processors.build("kimi_k25"))
    grids = {key: batch[key].tolist() for key in ("image_grid_thw", "grid_thws", "image_grid_hws")}
    return told("kimi_k25", batch) | grids | {"n": batch["n_images_per_sample"].tolist()}


def main() -> None:
    torch.set_num_threads(1)
    for make in processors.WITH_TORCHVISION:
        seen = run(make.__name__, 2)
        found = {"family": seen.family, "labelled": seen.labelled, "refused": seen.refused, "wrong": seen.wrong}
        print(json.dumps({"stress": make.__name__, **found}), flush=True)
    image = {"type": "image", "image": Image.new("RGB", (60, 40), (200, 10, 10))}
    frames = [Image.new("RGB", (56, 56), (20 * place, 0, 0)) for place in range(4)]
    wave = np.sin(np.arange(8_000, dtype=np.float32) / 9)
    print(json.dumps({"image": said("phi4_multimodal", image)}), flush=True)
    for name in ("qwen2_vl", "llava_onevision", "internvl"):
        print(json.dumps({"video": said(name, {"type": "video", "video": frames})}), flush=True)
    for name in ("qwen3_omni", "phi4_multimodal", "gemma4"):
        print(json.dumps({"audio": said(name, {"type": "audio", "audio": wave})}), flush=True)
    print(json.dumps({"sound of a video": sound_of_a_video(frames, wave)}), flush=True)
    print(json.dumps({"grids": grids_of_kimi(image)}), flush=True)


if __name__ == "__main__":
    main()
