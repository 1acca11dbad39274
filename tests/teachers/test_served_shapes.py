"""Documented answers of vLLM, OpenAI-style servers and SGLang, read into one and the same scores."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanwise.teachers.documents import DocumentScores
from spanwise.teachers.served_shapes import ServedScoresError, read_echo, read_sglang, read_vllm

ANSWERS = Path(__file__).with_name("answers")
IDS = [5, 31, 12]
Reader = Callable[[dict[str, Any], list[int], int, int], DocumentScores]


def answer(name: str) -> dict[str, Any]:
    content = json.loads((ANSWERS / f"{name}.json").read_text())
    return content["choices"][0] if "choices" in content else content


FORMS: list[tuple[str, Reader]] = [
    ("vllm_completion", read_vllm),
    ("openai_echo", read_echo),
    ("sglang_generate", read_sglang),
]


@pytest.mark.parametrize(("name", "read"), FORMS)
def test_every_form_says_the_same(name: str, read: Reader) -> None:
    scores = read(answer(name), IDS, 2, 100)
    assert scores.counts.tolist() == [2, 2]
    assert scores.ids.tolist() == [31, 7, 3, 40]
    assert scores.logp.tolist() == [-0.5, -1.5, -0.25, -2.0]
    assert scores.observed_logp.tolist() == [-0.5, -4.0]
    rest = [1 - math.exp(-0.5) - math.exp(-1.5), 1 - math.exp(-0.25) - math.exp(-2)]
    np.testing.assert_allclose(np.exp(scores.log_tail), rest, rtol=1e-5)


@pytest.mark.parametrize(("name", "read"), FORMS)
def test_ids_beyond_the_tokenizer_join_the_tail(name: str, read: Reader) -> None:
    scores = read(answer(name), IDS, 2, 35)
    assert scores.ids.tolist() == [31, 7, 3]
    np.testing.assert_allclose(np.exp(scores.log_tail[1]), 1 - math.exp(-0.25), rtol=1e-5)


@pytest.mark.parametrize(("name", "read"), FORMS)
def test_other_ids_than_were_sent_are_refused(name: str, read: Reader) -> None:
    with pytest.raises(ServedScoresError, match=r"at token 2 where 13 was sent"):
        read(answer(name), [5, 31, 13], 2, 100)


@pytest.mark.parametrize(("name", "read"), FORMS)
def test_another_number_of_tokens_is_refused(name: str, read: Reader) -> None:
    with pytest.raises(ServedScoresError, match="for a prompt of 5 tokens"):
        read(answer(name), [5, 31, 12, 1, 1], 2, 100)


@pytest.mark.parametrize(("name", "read"), [FORMS[0], FORMS[2]])
def test_an_answer_without_prompt_logprobs_is_refused(name: str, read: Reader) -> None:
    with pytest.raises(ServedScoresError, match="does not return prompt log-probabilities"):
        read({"text": "hello", "logprobs": None}, IDS, 2, 100)


def test_tokens_named_by_text_are_refused() -> None:
    changed = answer("openai_echo")
    changed["logprobs"]["tokens"] = ["The", " capital", " of", " the"]
    with pytest.raises(ServedScoresError, match="names tokens by text"):
        read_echo(changed, IDS, 2, 100)


@pytest.mark.parametrize("wrong", [3.5, "low", math.nan, None])
def test_what_is_no_log_probability_is_refused(wrong: object) -> None:
    changed = copy.deepcopy(answer("sglang_generate"))
    changed["meta_info"]["input_token_logprobs"][2][0] = wrong
    with pytest.raises(ServedScoresError, match="at token 2; expected a number"):
        read_sglang(changed, IDS, 2, 100)


def test_an_id_below_zero_joins_the_tail() -> None:
    changed = answer("vllm_completion")
    changed["prompt_logprobs"][1] = {"31": {"logprob": -0.5, "rank": 1}, "-7": {"logprob": -1.5, "rank": 2}}
    scores = read_vllm(changed, IDS, 2, 100)
    assert scores.ids.tolist()[0] == 31
    assert scores.counts.tolist() == [1, 2]
    np.testing.assert_allclose(np.exp(scores.log_tail[0]), 1 - math.exp(-0.5), rtol=1e-5)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"log_tail": [-1.0]}, r"spanwise\.log_tail has 1 entries for a prompt of 2"),
        ({"log_tail": [-1.0, math.nan]}, "log-probability nan at token 2"),
        ({"log_tail": [-1.0, -2.0], "entropy": "high"}, r"has no spanwise\.entropy"),
    ],
)
def test_a_tail_that_does_not_fit_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ServedScoresError, match=words):
        read_vllm(answer("vllm_completion") | {"spanwise": said}, IDS, 2, 100)


def test_a_list_that_holds_all_the_mass_keeps_a_finite_tail() -> None:
    changed = answer("vllm_completion")
    changed["prompt_logprobs"][1] = {"31": {"logprob": 0.0, "rank": 1}}
    scores = read_vllm(changed, IDS, 2, 100)
    assert -22 < scores.log_tail[0] < -20
