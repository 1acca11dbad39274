"""Media: modes, files, counts, estimates, cuts, and every kind of bad input by name and row."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from spanwise.vlm import VLMCollator, family_of
from spanwise.vlm.audio import waveform
from spanwise.vlm.collate_fns import (
    _drop_overlong_samples,
    _estimate_media_tokens,
    _extract_image_config,
    default_collate_fn,
)
from spanwise.vlm.media import copied_in_rgb
from spanwise.vlm.tokens import _estimated_length, expand_image_tokens, media_token_ids
from tests.vlm import processors
from tests.vlm.test_collate_fns import chat, rows

IMAGE = Image.new("RGB", (60, 40), (10, 200, 30))


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "LA", "1", "CMYK"])
def test_every_mode_becomes_rgb_and_the_caller_keeps_his(mode: str) -> None:
    image = Image.new("RGB", (60, 40), (10, 200, 30)).convert(mode)
    examples = rows(chat("what", "a cat", image))
    part = examples[0]["conversation"][0]["content"][0]
    collator = VLMCollator(processors.build("qwen2_5_vl"))
    batch = collator(examples)
    assert part == {"type": "image", "image": image}
    assert part["image"] is image
    assert image.mode == mode
    expected = collator(rows(chat("what", "a cat", image.convert("RGB"))))
    assert torch.equal(batch["pixel_values"], expected["pixel_values"])
    assert not torch.equal(
        expected["pixel_values"], collator(rows(chat("x", "y", Image.new("RGB", (60, 40)))))["pixel_values"]
    )


def pixels_of(image: Any) -> torch.Tensor:
    return VLMCollator(processors.build("qwen2_5_vl"))(rows(chat("what", "a cat", image)))["pixel_values"]


def test_sixteen_bits_are_scaled_and_other_ranges_refused() -> None:
    """Pillow alone would make white of the first and black of the last, without a word."""
    grey = pixels_of(Image.new("L", (60, 40), 0x80))
    assert torch.equal(pixels_of(Image.new("I;16", (60, 40), 0x80FF)), grey)
    for image in (Image.new("I", (60, 40), 30_000), Image.new("F", (60, 40), 0.5)):
        with pytest.raises(ValueError, match=rf"row 1: an image has mode '{image.mode}', 32 bits per pixel"):
            VLMCollator(processors.build("qwen2_5_vl"))(rows(chat("x", "y", IMAGE), chat("x", "y", image)))


def test_arrays_and_bytes_are_read_where_their_numbers_have_one_meaning() -> None:
    noise = Image.effect_noise((60, 40), 60)
    expected = pixels_of(noise)
    plane = np.asarray(noise)
    file = io.BytesIO()
    noise.save(file, "PNG")
    three = np.stack([plane] * 3)
    for image in (plane, plane[..., None], three, np.moveaxis(three, 0, -1), torch.from_numpy(three), file.getvalue(),
                  {"bytes": file.getvalue(), "path": "cat.png"}):  # fmt: skip
        assert torch.equal(pixels_of(image), expected), type(image)
    for image, named in (
        (plane / 255, "a ndarray of shape (40, 60) and type float64"),
        (np.zeros((2, 4, 4, 3), np.uint8), "a ndarray of shape (2, 4, 4, 3) and type uint8"),
        (7, "a int;"),
        (b"no image", "in 8 bytes cannot be read"),
    ):
        with pytest.raises(ValueError, match=rf"row 1: .*{re.escape(named)}"):
            VLMCollator(processors.build("qwen2_5_vl"))(rows(chat("x", "y", IMAGE), chat("x", "y", image)))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_an_image_that_was_opened_and_is_cut_off_is_named(mode: str) -> None:
    file = io.BytesIO()
    Image.effect_noise((60, 40), 60).convert(mode).save(file, "PNG")
    opened = Image.open(io.BytesIO(file.getvalue()[:400]))
    with pytest.raises(ValueError, match=rf"row 1: the image of mode '{mode}' cannot be read"):
        VLMCollator(processors.build("qwen2_5_vl"))(rows(chat("x", "y", IMAGE), chat("x", "y", opened)))


def test_files_are_read_the_way_up_that_their_camera_says(tmp_path: Path) -> None:
    """As transformers reads them; a picture that lies down is not what the model will be asked about."""
    noise = Image.effect_noise((60, 40), 60).convert("RGB")
    turned = Image.Exif()
    turned[274] = 6
    noise.save(file := tmp_path / "a.png", exif=turned)
    upright = noise.transpose(Image.Transpose.ROTATE_270)
    assert torch.equal(pixels_of(str(file)), pixels_of(upright))
    assert torch.equal(pixels_of({"bytes": None, "path": str(file)}), pixels_of(upright))
    llava = processors.build("llava_onevision")
    of_file, of_upright, of_lying = (_estimate_media_tokens(chat("x", "y", i), llava) for i in (file, upright, noise))
    assert of_file == of_upright != of_lying


def test_files_are_opened_and_unreadable_ones_named(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    IMAGE.save(file)
    collator = VLMCollator(processors.build("qwen2_5_vl"))
    direct = collator(rows(chat("what", "a cat", IMAGE)))
    for part in ({"image": str(file)}, {"path": str(file)}, {"url": f"file://{file}"}):
        conversation = chat("what", "a cat")
        conversation[0]["content"].insert(0, {"type": "image", **part})
        assert torch.equal(collator(rows(conversation))["pixel_values"], direct["pixel_values"])
    broken = tmp_path / "b.png"
    broken.write_bytes(file.read_bytes()[:40])
    for path in (broken, tmp_path / "missing.png"):
        with pytest.raises(ValueError, match=r"row 1: the image '.*' cannot be read"):
            collator(rows(chat("what", "a cat", IMAGE), chat("what", "a cat", str(path))))


def test_images_of_nothing_and_frames_of_other_modes() -> None:
    with pytest.raises(ValueError, match="row 1: an image has 0 × 5 pixels"):
        VLMCollator(processors.build("gemma3"))(rows(chat("x", "y"), chat("x", "y", Image.new("RGB", (0, 5)))))
    frames = [Image.new("L", (4, 4)), Image.new("RGB", (4, 4))]
    conversation = [{"role": "user", "content": [{"type": "video", "video": frames}]}]
    (copied,) = copied_in_rgb([conversation])
    assert [frame.mode for frame in copied[0]["content"][0]["video"]] == ["RGB", "RGB"]
    assert [frame.mode for frame in frames] == ["L", "RGB"]


def heard_frames(name: str, audio: Any, *, as_part: bool) -> torch.Tensor:
    conversation = chat("x", "y")
    conversation[0]["content"].insert(0, {"type": "audio", "audio": audio} if as_part else {"type": "audio"})
    row = {"conversation": conversation} | ({} if as_part else {"audio": audio})
    return VLMCollator(processors.build(name))([row])["input_features"]


@pytest.mark.parametrize("name", ["qwen3_omni", "gemma4"])
def test_audio_is_heard_at_the_extractor_s_rate(name: str) -> None:
    """Half a second is half a second, whatever the rate it was sampled at and wherever the row brings it."""
    time = np.arange(8000) / 16_000
    wave = np.sin(2 * np.pi * 300 * time).astype(np.float32)
    frames = heard_frames(name, wave, as_part=True)
    slow = {"array": wave[::2], "sampling_rate": 8000}
    for as_part in (True, False):
        for audio in (slow, (wave[::2], 8000), {"array": wave, "sampling_rate": 16_000}, wave.tolist()):
            again = heard_frames(name, audio, as_part=as_part)
            assert again.shape == frames.shape
            assert (again - frames).abs().median() < 0.05
    loud = (wave * 32_767).astype(np.int16)
    assert (heard_frames(name, loud, as_part=True) - frames).abs().median() < 0.05


def test_resampling_lets_no_tone_come_back_as_another() -> None:
    """12 kHz is above what 16 kHz can hold: it must vanish, while 1 kHz beside it stays as it is."""
    time = np.arange(4800) / 48_000
    low, high = np.sin(2 * np.pi * 1000 * time), np.sin(2 * np.pi * 12_000 * time)
    wave = waveform({"array": low + high, "sampling_rate": 48_000}, 16_000, 0)
    assert len(wave) == 1600
    assert np.abs(wave - low[::3]).max() < 1e-3


@pytest.mark.parametrize(
    ("audio", "named"),
    [
        ({"array": np.zeros(9)}, "a dict with ['array']"),
        (np.zeros((2, 900), np.float32), "a ndarray of shape (2, 900)"),
        (np.zeros(0, np.float32), "a ndarray of shape (0,)"),
        ((np.zeros(9), -1), "a sampling rate of -1"),
        ({"path": "x.wav"}, "a dict with ['path']"),
    ],
)
def test_audio_that_cannot_be_heard_names_its_row(audio: Any, named: str) -> None:
    conversation = chat("x", "y")
    conversation[0]["content"].insert(0, {"type": "audio", "audio": audio})
    with pytest.raises(ValueError, match=rf"row 1: its audio is {re.escape(named)}"):
        VLMCollator(processors.build("qwen3_omni"))(rows(chat("x", "y"), conversation))


@pytest.mark.parametrize("name", processors.REAL)
def test_a_cut_never_splits_an_image(name: str) -> None:
    """For every width: as many media tokens as without a cut, or an error that says so."""
    processor = processors.build(name)
    examples = rows(chat("what is it?", "a cat and more words than that", IMAGE))
    media = media_token_ids(processor)
    whole = VLMCollator(processor)(examples)
    expected = sum(int(token) in media for token in whole["input_ids"][0])
    size = whole["input_ids"].shape[1] + 1
    cuts = errors = 0
    for width in range(2, size, max(1, size // 12)):
        collator = VLMCollator(processor, max_length=width, allow_unlabelled=True)
        if any(int(token) in media for token in [*whole["input_ids"][0], -1][width - 1 :]):
            with pytest.raises(ValueError, match=r"cuts into the media of rows \[0\]"):
                collator(examples)
            errors += 1
            continue
        batch = collator(examples)
        cuts += 1
        assert batch["input_ids"].shape[1] == width - 1
        assert sum(int(token) in media for token in batch["input_ids"][0]) == expected
    assert cuts
    assert errors


def test_a_cut_that_leaves_no_label_is_an_error() -> None:
    long = rows(chat("word " * 30, "a cat"))
    with pytest.raises(ValueError, match="none of the 1 rows has a label"):
        VLMCollator(processors.build("gemma3"), max_length=20)(long)


SIZES = [(60, 40), (30, 90), (300, 20), (113, 200)]


@pytest.mark.parametrize("name", processors.REAL)
def test_estimates_are_the_processor_s_own(name: str, tmp_path: Path) -> None:
    """Exact up to the marks that frame an image, and never above what a row has: one image and several."""
    processor = processors.build(name)
    frame = {"gemma3": 6, "gemma4": 2}.get(name, 0)
    for sizes in ([SIZES[0]], [SIZES[1]], SIZES[1:], [*SIZES, (28, 28)]):
        conversation = chat("what", "a cat", *(Image.new("RGB", size) for size in sizes))
        batch = VLMCollator(processor)(rows(conversation))
        true = batch["input_ids"].shape[1] + 1
        assert _estimated_length(conversation, processor) + frame * len(sizes) == true
        assert _estimate_media_tokens(conversation, processor) < true
    assert _estimate_media_tokens(chat("what", "x", "no such file.png"), processor) == 0
    IMAGE.save(file := tmp_path / "a.png")
    of_files = {_estimate_media_tokens(chat("what", "x", path), processor) for path in (file, str(file), IMAGE)}
    assert len(of_files) == 1
    assert _extract_image_config(object()) is None


def test_image_config_says_what_there_is() -> None:
    qwen = _extract_image_config(processors.build("qwen2_5_vl"))
    assert qwen == {"patch_size": 14, "merge_size": 2, "factor": 28, "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 16}
    for name in ("idefics3", "llava"):  # edges are no numbers of pixels
        assert set(_extract_image_config(processors.build(name)).values()) == {None}

    class Remote:
        class image_processor:
            patch_size = {"height": 16, "width": 16}

    assert _extract_image_config(Remote()) == dict.fromkeys(qwen) | {"patch_size": 16}
    assert _estimate_media_tokens(chat("x", "y", IMAGE), Remote()) == 0
    Remote.image_processor.merge_size, Remote.image_processor.min_pixels = 2, 28 * 28
    Remote.image_processor.max_pixels = 28 * 28 * 16
    assert _estimate_media_tokens(chat("x", "y", Image.new("RGB", (64, 96))), Remote()) == 2 * 3 - 1


@pytest.mark.parametrize("name", processors.REAL)
def test_a_row_that_fits_is_never_left_out(name: str) -> None:
    processor = processors.build(name)
    for images in ([(60, 40)], [(60, 40), (30, 90)]):
        conversation = chat("what is it?", "a cat", *(Image.new("RGB", size) for size in images))
        size = VLMCollator(processor)(rows(conversation))["input_ids"].shape[1] + 1
        collator = VLMCollator(processor, max_length=size, drop_overlong=True)
        assert "left_out" not in collator(rows(conversation))
        assert collator(rows(chat("x", "y"), [*conversation, *conversation]))["left_out"] == {"overlong": 1}


def _run_ids(processor: Any) -> set[int]:
    soft = getattr(processor.tokenizer, "image_token_id", None)
    return {soft if soft is not None else processor.image_token_id}


def test_overlong_rows_are_counted_and_all_dropped_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    processor = processors.build("qwen2_5_vl")
    conversations = [chat("x", "y"), chat("word " * 99, "y"), chat("x", "y", Image.new("RGB", (280, 280)))]
    with caplog.at_level(logging.WARNING):
        kept, places = _drop_overlong_samples(conversations, processor, 40)
    assert places == [0, 2]
    assert kept[0] is conversations[0]
    assert "left out 1 of 3 samples" in caplog.text
    with pytest.raises(ValueError, match="All 3 samples in batch exceed max_length=3"):
        _drop_overlong_samples(conversations, processor, 3)
    batch = VLMCollator(processor, max_length=40, drop_overlong=True)([{"conversation": c} for c in conversations])
    assert batch["left_out"] == {"overlong": 1}
    assert len(batch["input_ids"]) == 2


def test_expansion() -> None:
    ids, mask = torch.tensor([5, 9, 6, 9]), torch.tensor([1, 1, 1, 1], dtype=torch.int32)
    grown, seen = expand_image_tokens(ids, mask, torch.tensor([[1, 4, 4], [3, 2, 4]]), 9)
    assert grown.tolist() == [5, 9, 9, 9, 9, 6, 9, 9]
    assert seen.tolist() == [1] * 8
    assert seen.dtype == torch.int32
    same, _ = expand_image_tokens(ids, mask, torch.zeros(0, 3).long(), 77)
    assert same is ids
    with pytest.raises(ValueError, match="2 image placeholders stand in the text and the grid has 1 rows"):
        expand_image_tokens(ids, mask, torch.tensor([[1, 4, 4]]), 9)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_an_image_in_an_answer_is_shown_not_said(name: str) -> None:
    processor = processors.build(name)
    conversation = chat("draw", "here it is")
    conversation[1]["content"].append({"type": "image", "image": IMAGE})
    batch = VLMCollator(processor)(rows(conversation))
    said = batch["labels"][0][batch["labels"][0] != -100]
    assert not _run_ids(processor) & set(said.tolist())
    assert processor.tokenizer.decode(said).startswith("here it is")


def test_fake_images_are_hidden_in_batches() -> None:
    processor = processors.build("qwen2_5_vl")
    examples = [
        {"conversation": chat("x", "y", IMAGE), "_injected_fake": True},
        {"conversation": chat("x", "y", IMAGE)},
    ]
    batch = VLMCollator(processor)(examples)
    media = torch.isin(batch["input_ids"], torch.tensor(sorted(media_token_ids(processor))))
    assert (batch["attention_mask"][0][media[0]] == 0).all()
    assert (batch["attention_mask"][1][media[1]] == 1).all()


def test_unknown_processors_take_the_default_family() -> None:
    assert family_of(object()).name == "default"
    batch = default_collate_fn(rows(chat("x", "y", IMAGE)), processors.build("gemma3"))
    assert batch["pixel_values"].dtype == torch.bfloat16
    text_only = VLMCollator(processors.build("qwen2_5_vl"))(
        rows([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])
    )
    assert "pixel_values" not in text_only
    assert "n_images_per_sample" not in text_only


def test_a_plain_tokenizer_collates_text() -> None:
    from tests.tiny_tokenizers import byte_level_bpe

    tokenizer = byte_level_bpe()
    batch = VLMCollator(tokenizer)(rows([{"role": "user", "content": "x"}, {"role": "assistant", "content": "yes"}]))
    assert tokenizer.decode(batch["labels"][0][batch["labels"][0] != -100]) == "yes<|im_end|>"
