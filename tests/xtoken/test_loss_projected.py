"""P-KL against its dense twin: every switch, every teacher form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.teachers.scores import TeacherScores
from spanwise.xtoken.losses import count_chunks, plan_chunks, projected_kl, share_scores
from tests.reference import losses as twin
from tests.xtoken.cases import SHAPES, SHAPES_RTOL, assert_same, dense_matrix, random_case


@settings(max_examples=60)
@given(
    st.integers(0, 10_000), st.sampled_from([1, 3, 8, 11, 50]), st.sampled_from([0.5, 1.0, 2.0]), st.booleans(),
    st.booleans(), st.sampled_from(["document", "all", "all_but_last"]), st.sampled_from([0, 2]),
    st.sampled_from([1, 3]),
)  # fmt: skip
def test_equals_the_twin(seed, topk, temperature, reverse, only_correct, scope, extra, k) -> None:
    case = random_case(seed, extra=extra, k=k)
    rows = "all" if scope == "document" else scope
    scope = "document" if scope == "document" else "microbatch"
    expected = twin.projected_kl(
        case.z, case.y, case.alignment, dense_matrix(case.projection), temperature=temperature, reverse=reverse,
        vocab_topk=topk, scope=scope, rows=rows, sample_mask=case.sample_mask, only_correct=only_correct,
    )  # fmt: skip
    parts = projected_kl(
        case.z, TeacherScores(logits=case.y), case.alignment, case.projection, temperature=temperature, reverse=reverse,
        vocab_topk=topk, topk_scope=scope, topk_rows=rows, sample_mask=case.sample_mask,
        exact_token_match_only=only_correct,
    )  # fmt: skip
    assert_same(parts, expected, case.z)
    counted = count_chunks(case.alignment, sample_mask=case.sample_mask, exact_token_match_only=only_correct)
    assert float(counted) == float(parts.count)


@settings(max_examples=60)
@given(st.integers(0, 10_000), SHAPES, st.booleans(), st.sampled_from([1, 3, 50]))
def test_equals_the_twin_at_any_shape(seed, shape, reverse, topk) -> None:
    case = random_case(seed, **shape)
    options = {"temperature": 2.0, "reverse": reverse, "vocab_topk": topk, "sample_mask": case.sample_mask}
    expected = twin.projected_kl(case.z, case.y, case.alignment, dense_matrix(case.projection), **options)
    parts = projected_kl(case.z, TeacherScores(logits=case.y), case.alignment, case.projection, **options)
    assert_same(parts, expected, case.z, rtol=SHAPES_RTOL)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_shared_set_has_the_dense_value(temperature: float, reverse: bool) -> None:
    case = random_case(5)
    scores = TeacherScores(logits=case.y)
    options = {"temperature": temperature, "reverse": reverse, "vocab_topk": 4}
    dense = projected_kl(case.z, scores, case.alignment, case.projection, **options)
    plan = plan_chunks(case.alignment)
    shared = share_scores(scores, plan, teacher_vocab_size=11, vocab_topk=4, temperature=temperature)
    assert shared.columns.shape[-1] == 4
    sent = projected_kl(case.z, shared, case.alignment, case.projection, **options)
    assert torch.equal(dense.total, sent.total)


@pytest.mark.parametrize("missing", ["tail_bucket", "renormalise"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_topk_approaches_the_dense_value(missing: str, temperature: float) -> None:
    case = random_case(7, teachers=40)
    options = {"temperature": temperature, "vocab_topk": 6, "missing": missing}
    dense = projected_kl(case.z, TeacherScores(logits=case.y), case.alignment, case.projection, **options).total
    gaps = []
    for k in (2, 20, 40):
        scores = TeacherScores(logits=case.y).topk(k, temperature=temperature)
        parts = projected_kl(case.z, scores, case.alignment, case.projection, **options)
        gaps.append(abs(float((parts.total - dense).detach())))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-9


def test_accuracy_counts_agreeing_chunks() -> None:
    case = random_case(3)
    parts = projected_kl(case.z, TeacherScores(logits=case.y), case.alignment, case.projection)
    assert 0 <= parts.metrics["accuracy"].value <= 1
    assert float(parts.metrics["accuracy"].count) == float(parts.count)
    assert parts.metrics["projected_kl"].value == pytest.approx(float(parts.mean().detach()))


def test_a_sparse_tensor_is_a_projection() -> None:
    case = random_case(9)
    sparse = dense_matrix(case.projection, torch.float32).to_sparse_coo()
    scores = TeacherScores(logits=case.y)
    by_tensor = projected_kl(case.z, scores, case.alignment, sparse)
    torch.testing.assert_close(by_tensor.total, projected_kl(case.z, scores, case.alignment, case.projection).total)
    with pytest.raises(ValueError, match="sparse COO"):
        projected_kl(case.z, scores, case.alignment, dense_matrix(case.projection))


def test_wrong_arguments_are_refused() -> None:
    case = random_case(1)
    scores = TeacherScores(logits=case.y)
    with pytest.raises(ValueError, match="at least 1"):
        projected_kl(case.z, scores, case.alignment, case.projection, vocab_topk=0)
    with pytest.raises(ValueError, match="positive finite"):
        projected_kl(case.z, scores, case.alignment, case.projection, temperature=0.0)
    with pytest.raises(ValueError, match="student's head scores"):
        projected_kl(case.z[..., :5], scores, case.alignment, case.projection)
    with pytest.raises(ValueError, match="teacher's head scores"):
        projected_kl(case.z, TeacherScores(logits=case.y[..., :5]), case.alignment, case.projection)
    with pytest.raises(ValueError, match="belong to another batch"):
        projected_kl(case.z, scores.slice(0, 1), case.alignment, case.projection)
    with pytest.raises(ValueError, match="taken at 2"):
        projected_kl(case.z, scores.topk(3, temperature=2.0), case.alignment, case.projection)
    with pytest.raises(ValueError, match="neither an alignment nor a plan"):
        projected_kl(case.z, scores, None, case.projection)
