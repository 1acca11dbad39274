"""How much is hidden at time t: noise schedules.

A schedule gives the total noise up to t and its rate (the derivative); a token is hidden at t with probability
p = 1 - exp(-total). O(rows).

Shapes: "*batch" any shape of times.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

Times = Float[Tensor, "*batch"]


@runtime_checkable
class NoiseSchedule(Protocol):
    """What collators and samplers ask of a schedule; times run from 0 (nothing hidden) to 1 (everything)."""

    def noise_rate(self, t: Times) -> Times:
        """The derivative of the total noise at t."""
        ...

    def total_noise(self, t: Times) -> Times:
        """The total noise up to t."""
        ...

    def t_from_noise_rate(self, noise_rate: float) -> float:
        """The time at which the rate is ``noise_rate``."""
        ...

    def t_from_total_noise(self, total_noise: float) -> float:
        """The time at which the total is ``total_noise``."""
        ...

    def sample_t(self, batch_size: int) -> Float[Tensor, " batch_size"]:
        """Times drawn for a batch."""
        ...

    def __call__(self, t: Times) -> tuple[Times, Times]:
        """Total noise and noise rate at t."""
        ...


class _Schedule:
    """What the shipped schedules share: a hidden share p(t) and its derivative, from which the rest follows."""

    def hidden_share(self, t: Tensor) -> tuple[Tensor, Tensor]:
        raise TypeError("a schedule is defined by its hidden_share; use LogLinearNoiseSchedule or CosineNoiseSchedule")

    def total_noise(self, t: Times) -> Times:
        """-log(1 - p); infinite at t = 1."""
        return -torch.log1p(-self.hidden_share(t)[0])

    def noise_rate(self, t: Times) -> Times:
        """p' / (1 - p); infinite at t = 1."""
        share, slope = self.hidden_share(t)
        return slope / (1 - share)

    def sample_t(self, batch_size: int, generator: torch.Generator | None = None) -> Float[Tensor, " batch_size"]:
        """Uniform times."""
        return torch.rand(batch_size, generator=generator)

    def forward(self, t: Times) -> tuple[Times, Times]:
        """Total noise and noise rate at t."""
        return self.total_noise(t), self.noise_rate(t)

    def __call__(self, t: Times) -> tuple[Times, Times]:
        """Total noise and noise rate at t."""
        return self.forward(t)


class LogLinearNoiseSchedule(_Schedule):
    """Total noise -log(1 - t): a token is hidden with probability t.

    >>> total, rate = LogLinearNoiseSchedule()(torch.tensor([0.5]))
    >>> round(float(total), 4), float(rate)
    (0.6931, 2.0)
    """

    def hidden_share(self, t: Times) -> tuple[Times, Times]:
        """p = t and its derivative 1."""
        return t, torch.ones_like(t)

    def t_from_noise_rate(self, noise_rate: float) -> float:
        """1 - 1 / rate, for rates of at least 1."""
        return 1 - 1 / noise_rate

    def t_from_total_noise(self, total_noise: float) -> float:
        """1 - exp(-total)."""
        return -math.expm1(-total_noise)


class CosineNoiseSchedule(_Schedule):
    """Hidden with probability 1 - cos(t·π/2): slow at first, more rows with little hidden."""

    def hidden_share(self, t: Times) -> tuple[Times, Times]:
        """p and its derivative."""
        angle = t * (math.pi / 2)
        return 1 - angle.cos().clamp(min=0), angle.sin() * (math.pi / 2)

    def t_from_noise_rate(self, noise_rate: float) -> float:
        """The rate is π/2 · tan(t·π/2)."""
        return math.atan(noise_rate * 2 / math.pi) * 2 / math.pi

    def t_from_total_noise(self, total_noise: float) -> float:
        """cos(t·π/2) = exp(-total)."""
        return math.acos(math.exp(-total_noise)) * 2 / math.pi


class DummyNoiseSchedule:
    """Stands where a schedule must be named and none is used; whoever asks it anything is told so."""

    def _refuse(self, *_: object, **__: object) -> None:
        raise NotImplementedError(
            "a DummyNoiseSchedule was asked for noise; expected a real schedule here. The dummy only fills the "
            "argument of collators, which then hide each token with probability t. Fix: pass LogLinearNoiseSchedule()."
        )

    noise_rate = total_noise = t_from_noise_rate = t_from_total_noise = sample_t = forward = __call__ = _refuse


def hidden_share(schedule: NoiseSchedule | None, t: Times) -> tuple[Times, Times]:
    """The probability that a token is hidden at t, and rate·exp(-total), its derivative; without a schedule t and 1."""
    if schedule is None or isinstance(schedule, DummyNoiseSchedule):
        return t, torch.ones_like(t)
    if isinstance(schedule, _Schedule):
        return schedule.hidden_share(t)
    total, rate = schedule(t)
    left = torch.exp(-total)
    return 1 - left, torch.where(left > 0, rate * left, torch.zeros_like(left))
