"""ALM, ULD, same-tokenizer divergences and cross entropy against plain autograd."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.teachers.scores import TeacherScores
from spanwise.xtoken.losses import alm, merge_pairs, next_token_ce, same_vocab_kl, uld
from spanwise.xtoken.losses.alm import bernoulli
from tests.reference import losses as twin
from tests.xtoken.cases import SHAPES, SHAPES_RTOL, assert_same, random_case

DIFFERENCES = ["forward", "reverse", "abs"]


def ids_of(case) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    students, teachers = case.projection.student_vocab_size, case.projection.teacher_vocab_size
    return torch.randint(students, case.z.shape[:2], generator=g), torch.randint(
        teachers, case.y.shape[:2], generator=g
    )


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from(DIFFERENCES), st.sampled_from([0.5, 1.0, 4.0]), st.booleans())
def test_alm_equals_autograd(seed: int, difference: str, temperature: float, debias: bool) -> None:
    case = random_case(seed)
    ids, teacher_ids = ids_of(case)
    start_s, start_t = torch.arange(9) % 3 == 0, torch.arange(11) % 2 == 0
    scores = TeacherScores(logits=case.y)
    scores = scores.with_statistics(teacher_ids, word_start=start_t) if debias else scores
    parts = alm(
        case.z, scores, case.alignment, student_input_ids=ids, teacher_input_ids=teacher_ids, temperature=temperature,
        difference=difference, word_start=start_s if debias else None, sample_mask=case.sample_mask,
    )  # fmt: skip
    expected = twin.alm(
        case.z, case.y, case.alignment, ids, teacher_ids, sample_mask=case.sample_mask, temperature=temperature,
        difference=difference, word_start=start_s if debias else None, teacher_start=start_t if debias else None,
    )  # fmt: skip
    assert_same(parts, expected, case.z, rtol=1e-7)


@settings(max_examples=40)
@given(st.integers(0, 10_000), SHAPES, st.sampled_from(DIFFERENCES), st.booleans())
def test_alm_and_uld_equal_the_twins_at_any_shape(seed: int, shape, difference: str, only_correct: bool) -> None:
    case = random_case(seed, **shape | {"extra": 0})
    ids, teacher_ids = ids_of(case)
    scores, options = TeacherScores(logits=case.y), {"temperature": 2.0, "sample_mask": case.sample_mask}
    parts = alm(
        case.z, scores, case.alignment, student_input_ids=ids, teacher_input_ids=teacher_ids, difference=difference,
        exact_token_match_only=only_correct, **options,
    )  # fmt: skip
    options["only_correct"] = only_correct
    expected = twin.alm(case.z, case.y, case.alignment, ids, teacher_ids, difference=difference, **options)
    assert_same(parts, expected, case.z, rtol=SHAPES_RTOL)
    expected = twin.uld(case.z, case.y, case.alignment, **options)
    options["exact_token_match_only"] = options.pop("only_correct")
    assert_same(uld(case.z, scores, case.alignment, **options), expected, case.z, rtol=SHAPES_RTOL)


def test_alm_needs_one_number_per_token() -> None:
    case = random_case(3)
    ids, teacher_ids = ids_of(case)
    dense = alm(
        case.z, TeacherScores(logits=case.y), case.alignment, student_input_ids=ids, teacher_input_ids=teacher_ids
    )
    observed = TeacherScores(observed_logp=TeacherScores(logits=case.y).observed(teacher_ids))
    assert torch.equal(alm(case.z, observed, case.alignment, student_input_ids=ids).total, dense.total)
    gaps = []
    for k in (1, 6, 11):
        top = TeacherScores(logits=case.y).topk(k)
        parts = alm(case.z, top, case.alignment, student_input_ids=ids, teacher_input_ids=teacher_ids)
        gaps.append(abs(float((parts.total - dense.total).detach())))
    assert gaps[0] >= gaps[1] >= gaps[2]
    assert gaps[0] > 0.01
    assert gaps[2] < 1e-9
    with pytest.raises(ValueError, match="without observed_logp"):
        alm(case.z, TeacherScores(logits=case.y), case.alignment, student_input_ids=ids)
    with pytest.raises(ValueError, match="next_word_mass"):
        alm(case.z, observed, case.alignment, student_input_ids=ids, word_start=torch.ones(9, dtype=torch.bool))


def test_bernoulli_is_stable_at_its_ends() -> None:
    ends = torch.tensor([-1e4, -200.0, -1e-12, 0.0], dtype=torch.float64)
    for difference in DIFFERENCES:
        loss, slope = bernoulli(ends, ends.flip(0), difference)
        assert loss.isfinite().all()
        assert slope.isfinite().all()
        same, _ = bernoulli(ends, ends, "forward")
        assert same[1:].abs().max() < 1e-12


def test_outcome_chunks_are_merged_pairs() -> None:
    case = random_case(11, chunks=6)
    outcome = torch.tensor([[0, 0, 1, 1, 2, 2]] * 2)
    merged = merge_pairs(case.alignment, outcome)
    for b in range(2):
        for o in range(3):
            inside = outcome[b] == o
            assert bool(merged.pair_valid[b, o]) == bool(case.alignment.pair_valid[b, inside].all())
    ids, teacher_ids = ids_of(case)
    case.alignment = merged
    case.sample_mask = torch.ones(2)
    parts = alm(case.z, TeacherScores(logits=case.y), merged, student_input_ids=ids, teacher_input_ids=teacher_ids)
    expected = twin.alm(case.z, case.y, merged, ids, teacher_ids, sample_mask=case.sample_mask)
    assert_same(parts, expected, case.z, rtol=1e-7)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([(9, 11), (11, 9)]))
def test_uld_equals_autograd(seed: int, temperature: float, widths: tuple[int, int]) -> None:
    case = random_case(seed, students=widths[0], teachers=widths[1])
    options = {"temperature": temperature, "sample_mask": case.sample_mask}
    parts = uld(case.z, TeacherScores(logits=case.y), case.alignment, **options)
    assert_same(parts, twin.uld(case.z, case.y, case.alignment, **options), case.z)


@pytest.mark.parametrize("missing", ["tail_bucket", "renormalise"])
def test_uld_topk_approaches_the_dense_value(missing: str) -> None:
    """Averaged over batches: in a single one a coarse cut may be right by chance."""
    gaps = torch.zeros(4, dtype=torch.float64)
    for seed in range(8):
        case = random_case(seed, teachers=40)
        dense = uld(case.z, TeacherScores(logits=case.y), case.alignment).total
        for place, k in enumerate((10, 20, 30, 40)):
            scores = TeacherScores(logits=case.y).topk(k)
            parts = uld(case.z, scores, case.alignment, teacher_vocab_size=40, missing=missing)
            gaps[place] += (parts.total - dense).abs().detach()
    assert (gaps.diff() < 0).all(), gaps
    assert gaps[-1] < 1e-9


@settings(max_examples=30)
@given(
    st.integers(0, 10_000), st.sampled_from(["forward", "reverse", "jsd"]), st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.1, 0.5]), st.booleans(),
)  # fmt: skip
def test_same_vocab_equals_autograd(seed, divergence, temperature, beta, full_topk) -> None:
    case = random_case(seed, s=6, t=6, students=9, teachers=9)
    mask = torch.rand(2, 6, generator=torch.Generator().manual_seed(seed)) < 0.7
    ids = torch.zeros(2, 6, dtype=torch.long)
    expected = twin.same_vocab_kl(
        case.z, case.y, mask, case.sample_mask, temperature=temperature, divergence=divergence, beta=beta
    )
    scores = TeacherScores(logits=case.y)
    parts = same_vocab_kl(
        case.z, scores.topk(9, temperature=temperature) if full_topk else scores, input_ids=ids, mask=mask,
        temperature=temperature, divergence=divergence, beta=beta, sample_mask=case.sample_mask,
    )  # fmt: skip
    assert_same(parts, expected, case.z)


@settings(max_examples=30)
@given(
    st.integers(0, 10_000), st.sampled_from(["forward", "reverse", "jsd"]), st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.1, 0.5]), st.sampled_from([1, 3, 9]), st.booleans(),
)  # fmt: skip
def test_same_vocab_compares_what_is_not_listed_as_one_outcome(
    seed, divergence, temperature, beta, k, empty_slots
) -> None:
    case = random_case(seed, s=6, t=6, students=9, teachers=9)
    mask = torch.rand(2, 6, generator=torch.Generator().manual_seed(seed)) < 0.7
    cut = TeacherScores(logits=case.y).topk(k, temperature=temperature)
    if empty_slots:  # a list that ended early, and one whose first slot is empty
        ids, tail = cut.top_ids.clone(), cut.log_tail.clone()
        for b, slot in ((0, k - 1), (1, 0)):
            tail[b] = torch.logaddexp(tail[b], cut.top_logp[b, :, slot])
            ids[b, :, slot] = -1
        cut = replace(cut, top_ids=ids, log_tail=tail)
    options = {"temperature": temperature, "divergence": divergence, "beta": beta}
    ids = torch.zeros(2, 6, dtype=torch.long)
    parts = same_vocab_kl(case.z, cut, input_ids=ids, mask=mask, sample_mask=case.sample_mask, **options)
    expected = twin.bucketed_kl(
        case.z, cut.top_ids, cut.top_logp, cut.log_tail, mask, case.sample_mask, **options
    )  # fmt: skip
    assert_same(parts, expected, case.z)


@settings(max_examples=40)
@given(st.integers(0, 10_000), SHAPES, st.sampled_from(["forward", "reverse", "jsd"]))
def test_same_vocab_and_cross_entropy_equal_the_twins_at_any_shape(seed, shape, divergence) -> None:
    case = random_case(seed, **shape | {"t": shape["s"], "teachers": shape["students"]})
    ids, _ = ids_of(case)
    width, options = shape["students"], {"divergence": divergence, "temperature": 2.0}
    z, y = case.z[..., :width], case.y[..., :width]
    mask = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    parts = same_vocab_kl(
        case.z, TeacherScores(logits=case.y), input_ids=ids, mask=mask, sample_mask=case.sample_mask,
        student_vocab_size=width, **options,
    )  # fmt: skip
    assert_same(parts, twin.same_vocab_kl(z, y, mask, case.sample_mask, **options), case.z, rtol=SHAPES_RTOL)
    parts = next_token_ce(case.z, ids, mask, sample_mask=case.sample_mask, student_vocab_size=width)
    assert_same(parts, twin.cross_entropy(z, ids, mask, case.sample_mask), case.z, rtol=SHAPES_RTOL)


@pytest.mark.parametrize("missing", ["tail_bucket", "renormalise"])
@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_same_vocab_topk_approaches_the_dense_value(divergence: str, missing: str) -> None:
    case = random_case(4, s=6, t=6, students=40, teachers=40)
    ids = torch.zeros(2, 6, dtype=torch.long)
    dense = same_vocab_kl(case.z, TeacherScores(logits=case.y), input_ids=ids, divergence=divergence).total
    gaps = []
    for k in (2, 20, 40):
        top = TeacherScores(logits=case.y).topk(k)
        parts = same_vocab_kl(case.z, top, input_ids=ids, divergence=divergence, missing=missing)
        gaps.append(abs(float((parts.total - dense).detach())))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-9


def test_same_vocab_survives_minus_infinity() -> None:
    case = random_case(4, s=6, t=6, students=9, teachers=9)
    ids = torch.zeros(2, 6, dtype=torch.long)
    y, z = case.y.clone(), case.z.detach().clone()
    y[..., 3] = -torch.inf
    z[..., 5] = -torch.inf
    z.requires_grad_()
    for divergence in ("forward", "reverse", "jsd"):
        parts = same_vocab_kl(z, TeacherScores(logits=y), input_ids=ids, divergence=divergence)
        (gradient,) = torch.autograd.grad(parts.total, z)
        assert parts.total.isfinite()
        assert gradient.isfinite().all()
    with pytest.raises(ValueError, match="between 0 and 1"):
        same_vocab_kl(z, TeacherScores(logits=y), input_ids=ids, divergence="jsd", beta=1.0)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([0, 3]))
def test_cross_entropy_equals_autograd(seed: int, extra: int) -> None:
    case = random_case(seed, extra=extra)
    ids, _ = ids_of(case)
    mask = (torch.rand(2, 7, generator=torch.Generator().manual_seed(seed)) < 0.7).long()
    parts = next_token_ce(case.z, ids, mask, sample_mask=case.sample_mask, student_vocab_size=9)
    expected = twin.cross_entropy(case.z[..., :9], ids, mask, case.sample_mask)
    assert_same(parts, expected, case.z)
    with pytest.raises(ValueError, match="holds token"):
        next_token_ce(case.z, ids + 9, mask, student_vocab_size=9)


def test_cross_entropy_stops_at_a_seam() -> None:
    """Two documents in one row give what they give in two rows."""
    case = random_case(2, batch=2)
    ids, _ = ids_of(case)
    sample_mask = torch.tensor([1.0, 0.5])
    packed_z = case.z.detach().reshape(1, 14, 9).requires_grad_()
    segments = torch.tensor([[1] * 7 + [2] * 7])
    apart = next_token_ce(case.z, ids, sample_mask=sample_mask)
    joined = next_token_ce(packed_z, ids.reshape(1, 14), sample_mask=sample_mask, segment_ids=segments)
    torch.testing.assert_close(joined.total, apart.total)
    assert float(joined.count) == float(apart.count)
    (wanted,), (got,) = torch.autograd.grad(apart.total, case.z), torch.autograd.grad(joined.total, packed_z)
    torch.testing.assert_close(got.reshape_as(wanted), wanted)
