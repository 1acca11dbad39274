"""Which hidden positions are filled next.

Candidates of all rows lie in one flat list, sorted by row; every decision is made within a row, so that no row depends
on its neighbours. Confidence is read from the distribution before temperature and filters. O(M·V) for confidence,
O(M log M) for the rest.

Shapes: B rows, M candidates, V vocabulary.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def confidence_of(logits: Float[Tensor, "M V"], kind: str) -> Float[Tensor, " M"]:
    """How sure the model is at each position; higher is surer.

    ``top_prob``: the largest probability. ``prob_diff``: its lead over the second. ``entropy``: minus the entropy.

    >>> confidence_of(torch.tensor([[0.5, 0.25, 0.25]]).log(), "prob_diff").tolist()
    [0.25]
    """
    log_probabilities = logits.float().log_softmax(-1)
    if kind == "entropy":
        return torch.special.entr(log_probabilities.exp()).sum(-1).neg()
    best = log_probabilities.topk(min(2, logits.shape[-1]), dim=-1).values.exp()
    return best[:, 0] if kind == "top_prob" or best.shape[1] == 1 else best[:, 0] - best[:, 1]


def risk_of(confidence: Float[Tensor, " M"], kind: str) -> Float[Tensor, " M"]:
    """What is accumulated against the threshold: the entropy, or 1 - confidence."""
    return -confidence if kind == "entropy" else 1 - confidence


def rank_in_row(row: Int[Tensor, " M"], value: Float[Tensor, " M"]) -> Int[Tensor, " M"]:
    """The place of each candidate in its row by falling ``value``; ties keep their order.

    >>> rank_in_row(torch.tensor([0, 0, 1]), torch.tensor([0.1, 0.9, 0.5])).tolist()
    [1, 0, 0]
    """
    order = torch.argsort(value, descending=True, stable=True)
    order = order[torch.argsort(row[order], stable=True)]
    sorted_rows = row[order]
    place = torch.arange(len(row), device=row.device)
    first = torch.searchsorted(sorted_rows, sorted_rows)
    rank = torch.empty_like(place)
    rank[order] = place - first
    return rank


def by_quota(row: Int[Tensor, " M"], value: Float[Tensor, " M"], quota: Int[Tensor, " B"]) -> Bool[Tensor, " M"]:
    """The ``quota`` candidates of highest value in each row."""
    return rank_in_row(row, value) < quota[row]


def by_threshold(
    row: Int[Tensor, " M"], confidence: Float[Tensor, " M"], kind: str, threshold: float | int
) -> Bool[Tensor, " M"]:
    """In order of confidence, while the accumulated risk stays below ``threshold``; at least one per row."""
    rank, risk = rank_in_row(row, confidence), risk_of(confidence, kind)
    rows, depth = (int(row.max()) + 1, int(rank.max()) + 1) if len(row) else (0, 0)
    table = risk.new_zeros(rows, depth)
    table[row, rank] = risk
    return (table.cumsum(1)[row, rank] < threshold) | (rank == 0)


def by_factor(row: Int[Tensor, " M"], confidence: Float[Tensor, " M"], factor: float | int) -> Bool[Tensor, " M"]:
    """The most candidates n for which (n + 1)·(1 - confidence of the n-th) < ``factor``; at least one per row."""
    rank = rank_in_row(row, confidence)
    count = rank + 1
    fits = torch.where((count + 1) * (1 - confidence) < factor, count, torch.ones_like(count))
    rows = int(row.max()) + 1 if len(row) else 0
    most = torch.ones(rows, dtype=torch.long, device=row.device).scatter_reduce(0, row, fits, "amax")
    return rank < most[row]
