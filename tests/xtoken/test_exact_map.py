"""The exact map's rules: strict, relaxed, collisions, sentinels, K = 1."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.xtoken.exact_map import exact_token_map
from tests.xtoken.cases import random_projection


def twin(indices, likelihoods, relaxed: bool, teachers: int) -> dict[str, list[int]]:
    """Row by row."""
    best: dict[int, tuple[float, int]] = {}
    for row in range(len(indices)):
        ids, weights = indices[row].tolist(), likelihoods[row].tolist()
        order = sorted(range(len(ids)), key=lambda i: -weights[i])
        weight, target = weights[order[0]], ids[order[0]]
        second = ids[1] if len(ids) > 1 else -1
        hit = weight >= torch.tensor(0.6).item() if relaxed else (weight == 1.0 and second == -1)
        if not hit or not 0 <= target < teachers:
            continue
        claim = (-weight if relaxed else 0.0, row)
        best[target] = min(best.get(target, claim), claim)
    pairs = sorted((row, target) for target, (_, row) in best.items())
    rows, targets = [r for r, _ in pairs], [t for _, t in pairs]
    return {
        "common_student": rows,
        "common_teacher": targets,
        "uncommon_student": [r for r in range(len(indices)) if r not in rows],
        "uncommon_teacher": [t for t in range(teachers) if t not in targets],
    }


@settings(max_examples=80)
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([1, 2, 4]), st.sampled_from([3, 6, 20]))
def test_equals_the_twin(seed: int, relaxed: bool, k: int, teachers: int) -> None:
    projection = random_projection(12, 6, k, torch.Generator().manual_seed(seed))
    found = exact_token_map(
        projection.indices, projection.likelihoods, xtoken_loss=relaxed, teacher_vocab_size=teachers
    )
    expected = twin(projection.indices, projection.likelihoods, relaxed, teachers)
    assert {name: ids.tolist() for name, ids in found.items()} == expected
    assert all(ids.dtype == torch.long for ids in found.values())


def test_collisions() -> None:
    indices = torch.tensor([[5, -1], [5, -1], [5, 2]])
    weights = torch.tensor([[0.7, 0.0], [0.9, 0.0], [0.9, 0.1]])
    relaxed = exact_token_map(indices, weights, xtoken_loss=True, teacher_vocab_size=6)
    assert relaxed["common_student"].tolist() == [1]
    strict = exact_token_map(indices, torch.tensor([[1.0, 0]] * 3), xtoken_loss=False, teacher_vocab_size=6)
    assert strict["common_student"].tolist() == [0]


def test_just_below_one_is_not_exact() -> None:
    weights = torch.tensor([[0.99999994, 0.0]])
    found = exact_token_map(torch.tensor([[0, -1]]), weights, xtoken_loss=False, teacher_vocab_size=1)
    assert found["common_student"].tolist() == []
    assert exact_token_map(torch.tensor([[0, -1]]), weights, xtoken_loss=True, teacher_vocab_size=1)[
        "common_student"
    ].tolist() == [0]


def test_nothing_at_all() -> None:
    found = exact_token_map(
        torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2), xtoken_loss=False, teacher_vocab_size=2
    )
    assert found["uncommon_teacher"].tolist() == [0, 1]
    assert found["common_student"].tolist() == []
