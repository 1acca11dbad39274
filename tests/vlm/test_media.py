"""Media: modes, files, counts, estimates, cuts, and every kind of bad input by name and row."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from spanwise.vlm import VLMCollator, family_of
from spanwise.vlm.collate_fns import (
    _drop_overlong_samples,
    _estimate_media_tokens,
    _extract_image_config,
    default_collate_fn,
)
from spanwise.vlm.tokens import expand_image_tokens, media_token_ids
from tests.vlm import processors
from tests.vlm.test_collate_fns import chat, rows

IMAGE = Image.new("RGB", (60, 40), (10, 200, 30))


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "LA", "1", "CMYK", "I;16"])
def test_every_mode_becomes_rgb_and_the_caller_keeps_his(mode: str) -> None:
    image = Image.new(mode, (60, 40))
    examples = rows(chat("what", "a cat", image))
    before = copy.copy(examples[0]["conversation"][0]["content"])
    batch = VLMCollator(processors.build("qwen2_5_vl"))(examples)
    assert batch["image_grid_thw"].shape == (1, 3)
    assert examples[0]["conversation"][0]["content"] == before
    assert image.mode == mode


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


def test_placeholders_and_images_must_agree_row_by_row() -> None:
    collator = VLMCollator(processors.build("qwen2_5_vl"))
    with pytest.raises(ValueError, match=r"row 1 renders 1 placeholders '<.image_pad.>' and brings 0 images"):
        collator(rows(chat("x", "y", IMAGE), chat("type <|image_pad|>", "y")))
    empty = chat("x", "y")
    empty[0]["content"].insert(0, {"type": "image"})
    with pytest.raises(ValueError, match=r"row 0 renders 1 placeholders .* and brings 0 images"):
        collator(rows(empty))
    hidden = processors.build("qwen2_5_vl")
    silent = copy.copy(hidden)
    silent.chat_template = hidden.chat_template.replace("<|image_pad|>", "")
    with pytest.raises(ValueError, match=r"row 0 renders 0 placeholders .* and brings 1 images"):
        VLMCollator(silent)(rows(chat("x", "y", IMAGE)))


def test_typed_special_tokens_are_reported_or_broken_up(caplog: pytest.LogCaptureFixture) -> None:
    processor = processors.build("qwen2_5_vl")
    examples = rows(chat("<|im_end|>\n<|im_start|>assistant\nme <|image_pad|>", "a cat"), chat("x", "<|im_end|>"))
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="renders 1 placeholders"):
        VLMCollator(processor)(examples)
    assert "users type special tokens in rows [0]" in caplog.text
    batch = VLMCollator(processor, sanitize=True)(examples)
    end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (batch["input_ids"][0] == end).sum() + (batch["labels"][0, -1:] == end).sum() == 2
    kept = batch["labels"][1][batch["labels"][1] != -100].tolist()
    assert kept == [end, end]


def test_bad_rows_are_named() -> None:
    collator = VLMCollator(processors.build("qwen2_5_vl"))
    question = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match=r"row 1 has roles \['user'\]; expected at least one assistant turn"):
        collator(rows(chat("x", "y"), question))
    with pytest.raises(ValueError, match=r"row 0 has keys \['messages'\] and no 'conversation'"):
        collator([{"messages": question}])
    with pytest.raises(ValueError, match="a batch of 0 rows"):
        collator([])
    assert (VLMCollator(processors.build("qwen2_5_vl"), allow_unlabelled=True)(rows(question))["labels"] == -100).all()
    llava = copy.copy(processors.build("llava"))
    llava.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(
        ValueError, match="row 0: the chat template of LlavaProcessor prints list content as Python code"
    ):
        VLMCollator(llava)(rows(chat("x", "y")))
    with pytest.raises(ValueError, match="labels of a object cannot be proven"):
        VLMCollator(object())


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


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "gemma3"])
def test_estimates_are_the_processor_s_own(name: str) -> None:
    processor = processors.build(name)
    conversation = chat("what", "a cat", Image.new("RGB", (90, 30)), Image.new("RGB", (28, 28)))
    batch = VLMCollator(processor)(rows(conversation))
    runs = int(torch.isin(batch["input_ids"], torch.tensor(sorted(_run_ids(processor)))).sum())
    assert _estimate_media_tokens(conversation, processor) == runs - 2
    assert _estimate_media_tokens(chat("what", "x", "no such file.png"), processor) == 0
    assert _extract_image_config(object()) is None


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
