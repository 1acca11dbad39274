"""ALM, ULD, same-tokenizer divergences and cross entropy against plain autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.teachers.scores import TeacherScores
from spanwise.xtoken.losses import alm, merge_pairs, next_token_ce, plan_chunks, same_vocab_kl, uld
from spanwise.xtoken.losses.alm import bernoulli
from tests.reference import losses as twin
from tests.xtoken.cases import assert_same, random_case

DIFFERENCES = ["forward", "reverse", "abs"]


def weights_of(case) -> tuple[torch.Tensor, torch.Tensor]:
    valid = twin.valid_chunks(case.alignment, case.sample_mask)
    return valid, valid.double() * case.sample_mask.double()[:, None]


def ids_of(case) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randint(9, case.z.shape[:2], generator=g), torch.randint(11, case.y.shape[:2], generator=g)


def chunk_sums(values: torch.Tensor, chunk_id: torch.Tensor, chunks: int) -> torch.Tensor:
    means, sizes = twin.chunk_means(values[..., None], chunk_id, chunks)
    return means[..., 0] * sizes


def next_logp(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    following = torch.roll(ids, -1, 1)
    return torch.log_softmax(logits, -1).gather(2, following[..., None]).squeeze(2)


def alm_twin(case, ids, teacher_ids, temperature, difference, word_start=None, teacher_start=None):
    valid, weight = weights_of(case)
    chunks = valid.shape[1]
    s_ids, t_ids = twin.shifted(case.alignment.student_chunk_id), twin.shifted(case.alignment.teacher_chunk_id)
    s = chunk_sums(next_logp(case.z, ids), s_ids, chunks)
    t = chunk_sums(next_logp(case.y, teacher_ids), t_ids, chunks)
    if word_start is not None:
        s = s + last_mass(case.z, case.alignment.student_chunk_id, chunks, word_start)
        t = t + last_mass(case.y, case.alignment.teacher_chunk_id, chunks, teacher_start)
    p = (s / temperature).clamp(max=torch.log1p(torch.tensor(-1e-6, dtype=torch.float64))).exp()
    q = (t / temperature).clamp(max=torch.log1p(torch.tensor(-1e-6, dtype=torch.float64))).exp()
    if difference == "abs":
        each = (p - q).abs()
    else:
        a, b = (q, p) if difference == "forward" else (p, q)
        each = a * (a.log() - b.log()) + (1 - a) * (torch.log1p(-a) - torch.log1p(-b))
    total = (torch.where(valid, each, 0.0) * weight).sum() * temperature**2
    return total, weight.sum()


def last_mass(logits, chunk_id, chunks: int, word_start) -> torch.Tensor:
    mass = torch.softmax(logits, -1)[..., word_start].sum(-1).log()
    out = torch.zeros(len(logits), chunks, dtype=torch.float64)
    for b in range(len(logits)):
        for c in range(chunks):
            places = (chunk_id[b] == c).nonzero().squeeze(1)
            if len(places):
                out[b, c] = mass[b, places[-1]]
    return out


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
    expected = alm_twin(case, ids, teacher_ids, temperature, difference, *((start_s, start_t) if debias else ()))
    assert_same(parts, expected, case.z, rtol=1e-7)


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
    assert_same(parts, alm_twin(case, ids, teacher_ids, 1.0, "forward"), case.z, rtol=1e-7)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([(9, 11), (11, 9)]))
def test_uld_equals_autograd(seed: int, temperature: float, widths: tuple[int, int]) -> None:
    case = random_case(seed, students=widths[0], teachers=widths[1])
    valid, weight = weights_of(case)
    p, _ = twin.chunk_means(
        torch.softmax(case.z / temperature, -1), twin.shifted(case.alignment.student_chunk_id), valid.shape[1]
    )
    q, _ = twin.chunk_means(
        torch.softmax(case.y / temperature, -1), twin.shifted(case.alignment.teacher_chunk_id), valid.shape[1]
    )
    widest = max(widths)
    p = torch.nn.functional.pad(p.sort(-1, descending=True).values, (0, widest - widths[0]))
    q = torch.nn.functional.pad(q.sort(-1, descending=True).values, (0, widest - widths[1]))
    total = (torch.where(valid, (p - q).abs().sum(-1), 0.0) * weight).sum() * temperature**2
    parts = uld(
        case.z, TeacherScores(logits=case.y), case.alignment, temperature=temperature, sample_mask=case.sample_mask
    )
    assert_same(parts, (total, weight.sum()), case.z)


def same_vocab_twin(z, y, temperature: float, divergence: str, beta: float) -> torch.Tensor:
    s, t = torch.log_softmax(z / temperature, -1), torch.log_softmax(y / temperature, -1)

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)

    if divergence == "forward":
        return kl(t, s)
    if divergence == "reverse":
        return kl(s, t)
    m = (beta * t.exp() + (1 - beta) * s.exp()).log()
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


@settings(max_examples=30)
@given(
    st.integers(0, 10_000), st.sampled_from(["forward", "reverse", "jsd"]), st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.1, 0.5]), st.booleans(),
)  # fmt: skip
def test_same_vocab_equals_autograd(seed, divergence, temperature, beta, full_topk) -> None:
    case = random_case(seed, s=6, t=6, students=9, teachers=9)
    mask = torch.rand(2, 6, generator=torch.Generator().manual_seed(seed)) < 0.7
    ids = torch.zeros(2, 6, dtype=torch.long)
    each = same_vocab_twin(case.z[:, :-1], case.y[:, :-1], temperature, divergence, beta)
    weight = mask[:, 1:].double() * case.sample_mask.double()[:, None]
    scores = TeacherScores(logits=case.y)
    parts = same_vocab_kl(
        case.z, scores.topk(9, temperature=temperature) if full_topk else scores, input_ids=ids, mask=mask,
        temperature=temperature, divergence=divergence, beta=beta, sample_mask=case.sample_mask,
    )  # fmt: skip
    assert_same(parts, ((each * weight).sum() * temperature**2, weight.sum()), case.z)


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_same_vocab_topk_approaches_the_dense_value(divergence: str) -> None:
    case = random_case(4, s=6, t=6, students=40, teachers=40)
    ids = torch.zeros(2, 6, dtype=torch.long)
    dense = same_vocab_kl(case.z, TeacherScores(logits=case.y), input_ids=ids, divergence=divergence).total
    gaps = []
    for k in (2, 20, 40):
        top = TeacherScores(logits=case.y).topk(k)
        gaps.append(
            abs(float((same_vocab_kl(case.z, top, input_ids=ids, divergence=divergence).total - dense).detach()))
        )
    assert gaps[0] > gaps[1] > gaps[2]


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


def test_cross_entropy_and_chunks_stop_at_a_seam() -> None:
    """Two documents in one row give what they give in two rows."""
    case = random_case(2, batch=2)
    ids, teacher_ids = ids_of(case)
    packed_z = case.z.detach().reshape(1, 14, 9).requires_grad_()
    segments = torch.tensor([[1] * 7 + [2] * 7])
    apart = next_token_ce(case.z, ids, sample_mask=torch.tensor([1.0, 0.5]))
    joined = next_token_ce(packed_z, ids.reshape(1, 14), sample_mask=torch.tensor([1.0, 0.5]), segment_ids=segments)
    torch.testing.assert_close(joined.total, apart.total)
    assert float(joined.count) == float(apart.count)
    a = case.alignment
    offset = torch.tensor([[0], [5]])
    joined_alignment = type(a)(
        a.pair_valid.reshape(1, 10), a.pair_is_correct.reshape(1, 10),
        a.student_exact_partition_mask.reshape(1, 14), a.teacher_exact_partition_mask.reshape(1, 16),
        torch.where(a.student_chunk_id >= 0, a.student_chunk_id + offset, -1).reshape(1, 14),
        torch.where(a.teacher_chunk_id >= 0, a.teacher_chunk_id + offset, -1).reshape(1, 16),
        torch.tensor([10]),
    )  # fmt: skip
    plan = plan_chunks(
        joined_alignment, sample_mask=torch.tensor([1.0, 0.5]), segment_ids=segments,
        teacher_segment_ids=torch.tensor([[1] * 8 + [2] * 8]), pair_document=torch.tensor([[0] * 5 + [1] * 5]),
    )  # fmt: skip
    apart = alm(
        case.z, TeacherScores(logits=case.y), a, student_input_ids=ids, teacher_input_ids=teacher_ids,
        sample_mask=torch.tensor([1.0, 0.5]),
    )  # fmt: skip
    packed_scores = TeacherScores(logits=case.y.reshape(1, 16, 11))
    joined = alm(
        packed_z, packed_scores, None, plan=plan, student_input_ids=ids.reshape(1, 14),
        teacher_input_ids=teacher_ids.reshape(1, 16),
    )  # fmt: skip
    torch.testing.assert_close(joined.total, apart.total)
    assert float(joined.count) == float(apart.count)
