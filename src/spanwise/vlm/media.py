"""Images, videos and audio of a batch: found, opened, counted, measured, and never cut.

The caller's examples are never changed: everything works on copies of the lists and dicts around the media, while the
media themselves are shared. Opening an image costs its decoding; everything else is O(number of parts).
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Conversation = Sequence[dict[str, Any]]
logger = logging.getLogger(__name__)

# The keys under which a part brings its medium, in the order in which transformers looks for them.
_MEDIUM_KEYS = {"image": ("image", "url", "path"), "video": ("video", "url", "path"), "audio": ("audio", "url", "path")}
LEFT_TO_THE_PROCESSOR = ("http://", "https://", "data:")


@dataclass(frozen=True)
class Media:
    """The media of a batch, one list per row, in the order in which the parts name them."""

    images: list[list[Any]]
    videos: list[list[Any]]
    audio: list[list[Any]]

    def of_rows(self, rows: Sequence[int]) -> Media:
        """The media of these rows."""
        return Media(*([of_kind[row] for row in rows] for of_kind in (self.images, self.videos, self.audio)))


def parts_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of a message whose content is a list; [] for text."""
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, (list, tuple)) else []


def medium_of(part: dict[str, Any], kind: str) -> Any:
    """What a part of this kind brings; None for another kind and for a part that brings nothing."""
    if part.get("type") != kind:
        return None
    return next((part[key] for key in _MEDIUM_KEYS[kind] if part.get(key) is not None), None)


def gather(conversations: Sequence[Conversation]) -> Media:
    """All media, per row."""

    def of(kind: str) -> list[list[Any]]:
        return [
            [medium for message in row for part in parts_of(message) if (medium := medium_of(part, kind)) is not None]
            for row in conversations
        ]

    return Media(of("image"), of("video"), of("audio"))


def flat_media(conversations: Sequence[Conversation]) -> tuple[list[Any] | None, list[Any] | None]:
    """Images and videos of all rows in one list each, as they are; None where there are none."""
    media = gather(conversations)
    images = [image for row in media.images for image in row]
    videos = [video for row in media.videos for video in row]
    return images or None, videos or None


def count_media(conversations: Sequence[Conversation]) -> tuple[list[int], list[int]]:
    """How many image and video parts each row has, whether or not they bring a medium."""

    def of(kind: str) -> list[int]:
        return [sum(part.get("type") == kind for message in row for part in parts_of(message)) for row in conversations]

    return of("image"), of("video")


def ensure_rgb(conversations: Any) -> Any:
    """Convert every PIL image to RGB **in place** and return the same object."""
    from PIL import Image

    for row in conversations:
        for message in row:
            for part in parts_of(message):
                if isinstance(part.get("image"), Image.Image):
                    part["image"] = part["image"].convert("RGB")
    return conversations


def copied_in_rgb(conversations: Sequence[Conversation], *, open_files: bool = False) -> list[list[dict[str, Any]]]:
    """Copies of the conversations whose images are RGB; with ``open_files`` those given as files or arrays, too.

    Raises:
        ValueError: an image cannot be read, or not without guessing what its numbers mean. Names the row.
    """
    return [
        [
            {**message, "content": [_in_rgb(part, row, open_files=open_files) for part in message["content"]]}
            if isinstance(message.get("content"), (list, tuple))
            else dict(message)
            for message in conversation
        ]
        for row, conversation in enumerate(conversations)
    ]


def _in_rgb(part: Any, row: int, *, open_files: bool) -> Any:
    if not isinstance(part, dict) or part.get("type") not in ("image", "video"):
        return part
    if part["type"] == "video":
        return _frames_in_rgb(part, row)
    image = medium_of(part, "image")
    if _is_pil(image):
        converted = _pil_in_rgb(image, row)
        return part if converted is image else {**part, "image": converted}
    if not open_files or image is None or (isinstance(image, str) and image.startswith(LEFT_TO_THE_PROCESSOR)):
        return part
    if isinstance(image, Mapping) and image.keys() <= {"bytes", "path"}:  # a column of images in a Parquet file
        image = image.get("path") if image.get("bytes") is None else image["bytes"]
    if isinstance(image, (str, Path)):
        opened = open_image(image, row)
    elif isinstance(image, (bytes, bytearray)):
        opened = _read(io.BytesIO(image), f"the image in {len(image)} bytes", row)
    else:
        opened = _array_in_rgb(image, row)
    kept = {key: value for key, value in part.items() if key not in ("url", "path")}
    return {**kept, "image": opened}


def _frames_in_rgb(part: dict[str, Any], row: int) -> dict[str, Any]:
    """A video given as PIL frames, each of them in RGB; any other is the processor's to read."""
    frames = part.get("video")
    if not isinstance(frames, (list, tuple)) or not any(_is_pil(frame) for frame in frames):
        return part
    return {**part, "video": [_pil_in_rgb(frame, row) if _is_pil(frame) else frame for frame in frames]}


def _is_pil(image: Any) -> bool:
    return all(hasattr(image, name) for name in ("convert", "mode", "size", "load"))


def _pil_in_rgb(image: Any, row: int) -> Any:
    """Modes that Pillow would clip to 8 bits are scaled where their range is known, and refused where it is not."""
    from PIL import Image

    if image.mode in ("I", "F"):
        raise ValueError(
            f"row {row}: an image has mode {image.mode!r}, 32 bits per pixel; expected 8 or 16, since nothing says "
            "which number is white, and Pillow would clip it to black or white. It was probably computed, or read from "
            "a scientific format. Fix: scale it to 0…255 and pass Image.fromarray(values.astype('uint8'))."
        )
    if 0 in image.size:
        raise ValueError(
            f"row {row}: an image has {image.width} × {image.height} pixels; expected at least one each way. It was "
            "probably cropped to nothing. Fix: check the crop, or leave the row out."
        )
    try:
        if image.mode.startswith("I;16"):
            return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
        image.load()  # a file cut off shows itself only here, and must name its row
        return image if image.mode == "RGB" else image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise _unreadable(f"the image of mode {image.mode!r}", row, error) from error


def _array_in_rgb(image: Any, row: int) -> Any:
    """An array of bytes, [height, width] or with 1, 3 or 4 channels in front or behind."""
    from PIL import Image

    pixels = np.asarray(image) if hasattr(image, "__array__") else np.empty(0, dtype=object)
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3, 4) and pixels.shape[-1] not in (1, 3, 4):
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[-1] in (3, 4))):
        shape = f" of shape {tuple(pixels.shape)} and type {pixels.dtype}" if hasattr(image, "__array__") else ""
        raise ValueError(
            f"row {row}: an image is a {type(image).__name__}{shape}; expected a PIL image, a path, the bytes of a "
            "file, or an array of uint8 with 1, 3 or 4 channels. Other numbers do not say which one is white, and the "
            "processor would scale them once more. Fix: pass Image.fromarray((values * 255).astype('uint8')) for "
            "values of 0…1, or the PIL image itself."
        )
    return Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")


def open_image(source: str | Path, row: int) -> Any:
    """The file as an RGB image."""
    path = Path(str(source).removeprefix("file://"))
    return _read(path, f"the image '{path}'", row)


def _read(source: Any, name: str, row: int) -> Any:
    """A file's image the way up that its camera says, as transformers reads files (but not images that are open)."""
    from PIL import Image, ImageOps

    try:
        with Image.open(source) as opened:
            opened.load()
            image = ImageOps.exif_transpose(opened)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _unreadable(name, row, error) from error
    converted = _pil_in_rgb(image, row)
    return converted.copy() if converted is image else converted  # a plain image, which holds no file


def _unreadable(name: str, row: int, error: Exception) -> ValueError:
    return ValueError(
        f"row {row}: {name} cannot be read ({type(error).__name__}: {error}); expected a file in a format that Pillow "
        "knows. It is missing, cut off or no image. Fix: check the file, or leave the row out."
    )


def fake_image() -> Any:
    """A white image of 56 × 56 pixels, for ranks that would otherwise have none."""
    from PIL import Image

    return Image.new("RGB", (56, 56), (255, 255, 255))


def with_fake_image(conversation: Conversation) -> list[dict[str, Any]]:
    """A copy whose first user turn begins with the fake image (a turn is put first where no user has one)."""
    part = {"type": "image", "image": fake_image()}
    copied = [dict(message) for message in conversation]
    for message in copied:
        if message.get("role") == "user":
            content = message.get("content")
            text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
            message["content"] = [part, *text]
            return copied
    return [{"role": "user", "content": [part]}, *copied]


def has_media(conversation: Conversation) -> bool:
    """Whether a conversation has an image or a video."""
    images, videos = count_media([conversation])
    return bool(images[0] or videos[0])
