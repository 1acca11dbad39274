"""Labels of real processors on the stress set: none wrong, at least 99 % labelled; the table: test_torchvision.py."""

from __future__ import annotations

import copy

import pytest
from PIL import Image

from spanwise.vlm import VLMCollator
from tests.vlm import processors
from tests.vlm.stress import run
from tests.vlm.test_collate_fns import chat, rows

IMAGE = Image.new("RGB", (60, 40), (10, 200, 30))


@pytest.mark.parametrize("name", [*processors.REAL, *processors.OTHER_TEMPLATES])
def test_no_label_is_wrong(name: str) -> None:
    """ChatML, Vicuna, Gemma, Idefics; Llama 3, Command-R, DeepSeek, Mistral and Phi; all with and without images."""
    outcome = run(name, 5)
    assert outcome.wrong == 0
    assert outcome.labelled >= 0.99 * outcome.total
    assert outcome.total == 50


def test_what_a_processor_puts_in_front_moves_no_label() -> None:
    """Llama 3.2's adds its first token to a text that lacks it, and counts its offsets from there."""
    processor = copy.copy(processors.build("mllama"))
    processor.chat_template = processors.chatml("<|image|>")
    batch = VLMCollator(processor)(rows(chat("look", "that is it", IMAGE), chat("x", "y", IMAGE)))
    said = [processor.tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    assert said == ["that is it<|im_end|>", "y<|im_end|>"]
    assert (batch["input_ids"][:, 0] == processor.tokenizer.bos_token_id).all()


@pytest.mark.parametrize("name", ["llava", "idefics3"])
def test_templates_that_read_parts_only_get_strings_as_parts(name: str) -> None:
    """They would print nothing for a string, and train on that."""
    processor = processors.build(name)
    parts = chat("what is it?", "a cat", IMAGE)
    mixed = [parts[0], {"role": "assistant", "content": "a cat"}]
    plain = [{"role": "user", "content": "and now?"}, {"role": "assistant", "content": "a dog"}]
    batch, expected = (VLMCollator(processor)(rows(one, plain)) for one in (mixed, parts))
    assert batch["labels"].tolist() == expected["labels"].tolist()
    assert "a dog" in processor.tokenizer.decode(batch["labels"][1][batch["labels"][1] != -100])
    assert "and now?" in processor.tokenizer.decode(batch["input_ids"][1])
    assert mixed[1]["content"] == "a cat"
