"""Texts beside ids: those of other rows are refused, and nothing that a tokenizer really encoded is."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.xtoken import CrossTokenizerCollator, TokenAligner
from tests import tiny_tokenizers
from tests.conftest import real_tokenizer
from tests.xtoken.aligned import aligner, check_form, ids_of
from tests.xtoken.test_align_hard_cases import ALL_PLANES, CASES, LITERALS

KINDS = {
    "byte": tiny_tokenizers.byte_level_bpe,
    "sentencepiece": tiny_tokenizers.sentencepiece_bpe,
    "unigram": tiny_tokenizers.unigram,
    "wordpiece": tiny_tokenizers.wordpiece,
}
PAIRS = [*itertools.permutations(KINDS, 2), ("wordpiece", "wordpiece")]
# Unknown characters inside words, compatibility forms, literals of control tokens: all interrupt what the ids spell.
INTERRUPTED = [
    "a日b",
    "½",
    "é日è",
    "a[UNK]b[SEP]c",
    "Å𬥗⚀<s>Σ",
    "日本ab",
    "ﬁ日本",
    "☃a☃b",
    "x=½",
    "a</s>b",
    "ﷺ" * 3,
    "",
]
SEEDED = st.lists(
    st.one_of(
        ALL_PLANES, LITERALS, st.sampled_from(["[UNK]", "[SEP]", "½", "ﷺ", "日", "ß", "İ", "ς", "\u00ad", "\x85"])
    ),
    max_size=6,
).map("".join)


@cache
def collator(student: str, teacher: str) -> CrossTokenizerCollator:
    mine, theirs = KINDS[student](), KINDS[teacher]()
    return CrossTokenizerCollator(
        student_tokenizer=mine,
        teacher_tokenizer=theirs,
        aligner=TokenAligner(mine, theirs, byte_offsets=True),
        ctx_length_student=64,
        ctx_length_teacher=64,
        padding="longest",
        byte_offsets=True,
    )


def align_with_texts(student: Any, teacher: Any, made: TokenAligner, text: str) -> None:
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for tokenizer in (student, teacher)]
    if all(ids):
        check_form(made.align(torch.tensor([ids[0]]), torch.tensor([ids[1]]), texts=[text]))


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_the_hard_cases_pass_through_the_collator_and_as_texts(student: str, teacher: str) -> None:
    made = collator(student, teacher)
    texts = [*CASES.values(), *INTERRUPTED]
    batch = made([{"text": text} for text in texts])
    assert len(batch["input_ids"]) == len(texts)
    for text in texts:
        align_with_texts(made.student_tokenizer, made.teacher_tokenizers[0], made.aligners[0], text)


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
@settings(max_examples=12)
@given(text=SEEDED)
def test_no_text_is_taken_for_anothers(student: str, teacher: str, text: str) -> None:
    made = collator(student, teacher)
    made([{"text": text}])
    align_with_texts(made.student_tokenizer, made.teacher_tokenizers[0], made.aligners[0], text)


def test_literals_of_control_tokens_are_no_other_text() -> None:
    made = aligner("qwen3", "llama2")
    for text in ("a</s>b", "a</s>b</s>c</s>d", "<s>ab</s><s>cd</s>", "Hi</s>you", CASES["special literals"]):
        align_with_texts(real_tokenizer("qwen3"), real_tokenizer("llama2"), made, text)


@pytest.mark.parametrize("size", [1, 3, 40])
def test_texts_in_another_order_are_refused(size: int) -> None:
    """Prose of one language and length still differs in the order of its letters."""
    draw = random.Random(0)
    words = " ".join(tiny_tokenizers.corpus()).split()
    texts = [" ".join(draw.sample(words, 6 * size)) for _ in range(3)]
    rows = {name: [torch.tensor(ids_of(name, text)) for text in texts] for name in ("qwen3", "llama2")}
    ids = {
        name: torch.nn.utils.rnn.pad_sequence(side, batch_first=True, padding_value=-1) for name, side in rows.items()
    }
    made = aligner("qwen3", "llama2")
    masks = {"student_attention_mask": ids["qwen3"] >= 0, "teacher_attention_mask": ids["llama2"] >= 0}
    made.align(ids["qwen3"], ids["llama2"], **masks, texts=texts)
    with pytest.raises(ValueError, match=r"(?s)expected the text.*probably in another order than the rows.*Fix:"):
        made.align(ids["qwen3"], ids["llama2"], **masks, texts=[*texts[1:], texts[0]])
