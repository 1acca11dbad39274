"""Tokenizers are asked without leaving a trace, and without being copied."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tokenizers import Tokenizer

from spanwise.spans.encode import encode_plain, inserted_ids, same_ids, whole_texts
from tests import tiny_tokenizers
from tests.conftest import real_tokenizer


@pytest.fixture
def cutting() -> Any:
    """A tokenizer whose last caller left truncation and padding switched on."""
    tokenizer = copy.deepcopy(tiny_tokenizers.wordpiece())
    tokenizer.backend_tokenizer.enable_truncation(max_length=2, stride=1, direction="left")
    tokenizer.backend_tokenizer.enable_padding(length=7, pad_token="[PAD]", direction="left")
    return tokenizer


def test_a_question_is_neither_cut_nor_padded_and_the_state_stays(cutting: Any) -> None:
    backend = cutting.backend_tokenizer
    before = backend.truncation, backend.padding
    text = "the statement is executed once"
    assert encode_plain(cutting, text) == tiny_tokenizers.wordpiece()(text, add_special_tokens=False)["input_ids"]
    assert (backend.truncation, backend.padding) == before
    with whole_texts(cutting) as found:
        assert (found.truncation, found.padding) == (None, None)
    assert (backend.truncation, backend.padding) == before


def test_asking_copies_no_tokenizer(cutting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of 150k ids takes half a second, and a collator asks for every batch."""
    monkeypatch.setattr(Tokenizer, "from_str", lambda text: pytest.fail("the tokenizer was copied"))
    assert inserted_ids(cutting) == inserted_ids(tiny_tokenizers.wordpiece())


def test_what_cannot_be_asked_has_no_answer() -> None:
    class Mute:
        def encode(self, text: str) -> list[int]:
            raise NotImplementedError

    assert encode_plain(object(), "a") is None
    assert encode_plain(Mute(), "a") is None
    assert inserted_ids(Mute()) == ([], [])


def test_vocabularies_are_told_apart_and_added_tokens_do_not_matter() -> None:
    assert same_ids(real_tokenizer("qwen3"), real_tokenizer("qwen2_5"))
    assert not same_ids(real_tokenizer("qwen3"), real_tokenizer("llama3_2"))
    assert not same_ids(tiny_tokenizers.byte_level_bpe(), tiny_tokenizers.byte_level_bpe(900, start=12))
    assert same_ids(tiny_tokenizers.byte_level_bpe(), object()), "an object that cannot be asked is given the benefit"
