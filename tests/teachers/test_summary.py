"""One pass over the logits gives what several passes give."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spanwise.teachers.scores import TeacherScores
from spanwise.teachers.summary import summarise
from spanwise.teachers.teacher import ScoreRequest


@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(2, 40),
    st.integers(1, 50),
    st.sampled_from([0.25, 1.0, 3.0]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_one_pass_equals_several(rows, length, width, k, temperature, statistics, words, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, length, width, generator=generator, dtype=torch.float64) * 4
    if width > 3:
        logits[..., 1] = -torch.inf
    before = logits.clone()
    ids = torch.randint(0, width, (rows, length), generator=generator)
    word_start = torch.rand(width, generator=generator) < 0.5 if words else None
    request = ScoreRequest(
        input_ids=ids,
        token_mask=torch.ones_like(ids),
        temperature=temperature,
        top_k=k,
        statistics=statistics,
        word_start=word_start,
    )
    found = summarise(logits, request)
    expected = TeacherScores(logits=logits)
    if statistics:
        expected = expected.with_statistics(ids, word_start=word_start, temperature=temperature)
    expected = expected.topk(k, temperature=temperature)
    assert torch.equal(logits, before)
    for field in fields(expected):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(theirs, torch.Tensor) and field.name == "log_tail":
            # The tail of a full list is nothing; several passes leave rounding there.
            torch.testing.assert_close(ours.exp(), theirs.exp(), atol=1e-12, rtol=1e-9)
        elif isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
        else:
            assert ours == theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(dtype):
    logits = torch.randn(2, 5, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = torch.zeros(2, 5, dtype=torch.long)
    request = ScoreRequest(input_ids=ids, token_mask=torch.ones_like(ids), top_k=300)
    found = summarise(logits, request)
    assert found.top_logp.dtype == torch.float32
    torch.testing.assert_close(found.top_logp.exp().sum(-1), torch.ones(2, 5))
