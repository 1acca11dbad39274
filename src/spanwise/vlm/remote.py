"""How processors of remote code are called where it differs from the two common styles: one function per family.

Each returns what the processor made of a batch, before labels and the shift. Per-sample families are padded here.
O(tokens) beside the processors' own work.

Shapes: B rows, S tokens, N images.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spanwise.spans.chat import IGNORE_INDEX
from spanwise.vlm.checks import said_by_row
from spanwise.vlm.media import gather, medium_of, parts_of
from spanwise.vlm.tokens import expand_image_tokens

logger = logging.getLogger(__name__)
Example = Mapping[str, Any]
PHI_LIMIT = 1024
_ROW_PADDING = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE_INDEX}


def phi4_call(
    processor: Any, conversations: Sequence[Any], examples: Sequence[Example], max_length: int | None = None
) -> dict[str, Any]:
    """The tokenizer's own template, audio as (array, sampling rate), ``input_mode`` by what a batch brings."""
    tokenizer = getattr(processor, "tokenizer", processor)
    texts = [tokenizer.apply_chat_template(conversation, tokenize=False) for conversation in conversations]
    media = gather(conversations)
    audio = [
        _with_rate(clip)
        for clips, example in zip(media.audio, examples, strict=True)
        for clip in clips or [example.get("audio")]
        if clip is not None
    ]
    named: dict[str, Any] = {"audios": audio} if audio else {}
    images = [image for row in media.images for image in row]
    if images:
        named["images"] = images
    limit = PHI_LIMIT if max_length is None else max_length + 1
    batch = dict(processor(text=texts, **named, return_tensors="pt", padding=True, truncation=True, max_length=limit))
    if batch["input_ids"].shape[1] >= limit:
        raise ValueError(
            f"the batch has {batch['input_ids'].shape[1]} tokens; expected fewer than {limit}, where this "
            "processor cuts rows without looking at their media. The audio or text is too long. Fix: shorten or leave "
            "out long rows."
        )
    if "input_mode" not in batch:
        batch["input_mode"] = input_mode(batch)
    return batch


def _with_rate(audio: Any) -> Any:
    if isinstance(audio, Mapping):
        return audio["array"], audio["sampling_rate"]
    return tuple(audio) if isinstance(audio, (list, tuple)) and len(audio) == 2 else audio


def input_mode(batch: Mapping[str, Any]) -> int:
    """Phi-4's mode: 3 image and audio, 1 image, 2 audio, 0 text."""
    image, audio = (
        isinstance(batch.get(key), Tensor) and batch[key].numel() > 0
        for key in ("input_image_embeds", "input_audio_embeds")
    )
    return int(image) + 2 * int(audio)


def omni_call(
    processor: Any,
    conversations: Sequence[Any],
    process_mm_info: Callable[..., Any],
    *,
    use_audio_in_video: bool,
    own_class: bool,
) -> dict[str, Any]:
    """Audio, images and videos as ``qwen_omni_utils`` reads them, passed only where there are some; right padding.

    transformers' own class takes clips and videos in flat lists and must be told which clip is whose; other objects
    get one list per row.
    """
    texts = [
        processor.apply_chat_template(conversation, add_generation_prompt=False, tokenize=False)
        for conversation in conversations
    ]
    read = [process_mm_info(conversation, use_audio_in_video=use_audio_in_video) for conversation in conversations]
    named: dict[str, Any] = {
        name: [list(media) if media is not None else [] for media in column]
        for name, column in zip(("audio", "images", "videos"), zip(*read, strict=True), strict=True)
        if any(media is not None and len(media) for media in column)
    }
    if own_class:
        named |= {name: [one for row in named[name] for one in row] for name in ("audio", "videos") if name in named}
    if use_audio_in_video and "videos" in named:
        named |= (
            {"load_audio_from_video": True, "audio_from_video_indices": _whose_audio(conversations)}
            if own_class
            else {"use_audio_in_video": True}
        )
    return dict(processor(text=texts, return_tensors="pt", padding=True, padding_side="right", **named))


def _whose_audio(conversations: Sequence[Any]) -> list[int | None]:
    """For each clip, in the order of the parts: the number of the video that it belongs to, None for a part's own.

    >>> _whose_audio([[{"role": "user", "content": [{"type": "video"}, {"type": "audio"}, {"type": "video"}]}]])
    [0, None, 1]
    """
    kinds = [part.get("type") for row in conversations for message in row for part in parts_of(message)]
    videos = iter(range(kinds.count("video")))
    return [next(videos) if kind == "video" else None for kind in kinds if kind in ("audio", "video")]


def kimi_vl_call(
    processor: Any, conversations: Sequence[Any], examples: Sequence[Example], max_length: int | None = None
) -> dict[str, Any]:
    """Texts and flat images; padded to ``max_length`` without truncation once overlong rows are out."""
    texts = [
        processor.apply_chat_template(conversation, add_generation_prompt=False, tokenize=False)
        for conversation in conversations
    ]
    images = [image for row in gather(conversations).images for image in row]
    arguments: dict[str, Any] = {"padding": True, "truncation": True}
    if max_length is not None:
        arguments = {"padding": "max_length", "truncation": False, "max_length": max_length}
    if images:
        arguments["images"] = images
    return dict(processor(text=texts, return_tensors="pt", add_special_tokens=False, **arguments))


def kimi_k25_rows(
    processor: Any,
    conversations: Sequence[Any],
    *,
    max_length: int | None,
    drop_overlong: bool,
    labels_of: Callable[[dict[str, Any], int], Tensor] | None = None,
) -> tuple[list[dict[str, Any]], list[int]]:
    """One processor call per sample, each placeholder expanded from the grid, overlong rows cut or left out.

    A cut that would reach image tokens takes the sample's images out altogether: its placeholders become padding ids,
    its media are not passed on and its count is 0. ``labels_of(row, place)`` labels a row before it is cut.

    Returns:
        Rows with ``input_ids``, ``attention_mask`` (and ``labels``) [S], ``n_images``, and where they survive
        ``grid_thws`` [N, 3] and ``pixel_values``; and the positions of the rows kept.
    """
    media_id = _kimi_media_id(processor)
    pad_id = getattr(processor.tokenizer, "pad_token_id", 0) or 0
    rows, kept = [], []
    for place, conversation in enumerate(conversations):
        row = _kimi_k25_row(processor, conversation, media_id, place)
        if labels_of is not None:
            row["labels"] = labels_of(row, place)
        if max_length is not None and len(row["input_ids"]) > max_length:
            if drop_overlong:
                logger.warning("left out a sample of %d tokens (max_length=%d).", len(row["input_ids"]), max_length)
                continue
            row = _kimi_cut(row, max_length, media_id, pad_id)
        rows.append(row)
        kept.append(place)
    if not rows:
        raise ValueError(
            f"All {len(conversations)} samples in batch exceed max_length={max_length} after expansion; expected at "
            "least one that fits. Images become many tokens. Fix: raise max_length, or filter the data set."
        )
    return rows, kept


def _kimi_media_id(processor: Any) -> int:
    named = getattr(processor, "media_placeholder_token_id", None)
    if named is None and hasattr(processor, "tokenizer"):
        named = processor.tokenizer.convert_tokens_to_ids("<|media_pad|>")
    return 163605 if named is None else int(named)  # the released vocabulary's id


def _kimi_k25_row(processor: Any, conversation: Any, media_id: int, place: int) -> dict[str, Any]:
    medias = [
        {"type": "image", "image": medium_of(part, "image")}
        for message in conversation
        for part in parts_of(message)
        if part.get("type") == "image"
    ]
    text = processor.apply_chat_template(conversation, add_generation_prompt=False, tokenize=False)
    named = {"medias": medias} if medias else {}
    sample = said_by_row(lambda _: processor(text=text, return_tensors="pt", **named), [place], processor)
    ids, mask = sample["input_ids"][0], sample["attention_mask"][0]
    row: dict[str, Any] = {"n_images": 0}
    grid = sample.get("grid_thws")
    if grid is not None:
        ids, mask = expand_image_tokens(ids, mask, grid, media_id)
        row |= {"grid_thws": grid, "n_images": len(grid)}
    if sample.get("pixel_values") is not None:
        row["pixel_values"] = sample["pixel_values"]
    return row | {"input_ids": ids, "attention_mask": mask}


def _kimi_cut(row: dict[str, Any], max_length: int, media_id: int, pad_id: int) -> dict[str, Any]:
    cut = {key: row[key][:max_length] for key in _ROW_PADDING if key in row}
    if bool((row["input_ids"][max_length - 1 :] == media_id).any()):  # the shift takes the last column, too
        logger.warning("max_length=%d cuts into the images of a sample: its images are taken out.", max_length)
        ids = cut["input_ids"]
        return cut | {"input_ids": ids.masked_fill(ids == media_id, pad_id), "n_images": 0}
    return row | cut


def kimi_k25_batch(rows: Sequence[Mapping[str, Any]], processor: Any, max_length: int | None) -> dict[str, Any]:
    """Rows padded to ``max_length`` (or the longest), grids and pixels end to end."""
    batch = padded_rows(rows, getattr(processor.tokenizer, "pad_token_id", 0) or 0, max_length)
    pixels = [row["pixel_values"] for row in rows if "pixel_values" in row]
    grids = [row["grid_thws"] for row in rows if "grid_thws" in row]
    if pixels:
        batch["pixel_values"] = torch.cat(pixels)
    if grids:
        batch["grid_thws"] = torch.cat(grids)
        batch["image_grid_hws"] = batch["grid_thws"][:, 1:]
        batch["n_images_per_sample"] = torch.tensor([row["n_images"] for row in rows], dtype=torch.int64)
    return batch


def padded_rows(rows: Sequence[Mapping[str, Any]], pad_id: int, max_length: int | None) -> dict[str, Any]:
    """``input_ids``, ``attention_mask`` and, where rows have them, ``labels``, padded on the right."""
    width = max_length or max(len(row["input_ids"]) for row in rows)
    return {
        key: torch.stack([nn.functional.pad(row[key], (0, width - len(row[key])), value=fill) for row in rows])
        for key, fill in (_ROW_PADDING | {"input_ids": pad_id}).items()
        if key in rows[0]
    }
