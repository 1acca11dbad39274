"""Which tokens a batch hides: noise by counter, times by row, and the weight that makes the loss a likelihood bound.

Noise is a hash of (seed, epoch, place in the epoch, place in the row), so what a row hides depends on nothing else: not
on its neighbours, the batch size, the worker or the number of machines. Times may be independent per row, or stratified
by a golden-ratio sequence over the places of an epoch, which spreads them evenly over any run of rows. ``exact`` hides
exactly k of n tokens. O(tokens).

Shapes: B rows, S width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.mlm.noise import NoiseSchedule, hidden_share

GOLDEN_STEP = 0.618034
TIME_STREAM, TOKEN_STREAM = 1, 2
_INCREMENT, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def counter_uniform(*counters: Int[Tensor, "..."] | int) -> Float[Tensor, "..."]:
    """Numbers in [0, 1), float64, that depend on the counters alone (splitmix64 over them in order); they broadcast.

    >>> counter_uniform(0, torch.arange(3)).shape, bool((counter_uniform(0, 5) == counter_uniform(0, torch.tensor(5))))
    (torch.Size([3]), True)
    """
    state: Tensor = torch.zeros((), dtype=torch.long)
    for counter in counters:
        if isinstance(counter, Tensor):
            state = _scramble(state.to(counter.device) ^ counter.long())
        else:  # a seed may be any whole number
            state = _scramble(state ^ ((counter + 2**63) % 2**64 - 2**63))
    return _shift_right(state, 11).double() * 2.0**-53


def _scramble(x: Tensor) -> Tensor:
    x = x + _INCREMENT  # int64 wraps around, as splitmix64 wants
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class RowNoise:
    """The random numbers of a batch: one time per row and one number per token."""

    times: Float[Tensor, " B"]
    tokens: Float[Tensor, "B S"]


def row_noise(
    rows: Sequence[Mapping[str, Any]],
    width: int,
    *,
    seed: int,
    t_sampling: str,
    generator: torch.Generator,
) -> RowNoise:
    """Noise of ``rows``: by counter where every row knows its ``epoch`` and ``position``, else from ``generator``."""
    if not all("epoch" in row and "position" in row for row in rows):
        if t_sampling == "stratified":
            raise ValueError(
                "t_sampling='stratified' was asked of rows without 'epoch' and 'position'; expected both in every row, "
                "since a time follows from the row's place in the epoch's order. A plain DataLoader probably feeds the "
                "collator. Fix: train with spanwise train, add the two fields, or use t_sampling='iid'."
            )
        times = torch.rand(len(rows), generator=generator, dtype=torch.float64)
        return RowNoise(times, torch.rand(len(rows), width, generator=generator, dtype=torch.float64))
    epoch = torch.tensor([int(row["epoch"]) for row in rows], dtype=torch.long)
    position = torch.tensor([int(row["position"]) for row in rows], dtype=torch.long)
    if t_sampling == "stratified":
        times = (counter_uniform(seed, epoch, TIME_STREAM) + GOLDEN_STEP * position.double()) % 1.0
    else:
        times = counter_uniform(seed, epoch, TIME_STREAM, position)
    tokens = counter_uniform(seed, epoch[:, None], TOKEN_STREAM, position[:, None], torch.arange(width)[None])
    return RowNoise(times, tokens)


@dataclass(frozen=True)
class Hidden:
    """What a batch hides.

    Attributes:
        mask: bool [B, S].
        noise_t: float32 [B]; p, or k/n where the count is exact.
        noise_weight: float32 [B]; what a hidden token's loss is multiplied by in the likelihood bound.
    """

    mask: Bool[Tensor, "B S"]
    noise_t: Float[Tensor, " B"]
    noise_weight: Float[Tensor, " B"]


def choose_hidden(
    eligible: Bool[Tensor, "B S"],
    noise: RowNoise,
    place: Int[Tensor, "B S"],
    schedule: NoiseSchedule | None,
    masking: str,
) -> Hidden:
    """Choose among ``eligible`` tokens; token noise is read at ``place``, the token's place in its row without padding.

    ``bernoulli``: each with probability p(t), weight p'(t)/p(t). ``exact``: k uniform on 1..n, weight n/k. A row with
    nothing eligible hides nothing and has weight 0; so has t = 0.
    """
    draws = noise.tokens.gather(1, place)
    if masking == "exact":
        return _exact(eligible, noise.times, draws)
    share, slope = hidden_share(schedule, noise.times)
    mask = (draws < share[:, None]) & eligible
    weight = torch.where(share > 0, slope / share.clamp(min=1e-12), torch.zeros_like(share))
    return Hidden(mask, share.float(), weight.float())


def _exact(eligible: Tensor, times: Tensor, draws: Tensor) -> Hidden:
    n = eligible.sum(1)
    k = torch.minimum((times * n).floor().long() + 1, n)
    order = torch.argsort(draws.masked_fill(~eligible, 2.0), dim=1, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
    mask = (rank < k[:, None]) & eligible
    share = torch.where(n > 0, k / n.clamp(min=1), torch.zeros_like(times, dtype=torch.float32))
    weight = torch.where(n > 0, n / k.clamp(min=1), torch.zeros_like(times, dtype=torch.float32))
    return Hidden(mask, share.float(), weight.float())
