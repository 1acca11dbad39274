"""Ugly rows: what is wrong with one is said in four parts, and what is only untidy is read as it was meant."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from spanwise.xtoken import CrossTokenizerCollator, TokenAligner
from tests import tiny_tokenizers
from tests.conftest import real_tokenizer
from tests.xtoken.aligned import aligner

FOUR_PARTS = r"(?s)expected.*(probably|likely).*Fix:"
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


def collator(student: Any = None, teacher: Any = None, **options: Any) -> CrossTokenizerCollator:
    mine, theirs = student or tiny_tokenizers.byte_level_bpe(), teacher or tiny_tokenizers.byte_level_bpe(900, start=12)
    given = {"ctx_length_student": 32, "aligner": TokenAligner(mine, theirs)} | options
    return CrossTokenizerCollator(student_tokenizer=mine, teacher_tokenizer=theirs, **given)


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": torch.tensor([[1, 2], [3, 4]])},
        {"input_ids": [1.5]},
        {"input_ids": [1, None]},
        {"input_ids": "12"},
        {"input_ids": 12},
        {"input_ids": [5, -100]},
        {"text": "a", "loss_multiplier": "much"},
        {"text": "a", "loss_multiplier": float("nan")},
        {"text": "a", "loss_multiplier": [1.0, 2.0]},
        {"message_log": [{"content": 5}]},
        {"message_log": {"content": "a"}},
        {"prompt": [USER], "completion": [ANSWER]},
        {"messages": [USER, {"role": "assistant", "content": "a \ud800"}]},
        {"messages": [{"role": "user\udc80", "content": "a"}, ANSWER]},
        {"messages": [USER, ANSWER], "tools": "[]"},
    ],
)
def test_a_wrong_row_is_refused_with_the_remedy(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=FOUR_PARTS):
        collator()([row])


def test_untidy_rows_are_read_as_they_were_meant() -> None:
    rows = [
        {"text": "a", "loss_multiplier": None, "idx": None},
        {"text": "a", "loss_multiplier": torch.tensor(0.5), "idx": np.int64(7)},
        {"input_ids": np.array([68])},
        {"input_ids": [torch.tensor(68)]},
        {"message_log": [{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": None}]}]},
        {"text": "a", "messages": None, "input_ids": None},
    ]
    batch = collator()(rows)
    assert (batch["input_ids"] == batch["input_ids"][0]).all()
    assert batch["sample_mask"].tolist() == [1.0, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert list(batch["idx"]) == [0, 7, 2, 3, 4, 5]


def test_keys_without_a_value_are_no_keys() -> None:
    """Columnar files give every message the keys of all others; Llama 3.2's template asks whether a key is there."""
    tidy = [USER, ANSWER]
    untidy = [{**message, "tool_calls": None, "name": None} for message in tidy]
    llama, qwen = real_tokenizer("llama3_2"), real_tokenizer("qwen3")
    made = collator(llama, qwen, aligner=aligner("llama3_2", "qwen3"), ctx_length_student=99)
    first, second = made([{"messages": tidy}]), made([{"messages": untidy}])
    assert first["input_ids"].equal(second["input_ids"])
    assert first["loss_mask"].sum() > 0
    assert first["loss_mask"].equal(second["loss_mask"])


def test_an_empty_thinking_block_is_no_closing_text() -> None:
    """Qwen 3 writes one before an empty answer; Llama 3.2 has only its stop token there."""
    made = collator(
        real_tokenizer("qwen3"), real_tokenizer("llama3_2"), aligner=aligner("qwen3", "llama3_2"), ctx_length_student=99
    )
    batch = made([{"messages": [USER, {"role": "assistant", "content": ""}]}])
    assert not batch["alignment_pair_is_correct"].any()
    assert real_tokenizer("qwen3").decode(batch["input_ids"][0][batch["loss_mask"][0] > 0]).endswith("<|im_end|>")


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_ids_that_do_not_spell_their_text_are_refused(kind: str) -> None:
    student = getattr(tiny_tokenizers, kind)()
    made = collator(student)
    with pytest.raises(ValueError, match=rf"cannot be read back.*{FOUR_PARTS[4:]}"):
        made([{"input_ids": student("the 日本 is")["input_ids"]}])


def test_answers_that_are_not_found_in_the_tokens_are_counted() -> None:
    """A tokenizer that changes every word leaves nothing to prove what was said by; that must not go unseen."""
    student = copy.deepcopy(tiny_tokenizers.unigram())
    student.chat_template = tiny_tokenizers.CHAT_TEMPLATE
    teacher = tiny_tokenizers.byte_level_bpe()
    chat = [{"role": "user", "content": "½"}, {"role": "assistant", "content": "日本"}]
    for packing in (False, True):
        made = collator(student, teacher, ctx_length_student=64, packing=packing)
        batch = made([{"messages": chat}, {"text": "the statement"}])
        assert batch["left_out"] == {"answers_not_found_in_tokens": 1}
        assert made([{"text": "the statement"}])["left_out"] == {}


def with_end(tokenizer: Any) -> Any:
    """T5's way: the tokenizer writes the end itself, also behind a text that it cut."""
    from tokenizers.processors import TemplateProcessing

    ending = copy.deepcopy(tokenizer)
    end = (ending.eos_token, ending.eos_token_id)
    ending.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    return ending


def test_every_text_ends_once_and_a_cut_one_has_no_end_to_learn_from() -> None:
    plain, teacher = tiny_tokenizers.byte_level_bpe(), tiny_tokenizers.byte_level_bpe(900, start=12)
    row = {"prompt": "the statement", "completion": " is executed"}
    for student in (plain, with_end(plain)):
        size = len(plain(row["prompt"] + row["completion"])["input_ids"])
        for length in (size - 2, size, size + 1, size + 5):
            made = collator(student, teacher, ctx_length_student=length, ctx_length_teacher=64)
            batch = made([row])
            trained = batch["input_ids"][0][batch["loss_mask"][0] > 0]
            assert (batch["input_ids"][0][: batch["input_lengths"][0]] == plain.eos_token_id).sum() <= 1
            assert (trained == plain.eos_token_id).any() == (length > size)
    spelled = {**row, "completion": " is executed<|im_end|>"}
    ids = collator(plain, teacher)([spelled])["input_ids"][0]
    assert (ids == plain.eos_token_id).sum() == 1
    given = {"input_ids": [*plain("the")["input_ids"], plain.eos_token_id]}
    assert (collator(plain, teacher, append_eos=True)([given])["input_ids"] == plain.eos_token_id).sum() == 1


def test_ids_are_cut_on_the_side_on_which_the_tokenizer_cuts() -> None:
    student = copy.deepcopy(tiny_tokenizers.byte_level_bpe())
    student.truncation_side = "left"
    ids = student("the statement is executed")["input_ids"]
    made = collator(student, ctx_length_student=4, ctx_length_teacher=64)
    by_ids, by_text = made([{"input_ids": ids}]), made([{"text": "the statement is executed"}])
    assert by_ids["input_ids"].tolist() == [ids[-4:]]
    assert by_ids["alignment_student_chunk_id"].equal(by_text["alignment_student_chunk_id"])
    assert by_ids["alignment_pair_is_correct"].any()


def test_aligners_of_other_tokenizers_are_refused() -> None:
    mine, theirs = tiny_tokenizers.byte_level_bpe(), tiny_tokenizers.sentencepiece_bpe()
    for wrong in (TokenAligner(theirs, mine), TokenAligner(mine, mine), None):
        with pytest.raises(ValueError, match=FOUR_PARTS):
            collator(mine, theirs, aligner=wrong)
    assert "teacher_input_ids" not in collator(mine, copy.deepcopy(mine), aligner=None)([{"text": "a"}])


UNTYPED = """
import torch
from spanwise import CrossTokenizerCollator, TokenAligner

class Pieces:
    pad_token_id = 0
    def __len__(self): return 3
    def __call__(self, texts, **options): return {"input_ids": [[1] for _ in texts]}
    def convert_ids_to_tokens(self, ids): return ["abc"[i] for i in ids]

one = Pieces()
made, ids = TokenAligner(one, one), torch.tensor([[1]])
calls = [
    lambda: made.align([[1]], [[1]]),
    lambda: made.align(ids.numpy(), ids),
    lambda: made.align(None, ids),
    lambda: made.align(ids.bool(), ids),
    lambda: made.align(ids, ids, student_attention_mask=[[1]]),
    lambda: CrossTokenizerCollator(student_tokenizer=one, teacher_tokenizer=one, ctx_length_student=None),
    lambda: CrossTokenizerCollator(student_tokenizer=one, teacher_tokenizer=one, ctx_length_student="8"),
    lambda: CrossTokenizerCollator(student_tokenizer="gpt2", teacher_tokenizer=one, ctx_length_student=8),
    lambda: CrossTokenizerCollator(student_tokenizer=one, teacher_tokenizer=one, aligner="x", ctx_length_student=8),
]
for call in calls:
    try:
        call()
    except ValueError as error:
        assert all(word in str(error) for word in ("expected", "probably", "Fix:")), error
    else:
        raise SystemExit("nothing was refused")
print(len(calls))
"""


def test_what_annotations_forbid_is_refused_in_words_where_nobody_checks_them() -> None:
    result = subprocess.run([sys.executable, "-c", UNTYPED], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "9\n"), result.stderr
