"""Media of several rows as one batch: everything that a processor made beside the token axis, end to end.

Which tensors a family has is its processor's affair, so no list of names decides what is kept: a key is joined, or the
row is refused by that name. O(bytes of the media).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spanwise.vlm.families import TOKEN_KEYS

# What a row says about itself beside its tensors.
BOOKKEEPING = frozenset({"n_images", "n_videos", "labels_shifted", "left_out"})

# Keys that the processor itself pads in a batch, and with what. Attention that sees nothing divides by zero, so
# Phi-4's crops that are not there are attended, as its processor has it.
_PADDED = {
    "pixel_values": 0, "image_pixel_values": 0, "pixel_attention_mask": 0, "image_attention_mask": 1,
    "input_features": 0, "feature_attention_mask": 0, "input_features_mask": 0,
    "audio_input_features": 0, "audio_attention_mask": 0, "sound_features": 0, "sound_attention_mask": 0,
}  # fmt: skip


def joined_media(examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every value of the rows that has no token axis, end to end.

    Tensors are joined along their first axis, padded as their processor would pad them; lists are chained; anything
    else must be the same in every row.

    Raises:
        ValueError: a value cannot be joined; the message names its key.

    >>> joined_media([{"grid": torch.tensor([1])}, {}, {"grid": torch.tensor([2, 3])}])["grid"].tolist()
    [1, 2, 3]
    """
    rows = [_with_audio_mask(example) for example in examples]
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        if key not in TOKEN_KEYS and key not in BOOKKEEPING:
            values = [row[key] for row in rows if row.get(key) is not None]
            if values:
                joined[key] = _joined(key, values)
    return joined


def media_counts(examples: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Images and videos of each row: as counted when it was tokenized, else one per row of its grid."""
    return {
        f"{name}_per_sample": [
            int(row[name]) if name in row else 0 if row.get(grid) is None else len(row[grid]) for row in examples
        ]
        for name, grid in (("n_images", "image_grid_thw"), ("n_videos", "video_grid_thw"))
    }


def _with_audio_mask(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Phi-4's processor masks audio only where it sees several clips; joined clips need the mask of each."""
    heard = row.get("audio_input_features")
    if not isinstance(heard, Tensor) or row.get("audio_attention_mask") is not None:
        return row
    return {**row, "audio_attention_mask": torch.ones(heard.shape[:2], dtype=torch.bool)}


def _joined(key: str, values: Sequence[Any]) -> Any:
    if all(isinstance(value, Tensor) for value in values):
        return _joined_tensors(key, values)
    if all(isinstance(value, (Tensor, list, tuple)) for value in values):
        return [entry for value in values for entry in value]
    if all(value == values[0] for value in values):
        return values[0]
    raise ValueError(
        f"{key!r} is {values[0]!r} in one row and differs in another; expected tensors, lists, or one value that all "
        "rows share, since a batch has one. The processor says it per call, and the rows were processed one by one. "
        f"Fix: leave {key!r} out of the rows, or batch rows that agree."
    )


def _joined_tensors(key: str, values: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(value.shape[1:]) for value in values}
    if values[0].ndim and len(shapes) == 1:
        return torch.cat(list(values))
    if key not in _PADDED or len({len(shape) for shape in shapes}) != 1 or not values[0].ndim:
        raise ValueError(
            f"{key!r} has the shapes {[tuple(value.shape) for value in values]} in the rows of one batch; expected "
            "equal ones behind the first axis, since its processor does not say how it is padded. Rows were processed "
            "one by one and their media differ in size. Fix: give these media one size (videos: one number of frames), "
            "or put such rows into batches of their own."
        )
    widest = [max(sizes) for sizes in zip(*shapes, strict=True)]

    def grown(value: Tensor) -> Tensor:
        missing = [width - size for width, size in zip(widest, value.shape[1:], strict=True)]
        pads = [pad for amount in reversed(missing) for pad in (0, amount)]
        return nn.functional.pad(value, pads, value=_PADDED[key])

    return torch.cat([grown(value) for value in values])
