"""How often a filled row is right: whole rows, and single tokens.

Every metric is a :class:`Ratio`, so batches and ranks add up. Targets of -100 are not looked at. O(B·S).

Shapes: B rows, S width, L generated width, T target width.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from spanwise.batch import IGNORE_INDEX
from spanwise.loss_parts import Ratio


def exact_match(ids: Int[Tensor, "B S"], target_ids: Int[Tensor, "B T"]) -> Ratio:
    """Rows in which every token equals its target, over rows.

    >>> exact_match(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]])).value
    0.5
    """
    same_shape(ids, target_ids)
    right = ((ids == target_ids) | (target_ids == IGNORE_INDEX)).all(1)
    return Ratio(float(right.sum()), float(len(ids)))


def token_accuracy(
    ids: Int[Tensor, "B S"], target_ids: Int[Tensor, "B T"], where: Bool[Tensor, "B S"] | None = None
) -> Ratio:
    """Right tokens over tokens, at ``where`` (the positions that were MASK) or everywhere.

    Tokens are pooled, so a row without any MASK adds nothing instead of a NaN; with no token at all the value is 0.
    """
    same_shape(ids, target_ids)
    counted = target_ids != IGNORE_INDEX
    if where is not None:
        counted = counted & where
    return Ratio(float(((ids == target_ids) & counted).sum()), float(counted.sum()))


def generated_part(
    ids: Int[Tensor, "B L"], target_ids: Int[Tensor, "B T"], output_start_idx: Int[Tensor, " B"] | int
) -> Int[Tensor, "B T"]:
    """``ids[:, output_start_idx:]``, cut or filled with -1 on the right to the targets' width; -1 equals no token."""
    start = torch.as_tensor(output_start_idx).expand(len(ids)).to(ids.device)
    columns = start[:, None] + torch.arange(target_ids.shape[1], device=ids.device)[None]
    inside = columns < ids.shape[1]
    taken = ids.gather(1, columns.clamp(max=max(0, ids.shape[1] - 1)))
    return torch.where(inside, taken, -1)


def seq2seq_exact_match(
    ids: Int[Tensor, "B L"], target_ids: Int[Tensor, "B T"], output_start_idx: Int[Tensor, " B"] | int
) -> Ratio:
    """Exact match of what was generated; a row whose generated part is longer than its target is no match."""
    start = torch.as_tensor(output_start_idx).expand(len(ids)).to(ids.device)
    fits = ids.shape[1] - start <= target_ids.shape[1]
    part = generated_part(ids, target_ids, output_start_idx)
    right = ((part == target_ids) | (target_ids == IGNORE_INDEX)).all(1) & fits
    return Ratio(float(right.sum()), float(len(ids)))


def seq2seq_token_accuracy(
    ids: Int[Tensor, "B L"], target_ids: Int[Tensor, "B T"], output_start_idx: Int[Tensor, " B"] | int
) -> Ratio:
    """Token accuracy of what was generated; missing tokens are wrong."""
    return token_accuracy(generated_part(ids, target_ids, output_start_idx), target_ids)


def same_shape(ids: Tensor, target_ids: Tensor) -> None:
    """Refuse to compare rows of different widths."""
    if ids.shape != target_ids.shape:
        raise ValueError(
            f"predictions of shape {tuple(ids.shape)} were compared with targets of shape {tuple(target_ids.shape)}; "
            "expected equal shapes. The targets probably hold only the suffix. "
            "Fix: use seq2seq_exact_match or seq2seq_token_accuracy with output_start_idx."
        )
