"""The exact map: which student token is which teacher token, and what is left over on both sides.

Read off a top-k projection. Strict: the row's largest weight is 1 and its second slot is empty; relaxed: its largest
weight is at least 0.6. Two students that claim one teacher token: strict keeps the lowest id, relaxed the heavier
weight, ties to the lowest id. O(Vs·K + Vt), vectorised.

Shapes: Vs, Vt vocabularies, K entries per row.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

RELAXED_WEIGHT = 0.6


def exact_token_map(
    indices: Int64[Tensor, "Vs K"],
    likelihoods: Float[Tensor, "Vs K"],
    *,
    xtoken_loss: bool,
    teacher_vocab_size: int,
) -> dict[str, Int64[Tensor, " n"]]:
    """The common and uncommon parts of two vocabularies.

    Args:
        indices: teacher ids, -1 = no entry.
        likelihoods: their weights.
        xtoken_loss: False for the strict map, True for the relaxed one.
        teacher_vocab_size: Vt; pairs with teacher ids outside it are dropped.

    Returns:
        ``common_student`` and ``common_teacher`` (paired, by ascending student id), ``uncommon_student`` and
        ``uncommon_teacher`` (each sorted).

    >>> found = exact_token_map(torch.tensor([[2, -1], [0, 1]]), torch.tensor([[1.0, 0.0], [0.7, 0.3]]),
    ...                         xtoken_loss=False, teacher_vocab_size=3)
    >>> {name: ids.tolist() for name, ids in found.items()}
    {'common_student': [0], 'common_teacher': [2], 'uncommon_student': [1], 'uncommon_teacher': [0, 1]}
    """
    rows, width = indices.shape
    device = indices.device
    student = torch.arange(rows, device=device)
    if width == 0:
        weight, target = torch.zeros(rows, device=device), torch.full((rows,), -1, device=device)
        exact = torch.zeros(rows, dtype=torch.bool, device=device)
    else:
        values, order = likelihoods.sort(dim=-1, descending=True, stable=True)
        sorted_ids = indices.gather(1, order)
        weight, target = values[:, 0], sorted_ids[:, 0]
        if xtoken_loss:
            exact = weight >= RELAXED_WEIGHT
        else:
            # A projection of one column has no second slot, so it is empty.
            second_empty = indices[:, 1] == -1 if width > 1 else torch.ones(rows, dtype=torch.bool, device=device)
            exact = (weight == 1.0) & second_empty
    exact = exact & (target >= 0) & (target < teacher_vocab_size)
    claims, wanted, strength = student[exact], target[exact], weight[exact]
    if xtoken_loss:
        best = torch.full((teacher_vocab_size,), -torch.inf, dtype=strength.dtype, device=device)
        best.scatter_reduce_(0, wanted, strength, "amax")
        strongest = strength == best[wanted]
        claims, wanted = claims[strongest], wanted[strongest]
    winner = torch.full((teacher_vocab_size,), rows, dtype=torch.long, device=device)
    winner.scatter_reduce_(0, wanted, claims, "amin")
    won = winner[wanted] == claims
    common_student, common_teacher = claims[won], wanted[won]
    left_student = torch.ones(rows, dtype=torch.bool, device=device)
    left_teacher = torch.ones(teacher_vocab_size, dtype=torch.bool, device=device)
    left_student[common_student] = False
    left_teacher[common_teacher] = False
    return {
        "common_student": common_student,
        "common_teacher": common_teacher,
        "uncommon_student": left_student.nonzero().squeeze(1),
        "uncommon_teacher": left_teacher.nonzero().squeeze(1),
    }
