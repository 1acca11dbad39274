"""Adaptive top-k, one position and one entry at a time."""

from __future__ import annotations

import math


def adaptive_topk(logp: list[float], log_tail: float, floor: int, cap: int, mass: float) -> tuple[list[float], float]:
    """The entries kept of one position's falling ``logp``, and the log of all other mass."""
    kept: list[float] = []
    for value in logp:
        enough = sum(math.exp(v) for v in kept) >= mass and len(kept) >= floor
        if len(kept) == cap or enough:
            break
        kept.append(value)
    rest = math.exp(log_tail) + sum(math.exp(v) for v in logp[len(kept) :])
    return kept, math.log(rest) if rest > 0 else -math.inf
