"""Tables give back the bytes that were encoded, for every kind of tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from spanwise.spans.table import TableCache, inserted_ids, token_table, tokenizer_fingerprint
from tests.conftest import real_tokenizer

TEXT = "Hi there\n\n\tx = 12345 é 日本 \u0378 🙂👨‍👩‍👧 a<0x41>b"


class OnlyPieces:
    """The least a tokenizer can be."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return self.tokenizer.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("name", ["qwen3", "llama3_2", "gemma3", "mistral_nemo", "deepseek_v3", "command_r_plus"])
def test_pieces_join_to_the_text(name: str) -> None:
    tokenizer = real_tokenizer(name)
    assert token_table(tokenizer).join(tokenizer(TEXT, add_special_tokens=False)["input_ids"]) == TEXT.encode()


@pytest.mark.parametrize("name", ["llama2"])
def test_a_dummy_prefix_is_the_only_difference(name: str) -> None:
    tokenizer = real_tokenizer(name)
    assert token_table(tokenizer).join(tokenizer(TEXT, add_special_tokens=False)["input_ids"]) == b" " + TEXT.encode()


def test_tiny_tokenizers_have_the_kind_they_were_trained_as(
    byte_bpe: Any, sentencepiece_bpe: Any, unigram: Any, wordpiece: Any
) -> None:
    kinds = [token_table(tokenizer).kind for tokenizer in (byte_bpe, sentencepiece_bpe, unigram, wordpiece)]
    assert kinds == ["byte_level", "sentencepiece", "sentencepiece", "wordpiece"]


@pytest.mark.parametrize("fixture", ["byte_bpe", "sentencepiece_bpe", "wordpiece"])
def test_pieces_alone_give_the_same_bytes(fixture: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(fixture)
    whole, bare = token_table(tokenizer), token_table(OnlyPieces(tokenizer))
    assert (bare.kind, bare.size) == (whole.kind, whole.size)
    assert bare.flat.equal(whole.flat)
    assert bare.offsets.equal(whole.offsets)


def test_pieces_without_marks_are_taken_as_they_are() -> None:
    """é is a letter of GPT-2's alphabet, too, where it stands for the byte E9."""

    class Pieces:
        def __len__(self) -> int:
            return 2

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [["café", "日"][i] for i in ids]

    assert token_table(Pieces()).join([0, 1]) == "café日".encode()


def test_ids_beyond_the_table_stand_for_nothing(byte_bpe: Any) -> None:
    table = token_table(byte_bpe)
    assert [table.bytes_of(i) for i in (-1, table.size, table.size + 100)] == [b"", b"", b""]


def test_unknown_and_special_tokens_are_marked(wordpiece: Any, byte_bpe: Any) -> None:
    table = token_table(wordpiece)
    assert not table.known[wordpiece.unk_token_id]
    assert table.special[wordpiece.cls_token_id]
    assert token_table(byte_bpe).special.nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_what_a_call_inserts_is_found() -> None:
    tokenizer = real_tokenizer("command_r_plus")
    assert tokenizer.convert_ids_to_tokens(inserted_ids(tokenizer)[0]) == ["<BOS_TOKEN>"]
    assert inserted_ids(real_tokenizer("qwen3")) == ([], [])


def test_the_fingerprint_ignores_padding_state_and_sees_added_tokens(byte_bpe: PreTrainedTokenizerFast) -> None:
    before = tokenizer_fingerprint(byte_bpe)
    changed = PreTrainedTokenizerFast(tokenizer_object=byte_bpe.backend_tokenizer, pad_token="<pad>")
    other = tokenizer_fingerprint(changed)
    changed(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(changed) == other
    changed.add_tokens(["entirely new"])
    assert tokenizer_fingerprint(changed) != other
    assert tokenizer_fingerprint(byte_bpe) == before


def test_a_cache_keeps_tables_by_content_and_forgets_the_oldest(byte_bpe: Any, wordpiece: Any) -> None:
    cache = TableCache(limit=1)
    first = cache.get(byte_bpe)
    assert token_table(byte_bpe, cache) is first
    cache.get(wordpiece)
    assert cache.get(byte_bpe) is not first


def test_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected an object with convert_ids_to_tokens.*Fix: load it first"):
        token_table("gpt2")
