"""Remote code, as far as stand-ins go: called in its own style, its labels proven all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image

from spanwise.spans.chat import UnprovenSpanError
from spanwise.vlm import PreTokenizedDatasetWrapper, VLMCollator
from spanwise.vlm.collate_fns import (
    kimi_k25_vl_collate_fn,
    kimi_vl_collate_fn,
    nemotron_parse_collate_fn,
)
from spanwise.vlm.labels import labels_of_row
from tests.reference.label_oracle import expected_labels
from tests.vlm import processors, stand_ins
from tests.vlm.stress import Outcome, rows, run
from tests.vlm.test_collate_fns import chat
from tests.vlm.test_collate_fns import rows as examples_of

IMAGE = Image.new("RGB", (60, 40), (10, 200, 30))
PROMPT = "</s><s><predict_bbox><predict_classes><output_markdown>"


def said(processor: Any, labels: torch.Tensor) -> str:
    return processor.tokenizer.decode(labels[labels != -100])


def parsed(repeats: int) -> Outcome:
    """Nemotron-Parse on the first answers of the stress set: prompt given, answer and end token said."""
    processor, outcome = stand_ins.nemotron_parse(), Outcome("Nemotron-Parse")
    for row in rows("qwen2_vl", repeats):
        shown = {"role": "user", "content": [{"type": "image", "image": IMAGE}]}
        answers = [message["content"][0]["text"] for message in row["conversation"] if message["role"] == "assistant"]
        target = next((text for text in answers if text), "")
        if not target:
            continue
        batch = nemotron_parse_collate_fn([{"conversation": [shown, *row["conversation"]]}], processor)
        labels = batch["labels"][0].tolist()
        whole = [*batch["decoder_input_ids"][0].tolist(), labels[-1]]
        pieces = [(PROMPT, False), (target + "</s>", True)]
        right = labels == expected_labels(whole, processor.tokenizer, set(), pieces)[1:]
        outcome.labelled += right
        outcome.wrong += not right
    return outcome


def test_nemotron_parse_learns_the_answer_and_to_stop() -> None:
    outcome = parsed(3)
    assert outcome.wrong == 0
    assert outcome.labelled >= 25
    processor = stand_ins.nemotron_parse()
    silent = [{"role": "user", "content": [{"type": "image", "image": IMAGE}]}]
    with pytest.raises(ValueError, match=r"row 1 has roles \['user'\]; expected at least one assistant turn"):
        nemotron_parse_collate_fn(examples_of(chat("x", "y", IMAGE), silent), processor)
    with pytest.raises(ValueError, match="row 1: NemotronParseProcessor could not process it"):
        nemotron_parse_collate_fn(examples_of(chat("x", "y", IMAGE), chat("x", "y")), processor)


def test_no_label_of_kimi_vl_is_wrong() -> None:
    outcome = run("kimi_vl", 3, stand_ins.kimi_vl())
    assert (outcome.wrong, outcome.refused, outcome.labelled) == (0, 0, 30)


def test_kimi_vl_in_its_own_style() -> None:
    processor = stand_ins.kimi_vl()
    examples = examples_of(chat("word " * 40, "no"), chat("what", "a cat", IMAGE), chat("hi", "yes"))
    batch = kimi_vl_collate_fn(examples, processor, max_length=40)
    assert processor.calls[-1]["padding"] == "max_length"
    assert processor.calls[-1]["add_special_tokens"] is False
    assert batch["input_ids"].shape == (2, 39)
    assert batch["left_out"] == {"overlong": 1}
    assert [said(processor, labels) for labels in batch["labels"]] == ["a cat<|im_end|>", "yes<|im_end|>"]
    assert batch["n_images_per_sample"].tolist() == [1, 0]
    assert batch["image_grid_hws"].shape == (1, 2)
    cut = kimi_vl_collate_fn(examples_of(chat("hi", "yes " * 40)), processor, max_length=20, drop_overlong=False)
    assert cut["input_ids"].shape == (1, 19)
    assert "left_out" not in cut
    with pytest.raises(ValueError, match="row 0 brings media of type 'audio' to a KimiVLProcessor"):
        VLMCollator(processor)([examples[2] | {"audio": [0.0] * 9}])
    alone = PreTokenizedDatasetWrapper(examples, processor, inject_fake_images=False)[1]
    assert said(processor, alone["labels"]) == "a cat<|im_end|>"


def test_kimi_k25_takes_one_sample_at_a_time() -> None:
    processor = stand_ins.kimi_k25()
    examples = examples_of(chat("what", "a cat", IMAGE, IMAGE), chat("hi", "yes"))
    batch = kimi_k25_vl_collate_fn(examples, processor)
    assert [said(processor, labels) for labels in batch["labels"]] == ["a cat<|im_end|>", "yes<|im_end|>"]
    tokens = int((batch["input_ids"] == processor.tokenizer.convert_tokens_to_ids(stand_ins.PLACEHOLDER)).sum())
    assert tokens == int((batch["grid_thws"][:, 1] * batch["grid_thws"][:, 2] // 4).sum())
    assert batch["image_grid_hws"].tolist() == batch["grid_thws"][:, 1:].tolist()
    assert batch["n_images_per_sample"].tolist() == [2, 0]
    size = batch["input_ids"].shape[1] + 1
    cut = kimi_k25_vl_collate_fn(examples, processor, max_length=size - 2)
    assert said(processor, cut["labels"][0]) == "a c"
    left = kimi_k25_vl_collate_fn(examples, processor, max_length=size - 2, drop_overlong=True)
    assert left["left_out"] == {"overlong": 1}
    assert [said(processor, labels) for labels in left["labels"]] == ["yes<|im_end|>"]
    question = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match=r"row 1 has roles \['user'\]"):
        kimi_k25_vl_collate_fn(examples_of(chat("hi", "yes"), question), processor)
    with pytest.raises(ValueError, match="takes one sample at a time"):
        VLMCollator(processor)


class Slow:
    """A tokenizer without offsets, such as Kimi's: the tiny one behind methods that every tokenizer has."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        for name in ("encode", "get_added_vocab", "convert_ids_to_tokens", "convert_tokens_to_ids"):
            setattr(self, name, getattr(inner, name))


def test_tokenizers_without_offsets_are_placed_by_the_bytes_they_spell() -> None:
    inner = processors.tokenizer("<|im_user|>")
    text = "<|im_user|>wie geht's, 你好 🙂?<|im_start|>gut, naïve 🇫🇷<|im_end|>"
    answer = (text.index("gut"), len(text))
    ids = torch.tensor(inner.encode(text, add_special_tokens=False))
    offsets = torch.tensor(inner(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"])
    fast = labels_of_row(ids, None, text, [answer], offsets=offsets, replacements=(), processor=inner)
    slow = labels_of_row(ids, None, text, [answer], offsets=None, replacements=None, processor=Slow(inner))
    assert slow.tolist() == fast.tolist()
    assert inner.decode(slow[slow != -100]) == text[slice(*answer)]

    class Lossy(Slow):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.encode = lambda text, add_special_tokens: inner.encode(text.lower(), add_special_tokens=False)

    with pytest.raises(UnprovenSpanError, match="do not spell the text byte by byte"):
        labels_of_row(ids, None, text + "A", [answer], offsets=None, replacements=None, processor=Lossy(inner))
