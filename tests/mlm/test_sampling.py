"""Single draws and orders against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.mlm.order import by_factor, by_quota, by_threshold, confidence_of, rank_in_row
from spanwise.mlm.sampling import TokenSampler, forbid

PROBABILITIES = torch.tensor([0.45, 0.3, 0.15, 0.1])


def shares(sampler, draws=4000):
    uniform = (torch.arange(draws).double() + 0.5) / draws
    tokens = sampler(PROBABILITIES.log().expand(draws, -1), uniform)
    return torch.bincount(tokens, minlength=4) / draws


def test_draws_follow_the_distribution():
    torch.testing.assert_close(shares(TokenSampler()), PROBABILITIES, atol=2e-3, rtol=0)
    sharp = PROBABILITIES.pow(2) / PROBABILITIES.pow(2).sum()
    torch.testing.assert_close(shares(TokenSampler(temperature=0.5)), sharp, atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, 1), ({"top_k": 2}, 2), ({"top_k": 99}, 4), ({"temperature": 0}, 1),
        ({"top_p": 1}, 4), ({"top_p": 1e-9}, 1), ({"top_p": 0.5}, 2), ({"top_p": 0.8}, 3),
        ({"top_p": 0.5, "top_p_rule": "exclusive"}, 1), ({"top_p": 0.8, "top_p_rule": "exclusive"}, 2),
        ({"top_p": 0.1, "top_p_rule": "exclusive"}, 1),
    ],
)  # fmt: skip
def test_filters_keep_what_they_say(options, kept):
    expected = PROBABILITIES * (torch.arange(4) < kept)
    torch.testing.assert_close(shares(TokenSampler(**options)), expected / expected.sum(), atol=2e-3, rtol=0)


@given(uniform=st.sampled_from([0.0, 0.5, 1 - 2**-53]), place=st.integers(0, 5))
def test_forbidden_tokens_are_never_drawn_even_at_the_ends(uniform, place):
    logits = forbid(torch.zeros(1, 6), [place, 99])
    for sampler in (TokenSampler(), TokenSampler(top_p=0.99), TokenSampler(top_k=6)):
        assert int(sampler(logits, torch.tensor([uniform], dtype=torch.float64))) != place


def test_no_positions_give_no_tokens():
    assert TokenSampler()(torch.zeros(0, 4), torch.zeros(0)).shape == (0,)


def test_confidences():
    logits = PROBABILITIES.log()[None]
    assert confidence_of(logits, "top_prob").item() == pytest.approx(0.45)
    assert confidence_of(logits, "prob_diff").item() == pytest.approx(0.15)
    expected = (PROBABILITIES * PROBABILITIES.log()).sum().item()
    assert confidence_of(logits, "entropy").item() == pytest.approx(expected)
    assert confidence_of(forbid(torch.zeros(1, 2), [0]), "entropy").item() == 0


candidates = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), max_size=12).map(
    lambda pairs: sorted(pairs, key=lambda pair: pair[0])
)


@settings(max_examples=60)
@given(pairs=candidates, threshold=st.floats(0.01, 3), factor=st.floats(0.1, 4), quota=st.integers(0, 4))
def test_orders_against_their_definition_row_by_row(pairs, threshold, factor, quota):
    row = torch.tensor([place for place, _ in pairs], dtype=torch.long)
    sure = torch.tensor([value for _, value in pairs], dtype=torch.float64)
    kept = by_quota(row, sure, torch.full((4,), quota)).tolist()
    risk_kept = by_threshold(row, sure, "top_prob", threshold).tolist()
    factor_kept = by_factor(row, sure, factor).tolist()
    rank = rank_in_row(row, sure).tolist()
    for one in set(row.tolist()):
        members = sorted((i for i in range(len(pairs)) if pairs[i][0] == one), key=lambda i: rank[i])
        assert [rank[i] for i in members] == list(range(len(members)))
        values = [float(sure[i]) for i in members]
        assert values == sorted(values, reverse=True)
        assert [kept[i] for i in members] == [place < quota for place in range(len(members))]
        risks = [sum(1 - value for value in values[: place + 1]) for place in range(len(members))]
        close = any(abs(risk - threshold) < 1e-9 for risk in risks)
        assert close or [risk_kept[i] for i in members] == [
            place == 0 or risk < threshold for place, risk in enumerate(risks)
        ]
        most = max([1] + [n for n, value in enumerate(values, 1) if (n + 1) * (1 - value) < factor])
        assert sum(factor_kept[i] for i in members) == most
