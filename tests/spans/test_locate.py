"""Which tokens lie wholly inside given characters, against the oracle's spans; and tokens that swallow blanks."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from spanwise.spans.fold import without_blanks_beside
from spanwise.spans.locate import LocatedTokens
from spanwise.spans.profile import Profile, profile_of
from spanwise.spans.table import token_table
from spanwise.xtoken import CrossTokenizerCollator, TokenAligner
from tests import tiny_tokenizers
from tests.conftest import real_tokenizer
from tests.reference.alignment import is_nfc, spans, to_nfc
from tests.xtoken.aligned import check_form, ids_of
from tests.xtoken.test_align_hard_cases import CASES, NAMES


@cache
def profile(name: str) -> Profile:
    return profile_of(real_tokenizer(name), token_table(real_tokenizer(name)))


@pytest.mark.parametrize("name", NAMES)
def test_tokens_behind_every_character_are_those_of_the_oracle(name: str) -> None:
    tokenizer = real_tokenizer(name)
    for case in (
        "prose",
        "nfd",
        "reordered marks",
        "jamo",
        "singletons",
        "literal ▁",
        "leading spaces",
        "emoji",
        "control",
    ):
        text = CASES[case][:40]
        ids = ids_of(name, text)
        located = LocatedTokens(text, np.array(ids), profile(name))
        assert located.found
        assert located.whole
        for start in range(len(text) + 1):
            # On the axis of an NFC tokenizer; a place inside what it composes has none, and moves on to the next.
            place = next(at for at in range(start, len(text) + 1) if to_nfc(text, len(text[:at].encode())) is not None)
            before = text[:place].encode()
            least = to_nfc(text, len(before)) if is_nfc(tokenizer) else len(text[:start].encode())
            expected = [low >= least and high > low for low, high in spans(tokenizer, text, ids)]
            assert located.inside(start, len(text)).tolist() == expected, (case, start)


@pytest.mark.parametrize("name", ["qwen3", "llama2"])
def test_cut_tokens_do_not_reach_the_end(name: str) -> None:
    text = CASES["prose"]
    ids = np.array(ids_of(name, text))
    for size in range(1, len(ids)):
        assert not LocatedTokens(text, ids[:size], profile(name)).whole
    assert LocatedTokens("", ids[:0], profile(name)).whole


@settings(max_examples=60)
@given(text=st.text(st.sampled_from("a \n\t\u00a0\u3000<end>"), max_size=30), left=st.booleans(), right=st.booleans())
def test_swallowed_blanks_are_those_that_a_tokenizer_takes(text: str, left: bool, right: bool) -> None:
    """Against the Rust implementation: the text without the blanks is what is left to be spelled."""
    words = {b"<end>": (left, right)}
    fold = without_blanks_beside(text.encode(), words)
    tokenizer = swallowing(left, right)
    pieces = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    table = token_table(tokenizer)
    assert fold.content == table.join(pieces.ids)
    moved, exact = fold.move(np.arange(len(text.encode()) + 1))
    assert (np.diff(moved) >= 0).all()
    assert exact[0]
    assert exact[-1]


@cache
def swallowing(left: bool, right: bool, base: str = "byte_level_bpe") -> Any:
    """Phi-3's way: control tokens that take the blanks beside them."""
    tokenizer = copy.deepcopy(getattr(tiny_tokenizers, base)())
    added = [AddedToken(word, lstrip=left, rstrip=right, special=True) for word in ("<end>", "<user>", "<assistant>")]
    tokenizer.add_tokens(added, special_tokens=True)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize("base", ["byte_level_bpe", "sentencepiece_bpe"])
@pytest.mark.parametrize(("left", "right"), [(False, True), (True, False), (True, True)])
def test_a_token_that_swallows_blanks_covers_them(base: str, left: bool, right: bool) -> None:
    """The blanks are in the chunk of the token that took them, and nothing around is lost."""
    student, teacher = swallowing(left, right, base), tiny_tokenizers.byte_level_bpe()
    text = "the statement \n<end>\n\nis executed<end> "
    ids = student(text, add_special_tokens=False)["input_ids"], teacher(text)["input_ids"]
    for mine, theirs, pair in ((student, teacher, ids), (teacher, student, ids[::-1])):
        found = TokenAligner(mine, theirs, byte_offsets=True).align(*(torch.tensor([side]) for side in pair))
        check_form(found)
        assert found.pair_is_correct[found.pair_valid].all()
        chunks = found.student_chunk_id if mine is student else found.teacher_chunk_id
        assert (chunks >= 0).all()
    chunk = chunks[0, ids[0].index(student.convert_tokens_to_ids("<end>"))]
    spelled = teacher.decode(
        [token for token, number in zip(ids[1], found.student_chunk_id[0], strict=True) if number == chunk]
    )
    assert spelled == " \n" * left + "<end>" + "\n\n" * right


@pytest.mark.parametrize("base", ["byte_level_bpe", "sentencepiece_bpe"])
def test_a_chat_of_such_tokens_trains_the_end_of_every_turn(base: str) -> None:
    student, teacher = swallowing(False, True, base), tiny_tokenizers.byte_level_bpe()
    made = CrossTokenizerCollator(
        student_tokenizer=student,
        teacher_tokenizer=teacher,
        aligner=TokenAligner(student, teacher),
        ctx_length_student=96,
    )
    said = ["The statement is executed.", "ok"]
    turns = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": words}] for words in said]
    batch = made([{"messages": [message for turn in turns for message in turn]}])
    trained = student.decode(batch["input_ids"][0][batch["loss_mask"][0] > 0])
    assert "".join(trained.split()) == "".join("".join(words + "<end>" for words in said).split())
    closing = batch["input_ids"][0] == student.convert_tokens_to_ids("<end>")
    answers = closing & (batch["loss_mask"][0] > 0)
    chunks = batch["alignment_student_chunk_id"][0][answers]
    assert len(chunks) == 2
    assert batch["alignment_pair_is_correct"][0][chunks].all()
