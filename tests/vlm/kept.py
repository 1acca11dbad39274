"""What packs and pads keep of a family's batch, compared with the plain batch: keys, counts and values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from spanwise.vlm import PreTokenizedDatasetWrapper, VLMCollator
from spanwise.vlm.collate_fns import neat_packed_vlm_collater, packed_sequence_thd_vlm_collater, pad_collate_fn
from spanwise.vlm.families import TOKEN_KEYS
from spanwise.vlm.packing import pack
from tests.vlm import processors

HEARS = ("qwen3_omni", "gemma4", "phi4_multimodal", "nemotron_omni")
# cu_seqlens and positions say in THD what the mask says elsewhere.
NOT_IN_THD = {"attention_mask"}
# Behind a clip's end, and in the frames that reach over it, stands what the extractor makes of silence.
HIDDEN_BY = {"input_features": "feature_attention_mask", "audio_input_features": "audio_attention_mask"}


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "conversation": [
            {"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]},
        ]
    }


def image(*size: int) -> dict[str, Any]:
    return {"type": "image", "image": Image.effect_noise((size[0], size[1]), 60).convert("RGB")}


def sound(samples: int) -> dict[str, Any]:
    return {"type": "audio", "audio": np.sin(np.arange(samples, dtype=np.float32) / 9)}


def rows(kind: str) -> list[dict[str, Any]]:
    """Two images and one, of unlike sizes, or two clips of unlike length; and a row of text between them."""
    if kind == "audio":
        return [chat(sound(8000)), chat(), chat(sound(3200))]
    return [chat(image(60, 40), image(30, 90)), chat(), chat(image(60, 60))]


def losses(name: str, kind: str) -> dict[str, list[str]]:
    """Keys that a pad, a neat pack and a THD pack lack, and keys whose values differ from the plain batch's."""
    processor = processors.build(name)
    examples = rows(kind)
    plain = VLMCollator(processor)(examples)
    inner = PreTokenizedDatasetWrapper(examples, processor, inject_fake_images=False)
    documents = [inner[place] for place in range(len(examples))]
    padded = pad_collate_fn(documents, processor)
    together = pack(documents, 10_000)
    neat, thd = neat_packed_vlm_collater([together]), packed_sequence_thd_vlm_collater([together])
    return {
        "padded": sorted(set(plain) - set(padded)),
        "neat": sorted(set(plain) - set(neat)),
        "thd": sorted(set(plain) - set(thd) - NOT_IN_THD),
        "changed": [key for key in plain if not same(key, plain, padded)],
        "changed in packs": [key for key in plain if key not in TOKEN_KEYS and not same(key, plain, neat, summed=True)],
    }


def same(key: str, plain: Any, other: Any, *, summed: bool = False) -> bool:
    """Equal values, at the precision in which pads carry pixels; a pack's counts are sums."""
    one, two = plain[key], other[key]
    if not isinstance(one, torch.Tensor):
        return one == two
    if summed and key in ("n_images_per_sample", "n_videos_per_sample"):
        return int(one.sum()) == int(two.sum())
    mask = plain.get(HIDDEN_BY.get(key, ""))
    if mask is not None and one.shape == two.shape:
        heard = torch.nn.functional.pad(mask[:, 2:], (0, 2))
        hidden = (heard == 0).unsqueeze(1 if one.shape[2] == mask.shape[1] else 2)
        one, two = one.masked_fill(hidden, 0), two.masked_fill(hidden, 0)
    if len(one) != len(two):  # in a plain batch a row without images may be a row of zeros
        one = one[[index for index in range(len(one)) if one[index].any()]]
    return one.shape == two.shape and torch.equal(one.bfloat16(), two.bfloat16())
