"""The two Nemotron processors: a document parser without chat template, and an omni model called once per sample.

O(tokens) beside the processors' own work.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spanwise.spans.chat import span_labels
from spanwise.vlm.audio import waveform
from spanwise.vlm.media import medium_of, parts_of
from spanwise.vlm.remote import padded_rows
from spanwise.vlm.search import assistant_text

Example = Mapping[str, Any]


def parse_inputs(conversations: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Per row the first image that a user shows and the first answer that is not empty."""
    images, targets = [], []
    for conversation in conversations:
        shown = [
            medium_of(part, "image")
            for message in conversation
            if message.get("role") == "user"
            for part in parts_of(message)
            if part.get("type") == "image"
        ]
        said = [assistant_text(message) for message in conversation if message.get("role") == "assistant"]
        images.append(shown[0] if shown else None)
        targets.append(next((text for text in said if text), ""))
    return images, targets


def start_and_pad_ids(tokenizer: Any) -> tuple[int, int]:
    """The decoder's start id and the padding id.

    Raises:
        ValueError: one of them is missing.
    """
    pad_id = getattr(tokenizer, "pad_token_id", None)
    names = ("decoder_start_token_id", "bos_token_id", "eos_token_id")
    start_id = next((value for name in names if (value := getattr(tokenizer, name, None)) is not None), None)
    if pad_id is None or start_id is None:
        raise ValueError(
            f"Nemotron-Parse collate_fn requires pad_token_id and decoder_start_token_id; the tokenizer has {pad_id} "
            f"and {start_id}. A tokenizer of another model was probably given. Fix: set tokenizer.pad_token and "
            "bos_token."
        )
    return start_id, pad_id


def with_start(batch: dict[str, Any], start_id: int) -> dict[str, Any]:
    """Begin every row with the decoder's start id, unless all rows do."""
    ids = batch["input_ids"]
    if bool((ids[:, 0] == start_id).all()):
        return batch
    begun = dict(batch)
    begun["input_ids"] = torch.cat([ids.new_full((len(ids), 1), start_id), ids], dim=1)
    if "attention_mask" in batch:
        mask = batch["attention_mask"]
        begun["attention_mask"] = torch.cat([mask.new_ones((len(mask), 1)), mask], dim=1)
    return begun


def target_labels(input_ids: Tensor, texts: Sequence[str], targets: Sequence[str], tokenizer: Any) -> Tensor | None:
    """Labels of the targets by character offsets, when the tokenizer's own ids stand in each row; else None.

    An end token that the tokenizer puts behind a target is said, too: a model never told to stop does not.
    """
    if not getattr(tokenizer, "is_fast", False):
        return None
    labels = torch.full_like(input_ids, -100)
    for row, (text, target) in enumerate(zip(texts, targets, strict=True)):
        encoded = tokenizer(text, return_offsets_mapping=True)
        ids = torch.tensor(encoded["input_ids"])
        for begin in (0, 1):
            if torch.equal(input_ids[row, begin : begin + len(ids)], ids):
                own = span_labels(ids, encoded["offset_mapping"], [(len(text) - len(target), len(text))])
                if len(ids) > 1 and ids[-1] == getattr(tokenizer, "eos_token_id", None) and own[-2] == ids[-2]:
                    own[-1] = ids[-1]
                labels[row, begin : begin + len(ids)] = own
                break
        else:
            return None
    return labels


def omni_batch(
    processor: Any, conversations: Sequence[Any], examples: Sequence[Example], max_length: int | None
) -> dict[str, Any]:
    """One processor call per sample; images, video frames and sound end to end, text padded.

    Raises:
        ValueError: a sample has two videos, a video that is not a list of frames, or is longer than ``max_length``.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    rate = getattr(processor, "audio_sampling_rate", 16_000)
    samples = []
    for row, (conversation, example) in enumerate(zip(conversations, examples, strict=True)):
        text, images, video = _omni_text(conversation, processor, tokenizer, row)
        named: dict[str, Any] = {"images": images} if images else {}
        if video is not None:
            named["videos"], metadata = video
            if metadata is not None:
                named["videos_kwargs"] = {"video_metadata": metadata}
        if example.get("audio") is not None:
            named["audio"] = [waveform(example["audio"], rate, row)]
        samples.append(processor(text=text, return_tensors="pt", **named))
    rows = [{"input_ids": sample["input_ids"][0], "attention_mask": sample["attention_mask"][0]} for sample in samples]
    longest = max(len(row["input_ids"]) for row in rows)
    if max_length is not None and longest > max_length:
        raise ValueError(
            f"a sample has {longest} tokens; expected at most max_length={max_length}, since a cut would part media "
            "from their tokens. Fix: raise max_length, or leave long samples out."
        )
    batch = padded_rows(rows, getattr(tokenizer, "pad_token_id", None) or 0, max_length)
    for key in ("pixel_values", "pixel_values_videos"):
        tiles = [tile for sample in samples if sample.get(key) is not None for tile in _tiles(sample[key])]
        if tiles:
            same = len({tile.shape for tile in tiles}) == 1
            batch[key] = torch.stack(tiles) if same else tiles
    if "pixel_values" in batch:
        batch["image_flags"] = torch.ones(len(batch["pixel_values"]), 1, dtype=torch.int64)
    return batch | _sound(processor, samples, rate)


def _omni_text(
    conversation: Any, processor: Any, tokenizer: Any, row: int
) -> tuple[str, list[Any], tuple[Any, Any] | None]:
    words = {
        "image": getattr(processor, "image_token", "<image>"),
        "video": getattr(processor, "video_token", "<video>"),
    }
    images: list[Any] = []
    videos: list[tuple[Any, Any]] = []
    plain = []
    for message in conversation:
        if isinstance(message.get("content"), str):
            plain.append(message)
            continue
        said = []
        for part in parts_of(message):
            kind = str(part.get("type"))
            medium = medium_of(part, kind) if kind in words else None
            if kind == "text":
                said.append(part.get("text", ""))
            elif medium is not None:
                (images if kind == "image" else videos).append(
                    medium if kind == "image" else (medium, part.get("metadata"))
                )
                said.append(words[kind])
        plain.append({"role": message["role"], "content": "".join(said)})
    if len(videos) > 1 or any(not isinstance(frames, list) for frames, _ in videos):
        raise ValueError(
            f"row {row} brings {len(videos)} videos, of types {[type(frames).__name__ for frames, _ in videos]}; "
            "expected at most one, as a list of frames. The model takes one video per sample, and files are not "
            "decoded here. Fix: decode the video to a list of images and keep one per sample."
        )
    return tokenizer.apply_chat_template(plain, tokenize=False), images, videos[0] if videos else None


def _tiles(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (list, tuple)) or value.ndim == 4 else [value]


def _sound(processor: Any, samples: Sequence[Mapping[str, Any]], rate: int) -> dict[str, Any]:
    waves = []
    for sample in samples:
        clips = sample.get("sound_clips")
        if clips is not None:
            waves.append(np.asarray(clips[0] if isinstance(clips, list) else clips, dtype=np.float32).squeeze())
    if not waves:
        return {}
    extractor = getattr(processor, "_sound_feature_extractor", None)
    if extractor is None:
        from transformers import ParakeetFeatureExtractor

        extractor = ParakeetFeatureExtractor(sampling_rate=rate, feature_size=128)
    heard = extractor(waves, sampling_rate=rate, return_tensors="pt")
    sound: dict[str, Any] = {"sound_features": heard["input_features"].to(torch.float32)}
    if "attention_mask" in heard:
        sound["sound_attention_mask"] = heard["attention_mask"].to(torch.int64)
    return sound
