"""Counter-based noise, times, schedules, and what is hidden."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from spanwise.mlm import CosineNoiseSchedule, DefaultMLMCollator, DummyNoiseSchedule, LogLinearNoiseSchedule
from spanwise.mlm.masking import RowNoise, choose_hidden, counter_uniform, row_noise
from spanwise.mlm.noise import hidden_share
from tests.mlm.helpers import MASK, IdTokenizer


def rows(count, length=12, **fields):
    return [
        {"input_ids": list(range(4, 4 + length)), "epoch": 3, "position": place, **fields} for place in range(count)
    ]


def collator(**options):
    return DefaultMLMCollator(IdTokenizer(), 16, None, loss_on_padding=False, **options)


def splitmix64(seed: int) -> int:
    """The published generator, in plain integers."""
    mask = 2**64 - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(counters=st.lists(st.integers(-(2**65), 2**65), min_size=1, max_size=4))
def test_counter_noise_is_splitmix64_over_the_counters(counters):
    state = 0
    for counter in counters:
        state = splitmix64(state ^ (counter % 2**64))
    assert float(counter_uniform(*counters)) == (state >> 11) * 2.0**-53
    small = [counter if -(2**63) <= counter < 2**63 else 0 for counter in counters]
    assert counter_uniform(*map(torch.tensor, small)) == counter_uniform(*small)


def test_counter_noise_is_even_and_uncorrelated():
    drawn = counter_uniform(0, torch.arange(200)[:, None], torch.arange(200)[None])
    assert abs(drawn.mean() - 0.5) < 0.005
    assert abs(torch.histc(drawn.float(), 10, 0, 1) / drawn.numel() - 0.1).max() < 0.01
    assert abs(torch.corrcoef(torch.stack([drawn[:-1].flatten(), drawn[1:].flatten()]))[0, 1]) < 0.02


@settings(max_examples=20)
@given(order=st.permutations(range(6)), size=st.integers(1, 6), masking=st.sampled_from(["bernoulli", "exact"]))
def test_what_a_row_hides_depends_on_nothing_but_its_place_in_the_epoch(order, size, masking):
    collate = collator(masking=masking, t_sampling="stratified")
    whole = collate(rows(6))
    for start in range(0, 6, size):
        chosen = order[start : start + size]
        part = collate([rows(6)[place] for place in chosen])
        assert torch.equal(part["input_ids"], whole["input_ids"][chosen])
        assert torch.equal(part["noise_weight"], whole["noise_weight"][chosen])


def test_workers_change_nothing():
    data = rows(12)
    batches = [
        [batch["input_ids"] for batch in DataLoader(data, batch_size=4, collate_fn=collator(), num_workers=workers)]
        for workers in (0, 2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))


def test_workers_without_places_hide_different_tokens():
    plain = [{"input_ids": list(range(4, 16))} for _ in range(2)]
    loader = DataLoader(plain, batch_size=1, collate_fn=collator(masking="exact"), num_workers=2)
    first, second = (batch["input_ids"] for batch in loader)
    assert not torch.equal(first, second)


def test_the_seed_and_the_epoch_change_what_is_hidden():
    first = collator()(rows(8))["input_ids"]
    assert torch.equal(first, collator()(rows(8))["input_ids"])
    assert not torch.equal(first, collator(seed=1)(rows(8))["input_ids"])
    assert not torch.equal(first, collator()(rows(8, epoch=4))["input_ids"])


def test_stratified_times_spread_over_any_run_of_rows():
    noise = row_noise(rows(32), 4, seed=0, t_sampling="stratified", generator=torch.Generator())
    expected = [(float(noise.times[0]) + 0.618034 * place) % 1.0 for place in range(32)]
    torch.testing.assert_close(noise.times, torch.tensor(expected, dtype=torch.float64))
    for start in range(0, 32, 8):
        gaps = noise.times[start : start + 8].sort().values.diff()
        assert gaps.max() < 0.3


def test_stratified_times_need_places():
    with pytest.raises(ValueError, match="'epoch' and 'position'"):
        collator(t_sampling="stratified")([{"input_ids": [5, 6]}])


def test_exact_hides_k_of_n_with_weight_n_over_k():
    batch = collator(masking="exact", t_sampling="stratified")(rows(64))
    hidden = (batch["input_ids"] == MASK).sum(1)
    n = batch["attention_mask"].sum(1)
    assert torch.equal((n / hidden).float(), batch["noise_weight"])
    assert torch.equal((hidden / n).float(), batch["noise_t"])
    assert set(hidden.tolist()) == set(range(1, int(n[0]) + 1))


@pytest.mark.parametrize("time", [0.0, 1.0])
@pytest.mark.parametrize("schedule", [None, LogLinearNoiseSchedule(), CosineNoiseSchedule(), DummyNoiseSchedule()])
def test_times_0_and_1_hide_nothing_and_everything(time, schedule):
    eligible = torch.tensor([[True, True, False, True]])
    noise = RowNoise(torch.tensor([time]).double(), torch.rand(1, 4, dtype=torch.float64))
    hidden = choose_hidden(eligible, noise, torch.arange(4)[None], schedule, "bernoulli")
    assert torch.equal(hidden.mask, eligible if time == 1 else torch.zeros_like(eligible))
    assert hidden.noise_weight.isfinite().all()
    assert float(hidden.noise_t) == pytest.approx(time, abs=1e-6)
    if time == 0:
        assert float(hidden.noise_weight) == 0


@pytest.mark.parametrize("masking", ["bernoulli", "exact"])
def test_rows_with_nothing_to_hide_have_finite_weights(masking):
    noise = RowNoise(torch.tensor([0.5]).double(), torch.rand(1, 3, dtype=torch.float64))
    hidden = choose_hidden(torch.zeros(1, 3, dtype=torch.bool), noise, torch.arange(3)[None], None, masking)
    assert not hidden.mask.any()
    assert hidden.noise_weight.isfinite().all()


def test_bernoulli_hides_the_share_it_says():
    batch = DefaultMLMCollator(IdTokenizer(), 200, None, loss_on_padding=False)(rows(64, length=198))
    share = (batch["input_ids"] == MASK).float().mean(1)
    assert (share - batch["noise_t"]).abs().max() < 0.15
    torch.testing.assert_close(batch["noise_weight"], 1 / batch["noise_t"])


@pytest.mark.parametrize("schedule", [LogLinearNoiseSchedule(), CosineNoiseSchedule()])
def test_schedules_agree_with_their_definition(schedule):
    times = torch.linspace(0.05, 0.95, 7, dtype=torch.float64)
    total, rate = schedule(times)
    shifted = schedule.total_noise(times + 1e-6)
    torch.testing.assert_close((shifted - total) / 1e-6, rate, rtol=1e-4, atol=1e-5)
    for time, one, speed in zip(times.tolist(), total.tolist(), rate.tolist(), strict=True):
        assert schedule.t_from_total_noise(one) == pytest.approx(time)
        assert schedule.t_from_noise_rate(speed) == pytest.approx(time)
    share, slope = hidden_share(schedule, times)
    torch.testing.assert_close(share, 1 - torch.exp(-total))
    torch.testing.assert_close(slope, rate * torch.exp(-total))
    assert schedule.sample_t(5, torch.Generator().manual_seed(0)).shape == (5,)


def test_a_schedule_of_ones_own_is_asked_for_total_and_rate():
    class Foreign:
        def __call__(self, t):
            return self.total_noise(t), self.noise_rate(t)

        def total_noise(self, t):
            return -torch.log1p(-t * t)

        def noise_rate(self, t):
            return 2 * t / (1 - t * t)

        t_from_noise_rate = t_from_total_noise = sample_t = __call__

    share, slope = hidden_share(Foreign(), torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(share, torch.tensor([0.25, 1.0]))
    assert slope[0] == pytest.approx(1.0)
    assert slope.isfinite().all()


@pytest.mark.parametrize("name", ["noise_rate", "total_noise", "t_from_noise_rate", "sample_t", "forward", "__call__"])
def test_the_dummy_refuses_everything(name):
    with pytest.raises(NotImplementedError, match="LogLinearNoiseSchedule"):
        getattr(DummyNoiseSchedule(), name)(torch.tensor([0.5]))


def test_unknown_options_are_named():
    with pytest.raises(ValueError, match="masking='some'"):
        collator(masking="some")
    assert math.isfinite(float(collator()(rows(1))["noise_t"]))
