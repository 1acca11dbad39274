"""The any-order bound by enumeration: every order in which the tokens of a row can be revealed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import torch
from torch import Tensor


def any_order_nll(log_probabilities: Callable[[Tensor], Tensor], tokens: Sequence[int], mask: int) -> float:
    """Mean over all orders of -Σ log p(token | tokens revealed before).

    ``log_probabilities`` maps ids [1, S] to [1, S, V].
    """
    total, orders = 0.0, 0
    for order in permutations(range(len(tokens))):
        ids = torch.full((1, len(tokens)), mask, dtype=torch.long)
        for place in order:
            total -= float(log_probabilities(ids)[0, place, tokens[place]])
            ids[0, place] = tokens[place]
        orders += 1
    return total / orders


def bernoulli_nelbo(log_probabilities: Callable[[Tensor], Tensor], tokens: Sequence[int], mask: int) -> float:
    """∫ over t of (1/t) E[Σ over hidden -log p], by enumeration: each hidden set of k of n weighs B(k, n-k+1)."""
    from math import factorial

    n, total = len(tokens), 0.0
    for bits in range(1, 2**n):
        hidden = [place for place in range(n) if bits >> place & 1]
        k = len(hidden)
        weight = factorial(k - 1) * factorial(n - k) / factorial(n)
        ids = torch.tensor([[mask if place in hidden else token for place, token in enumerate(tokens)]])
        scores = log_probabilities(ids)[0]
        total -= weight * sum(float(scores[place, tokens[place]]) for place in hidden)
    return total
