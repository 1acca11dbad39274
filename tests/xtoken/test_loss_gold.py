"""Gold and H-KL against their dense twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.teachers.scores import TeacherScores
from spanwise.xtoken.exact_map import exact_token_map
from spanwise.xtoken.losses import gold
from spanwise.xtoken.losses.largest import largest, largest_values
from tests.reference import losses as twin
from tests.xtoken.cases import SHAPES, SHAPES_RTOL, assert_same, random_case


def partition(projection, relaxed: bool) -> dict[str, torch.Tensor]:
    return exact_token_map(
        projection.indices,
        projection.likelihoods,
        xtoken_loss=relaxed,
        teacher_vocab_size=projection.teacher_vocab_size,
    )


@settings(max_examples=60)
@given(
    st.integers(0, 10_000), st.sampled_from([1, 3, 50]), st.sampled_from([0.5, 1.0, 2.0]), st.booleans(), st.booleans(),
    st.booleans(), st.sampled_from([0, 2]), st.sampled_from([1, 3]),
)  # fmt: skip
def test_equals_the_twin(seed, topk, temperature, reverse, relaxed, only_correct, extra, k) -> None:
    case = random_case(seed, extra=extra, k=k)
    expected = twin.gold(
        case.z, case.y, case.alignment, partition(case.projection, relaxed), temperature=temperature, reverse=reverse,
        uncommon_topk=topk, sample_mask=case.sample_mask, only_correct=only_correct,
    )  # fmt: skip
    parts = gold(
        case.z, TeacherScores(logits=case.y), case.alignment, case.projection, relaxed=relaxed, temperature=temperature,
        reverse=reverse, uncommon_topk=topk, sample_mask=case.sample_mask, exact_token_match_only=only_correct,
    )  # fmt: skip
    assert_same(parts, expected, case.z)


@settings(max_examples=60)
@given(st.integers(0, 10_000), SHAPES, st.booleans(), st.booleans())
def test_equals_the_twin_at_any_shape(seed, shape, reverse, relaxed) -> None:
    case = random_case(seed, **shape)
    options = {"temperature": 2.0, "reverse": reverse, "uncommon_topk": 4, "sample_mask": case.sample_mask}
    expected = twin.gold(case.z, case.y, case.alignment, partition(case.projection, relaxed), **options)
    parts = gold(case.z, TeacherScores(logits=case.y), case.alignment, case.projection, relaxed=relaxed, **options)
    assert_same(parts, expected, case.z, rtol=SHAPES_RTOL)


def test_a_ready_map_is_used_as_it_is_and_metrics_add_up() -> None:
    case = random_case(2)
    scores = TeacherScores(logits=case.y)
    by_map = gold(case.z, scores, case.alignment, partition(case.projection, True), temperature=2.0)
    by_projection = gold(case.z, scores, case.alignment, case.projection, relaxed=True, temperature=2.0)
    assert torch.equal(by_map.total, by_projection.total)
    assert case.projection.token_map(relaxed=True) is case.projection.token_map(relaxed=True)
    with pytest.raises(ValueError, match=r"mapping of common_student.*same_vocab_kl"):
        gold(case.z, scores, case.alignment, {"common_student": torch.zeros(1, dtype=torch.long)})
    together = by_map.metrics["gold_kl"].value + by_map.metrics["gold_l1"].value
    assert together == pytest.approx(float(by_map.mean().detach()))


@pytest.mark.parametrize("relaxed", [False, True])
@pytest.mark.parametrize("missing", ["tail_bucket", "renormalise"])
def test_topk_approaches_the_dense_value(missing: str, relaxed: bool) -> None:
    """Averaged over batches: in a single one a coarse cut may be right by chance."""
    gaps = torch.zeros(4, dtype=torch.float64)
    for seed in range(8):
        case = random_case(seed, teachers=40)
        rest = (case.alignment, case.projection)
        dense = gold(case.z, TeacherScores(logits=case.y), *rest, relaxed=relaxed).total
        for place, k in enumerate((1, 10, 20, 40)):
            scores = TeacherScores(logits=case.y).topk(k)
            gaps[place] += (gold(case.z, scores, *rest, relaxed=relaxed, missing=missing).total - dense).abs().detach()
    assert (gaps.diff() < 0).all(), gaps
    assert gaps[-1] < 1e-9


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from([1, 2, 40]), st.sampled_from([0, 1, 7, 40]), st.booleans())
def test_the_largest_entries_are_those_of_topk(seed: int, width: int, k: int, narrow: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(3, width, generator=g, dtype=torch.float32 if narrow else torch.float64)
    values[values < -0.5] = -torch.inf
    values[0, width // 2 :] = values[0, :1].clone()  # ties
    k = min(k, width)
    before = values.clone()
    wanted = values.topk(k, dim=-1).values
    found, at = largest(values, k)
    assert torch.equal(found, wanted)
    assert torch.equal(largest_values(values, k), wanted)
    assert torch.equal(values.gather(1, at), wanted)
    assert all(len(set(row)) == k for row in at.tolist())
    assert torch.equal(values, before)


def test_the_unnormalised_common_kl_may_be_negative() -> None:
    case = random_case(0)
    common = {
        "common_student": torch.tensor([0]), "common_teacher": torch.tensor([0]),
        "uncommon_student": torch.arange(1, 9), "uncommon_teacher": torch.arange(1, 11),
    }  # fmt: skip
    z, y = torch.zeros_like(case.z), torch.zeros_like(case.y)
    z[..., 0] = 5.0
    assert gold(z, TeacherScores(logits=y), case.alignment, common).metrics["gold_kl"].value < 0
