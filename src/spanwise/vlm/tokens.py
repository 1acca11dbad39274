"""Which tokens stand for media, how many a medium becomes, and cutting rows without cutting a medium.

Shapes: B rows, S tokens, N images.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from spanwise.vlm.families import TOKEN_AXES, TOKEN_KEYS, family_of
from spanwise.vlm.media import LEFT_TO_THE_PROCESSOR, Conversation, gather

logger = logging.getLogger(__name__)

_ID_NAMES = (
    "image_token_id", "video_token_id", "audio_token_id", "image_token_index", "video_token_index",
    "media_placeholder_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id",
    "image_break_token_id", "image_end_token_id", "boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id",
    "start_image_token_id", "end_image_token_id", "fake_image_token_id", "global_image_token_id",
)  # fmt: skip
MERGE_KERNEL = (2, 2)


class NothingFitsError(ValueError):
    """Every row of a batch is longer than ``max_length``, and a batch without rows is none."""


def media_token_ids(processor: Any) -> set[int]:
    """Every token id that stands for media or frames them: what the processor names, and what its family lists."""
    tokenizer = getattr(processor, "tokenizer", processor)
    holders = (processor, getattr(processor, "config", None), tokenizer)
    found: set[int] = {
        value for holder in holders for name in _ID_NAMES if (value := _as_id(getattr(holder, name, None))) is not None
    }
    for name in ("image_token_ids", "video_token_ids", "audio_token_ids"):
        listed = getattr(processor, name, None)
        if isinstance(listed, (list, tuple)):
            found.update(value for value in map(_as_id, listed) if value is not None)
    unknown = getattr(tokenizer, "unk_token_id", None)
    for word in family_of(processor).media_tokens or _common_words():
        token_id = _token_id(tokenizer, word)
        if token_id is not None and token_id != unknown:
            found.add(token_id)
    return found


def _common_words() -> Iterable[str]:
    """For processors of no known family: the words that families use."""
    from spanwise.vlm.families import FAMILIES

    return {word for family in FAMILIES for word in family.media_tokens}


def _as_id(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _token_id(tokenizer: Any, word: str) -> int | None:
    convert = getattr(tokenizer, "convert_tokens_to_ids", None)
    if convert is None:
        return None
    try:
        return _as_id(convert(word))
    except Exception:  # a tokenizer that knows only some words may raise anything for the others
        return None


def is_media_token(input_ids: Int[Tensor, "*shape"], processor: Any) -> Bool[Tensor, "*shape"]:
    """Where a token stands for media."""
    known = torch.tensor(sorted(media_token_ids(processor)), dtype=input_ids.dtype, device=input_ids.device)
    return torch.isin(input_ids, known)


def hide_fake_media(batch: dict[str, Any], processor: Any, rows: Sequence[int]) -> None:
    """Set ``attention_mask`` to 0 at every media token of these rows, in a batch of our own."""
    if not rows or "attention_mask" not in batch:
        return
    mask = batch["attention_mask"].clone()
    for row in rows:
        mask[row][is_media_token(batch["input_ids"][row], processor)] = 0
    batch["attention_mask"] = mask


def image_config(processor: Any) -> dict[str, int | None] | None:
    """Patch and merge sizes and pixel bounds of the image processor, each None where it has none.

    Processors that merge patches by Qwen's rule keep their bounds, which count pixels, under the names of edges; those
    of all others are edges and bound no number of pixels.
    """
    images = getattr(processor, "image_processor", None)
    if images is None:
        return None
    patch, merge = _one_number(getattr(images, "patch_size", None)), _one_number(getattr(images, "merge_size", None))
    sizes = getattr(images, "size", None) or {}
    get = sizes.get if hasattr(sizes, "get") else lambda key: getattr(sizes, key, None)

    def bound(name: str, edge: str) -> int | None:
        found = _one_number(getattr(images, name, None)) or _one_number(get(name))
        return _one_number(get(edge)) if found is None and merge is not None else found

    return {
        "patch_size": patch,
        "merge_size": merge,
        "factor": None if patch is None or merge is None else patch * merge,
        "min_pixels": bound("min_pixels", "shortest_edge"),
        "max_pixels": bound("max_pixels", "longest_edge"),
    }


def _one_number(value: Any) -> int | None:
    """A size given as a number, or as one per side where the sides agree."""
    if isinstance(value, Mapping):
        sides = set(value.values())
        value = sides.pop() if len(sides) == 1 else None
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else None


def smart_resize(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Qwen's rule: both sides multiples of ``factor``, the area within bounds, the aspect nearly kept.

    >>> smart_resize(100, 50, factor=28, min_pixels=56 * 56, max_pixels=10_000)
    (112, 56)
    """
    rows, columns = (max(factor, round(side / factor) * factor) for side in (height, width))
    if rows * columns > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


def image_size(image: Any) -> tuple[int, int] | None:
    """Height and width of a PIL image or of the file at a path, upright; None where they cannot be known."""
    from PIL import ExifTags, Image

    try:
        if isinstance(image, Image.Image):
            return image.height, image.width
        if isinstance(image, Path) or (isinstance(image, str) and not image.startswith(LEFT_TO_THE_PROCESSOR)):
            with Image.open(str(image).removeprefix("file://")) as opened:
                lies = opened.getexif().get(ExifTags.Base.Orientation, 1) >= 5
                return (opened.width, opened.height) if lies else (opened.height, opened.width)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    return None


def estimate_media_tokens(conversation: Conversation, processor: Any) -> int:
    """How many tokens a conversation's images add beyond one placeholder each; media of unknown size add 0.

    Each family is measured by its own rule: what it says of its processor, what the processor says itself, or Qwen's
    rule where the processor has its patches, its merges and both of its bounds. Where none of them speaks it is 0.
    """
    sizes = [size for image in gather([conversation]).images[0] if (size := image_size(image)) is not None]
    config = image_config(processor)
    if not sizes or config is None:
        return 0
    rule = family_of(processor).image_tokens
    own_count = getattr(type(processor), "_get_num_multimodal_tokens", None)
    if rule is not None:
        counts = rule(processor, sizes)
    elif own_count is not None:
        counts = own_count(processor, image_sizes=[list(size) for size in sizes]).num_image_tokens
    else:
        counts = [_qwen_tokens(size, config) for size in sizes]
    return sum(int(count) - 1 for count in counts)


def _qwen_tokens(size: tuple[int, int], config: Mapping[str, int | None]) -> int:
    factor, smallest, largest = config["factor"], config["min_pixels"], config["max_pixels"]
    if factor is None or smallest is None or largest is None:
        return 1
    rows, columns = smart_resize(*size, factor=factor, min_pixels=smallest, max_pixels=largest)
    return (rows // factor) * (columns // factor)


def drop_overlong(conversations: Sequence[Any], processor: Any, max_length: int | None) -> tuple[list[Any], list[int]]:
    """Leave out conversations whose estimated length exceeds ``max_length``.

    Returns:
        The conversations kept and their positions. How many were left out, and how long they are, is logged.

    Raises:
        NothingFitsError: nothing is left.
    """
    if max_length is None:
        return list(conversations), list(range(len(conversations)))
    lengths = [_estimated_length(conversation, processor) for conversation in conversations]
    kept = [row for row, length in enumerate(lengths) if length is None or length <= max_length]
    longer = [length for length in lengths if length is not None and length > max_length]
    if longer:
        logger.warning(
            "left out %d of %d samples: estimated at %s tokens, max_length is %d.",
            len(longer), len(conversations), longer if len(longer) < 6 else f"{min(longer)} to {max(longer)}",
        max_length, )  # fmt: skip
    if not kept:
        raise NothingFitsError(
            f"All {len(conversations)} samples in batch exceed max_length={max_length} (estimated at {min(longer)} to "
            f"{max(longer)} tokens); expected at least one that fits. Images become many tokens, or max_length is too "
            "small. Fix: raise max_length, limit the image size in the processor, or filter the data set."
        )
    return [conversations[row] for row in kept], kept


def _estimated_length(conversation: Any, processor: Any) -> int | None:
    """Text tokens plus estimated media tokens; None where the processor cannot say (such a row is kept)."""
    tokenizer = getattr(processor, "tokenizer", processor)
    own = getattr(processor, "chat_template", None) or not getattr(tokenizer, "chat_template", None)
    try:
        text = (processor if own else tokenizer).apply_chat_template([conversation], tokenize=False)
        text = text[0] if isinstance(text, list) else text
        return len(tokenizer.encode(text, add_special_tokens=False)) + estimate_media_tokens(conversation, processor)
    except Exception:  # an estimate is a courtesy: what is really wrong with a row is said when it is processed
        return None


def expand_image_tokens(
    input_ids: Int[Tensor, " S"],
    attention_mask: Int[Tensor, " S"],
    grid_thws: Int[Tensor, "N 3"],
    media_token_id: int,
    merge_kernel_size: tuple[int, int] = MERGE_KERNEL,
) -> tuple[Int[Tensor, " L"], Int[Tensor, " L"]]:
    """Repeat each placeholder (h // mh) · (w // mw) times; the time axis is not counted.

    Raises:
        ValueError: the numbers of placeholders and of grid rows differ.

    >>> ids, mask = expand_image_tokens(torch.tensor([5, 9, 6]), torch.ones(3).long(), torch.tensor([[1, 4, 2]]), 9)
    >>> ids.tolist(), mask.tolist()
    ([5, 9, 9, 6], [1, 1, 1, 1])
    """
    places = input_ids == media_token_id
    placeholders = int(places.sum())
    if placeholders == 0:
        return input_ids, attention_mask
    if placeholders != len(grid_thws):
        raise ValueError(
            f"{placeholders} image placeholders stand in the text and the grid has {len(grid_thws)} rows; expected one "
            "row per placeholder. A placeholder was typed by a user or an image was left out. "
            "Fix: give each image part one image, and keep placeholder words out of the text."
        )
    counts = torch.ones_like(input_ids, dtype=torch.int64)
    height, width = merge_kernel_size
    counts[places] = ((grid_thws[:, 1] // height) * (grid_thws[:, 2] // width)).to(counts)
    ids = input_ids.repeat_interleave(counts)
    mask = attention_mask.repeat_interleave(counts)
    return ids, mask.masked_fill(places.repeat_interleave(counts), 1)


def truncate(batch: dict[str, Any], max_length: int, media: Bool[Tensor, "B S"]) -> None:
    """Cut every token-axis tensor of our batch to ``max_length`` columns, never through or behind a medium.

    The last column counts as cut, too: the shift takes it from the inputs.

    Raises:
        ValueError: media tokens lie beyond the cut; their features would have no tokens. Names the rows.
    """
    size = batch["input_ids"].shape[1]
    beyond = media[:, max(min(max_length, size) - 1, 0) :].any(dim=1)
    if bool(beyond.any()):
        rows = beyond.nonzero().flatten().tolist()
        raise ValueError(
            f"max_length={max_length} cuts into the media of rows {rows} of the batch (of {size} tokens, the last of "
            "which has nothing to predict); expected every media token before it, since features without tokens break "
            "the model. The images are large or come late. Fix: raise max_length, pass drop_overlong=True, limit the "
            "image size in the processor, or let text follow the last medium."
        )
    if size > max_length:
        for key in TOKEN_KEYS & set(batch):
            batch[key] = batch[key].narrow(TOKEN_AXES[key], 0, max_length)
