"""Pads and packs keep everything that the plain batch has, family by family, or refuse it by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image

from spanwise.vlm import PackedDatasetWrapper, PreTokenizedDatasetWrapper, VLMCollator
from spanwise.vlm.collate_fns import pad_collate_fn
from spanwise.vlm.joining import joined_media
from spanwise.vlm.packing import pack
from tests.vlm import kept, processors

KINDS = [(name, "image") for name in processors.REAL] + [
    (name, "audio") for name in processors.REAL if name in kept.HEARS
]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_nothing_is_lost(name: str, kind: str) -> None:
    """The families that need torchvision, Phi-4 and Pixtral among them: tests/vlm/test_torchvision.py."""
    assert not any(kept.losses(name, kind).values())


def test_what_cannot_be_joined_is_refused_by_name() -> None:
    videos = [{"pixel_values_videos": torch.ones(1, frames, 3, 4, 4)} for frames in (2, 3)]
    with pytest.raises(ValueError, match=r"'pixel_values_videos' has the shapes .* Fix: give these media one size"):
        joined_media(videos)
    with pytest.raises(ValueError, match="'input_mode' is 1 in one row and differs in another"):
        joined_media([{"input_mode": 1}, {"input_mode": 2}])
    assert joined_media([{"input_mode": 1}, {"input_mode": 1}]) == {"input_mode": 1}
    one = {name: torch.ones(4, dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")}
    with pytest.raises(ValueError, match=r"documents carry \['cross_attention_mask'\]"):
        pack([one | {"cross_attention_mask": torch.ones(4)}], 10)


def test_crops_that_are_not_there_are_attended() -> None:
    """Attention without a single token to see is not a number; Phi-4's own processor fills its mask with ones."""
    masks = [{"image_attention_mask": torch.zeros(1, crops, 2, 2)} for crops in (1, 2)]
    assert joined_media(masks)["image_attention_mask"][0].flatten().tolist() == [0] * 4 + [1] * 4


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_families_whose_images_attend_both_ways_are_not_packed(name: str) -> None:
    """With Gemma 3's image tokens seeing each other both ways, a packed document is not what it is alone."""
    processor = processors.build(name)
    with pytest.raises(ValueError, match=r"packing was asked for Gemma .; .* Fix: leave packing out"):
        VLMCollator(processor, packing="neat", max_length=200)
    with pytest.raises(ValueError, match=r"packing was asked for Gemma ."):
        PackedDatasetWrapper(PreTokenizedDatasetWrapper([kept.chat()], processor), [[0]], 200)


def ends_in_an_image(name: str, size: tuple[int, int] = (60, 40)) -> tuple[Any, dict[str, Any], int]:
    """A document of one image, and where its last media token stands."""
    processor = processors.build(name)
    rows = [kept.chat({"type": "image", "image": Image.new("RGB", size)})]
    document = PreTokenizedDatasetWrapper(rows, processor, inject_fake_images=False)[0]
    return processor, document, int((document["input_ids"] == processor.image_token_id).nonzero()[-1])


@pytest.mark.parametrize("name", ["llava_onevision", "qwen2_5_vl", "idefics3"])
def test_the_column_that_the_shift_takes_holds_no_medium(name: str) -> None:
    processor, document, last = ends_in_an_image(name)
    with pytest.raises(ValueError, match=rf"a width of {last + 1} tokens cuts into the media of rows \[0\]"):
        pad_collate_fn([document], processor, max_length=last + 1)
    whole = int(torch.isin(document["input_ids"], torch.tensor([processor.image_token_id])).sum())
    free = next(width for width in range(last + 2, last + 5) if not _cuts(document, processor, width))
    batch = pad_collate_fn([document], processor, max_length=free)
    assert int((batch["input_ids"] == processor.image_token_id).sum()) == whole


def _cuts(document: dict[str, Any], processor: Any, width: int) -> bool:
    try:
        pad_collate_fn([document], processor, max_length=width)
    except ValueError:
        return True
    return False


def test_rows_that_end_in_a_medium_are_refused() -> None:
    processor, document, last = ends_in_an_image("llava_onevision")
    per_token = {key: value[: last + 1] for key, value in document.items() if key in ("input_ids", "attention_mask")}
    short = document | per_token | {"labels": document["labels"][: last + 1]}
    with pytest.raises(ValueError, match=r"cuts into the media of rows \[0\]"):
        pad_collate_fn([short], processor)
    batch = pad_collate_fn([short, document], processor)  # padding behind it: nothing is taken
    assert int((batch["input_ids"][0] == processor.image_token_id).sum()) == int(
        (document["input_ids"] == processor.image_token_id).sum()
    )

    class Inner(list):
        pass

    inner = Inner([short, document])
    inner.processor = processor
    with pytest.raises(ValueError, match=r"rows \[0\] end in a medium"):
        PackedDatasetWrapper(inner, [[1, 0]], 500)[0]
