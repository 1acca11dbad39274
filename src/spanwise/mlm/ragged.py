"""Rows without padding: where every real token sits in one long column, and attention inside rows only.

Linear layers and norms do not care about rows, so a batch of B rows is computed as one [N, d] matrix of its N real
tokens. Only attention must know the rows. The plan sorts rows by length, so that rows of equal length lie next to one
another and one call on a view (no copy) serves them all; on a GPU one variable-length kernel serves everything.
Cost: O(sum of n²) attention instead of O(B·S²), O(N) linear work instead of O(B·S), and O(N) integers for the plan.

Shapes: B rows, S padded width, N real tokens, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class RaggedPlan:
    """How real tokens are laid end to end.

    Attributes:
        source: int64 [N]; the place of each laid token in the flattened [B·S] batch.
        groups: (rows, length) of every run of equally long rows, in the order laid.
        segment: int64 [N]; the laid row each token belongs to.
    """

    source: Int[Tensor, " N"]
    groups: tuple[tuple[int, int], ...]
    segment: Int[Tensor, " N"]

    @property
    def lengths(self) -> list[int]:
        """The length of every laid row."""
        return [length for rows, length in self.groups for _ in range(rows)]


def plan_rows(real: Bool[Tensor, "B S"], segment_ids: Int[Tensor, "B S"] | None = None) -> RaggedPlan:
    """Lay the real tokens of every row (or of every segment of every row) end to end, sorted by length.

    >>> plan = plan_rows(torch.tensor([[True, True, False], [True, False, False], [True, True, False]]))
    >>> plan.source.tolist(), plan.groups
    ([3, 0, 1, 6, 7], ((1, 1), (2, 2)))
    """
    width = real.shape[1]
    row = torch.arange(real.shape[0], device=real.device)[:, None].expand_as(real)
    label = row
    if segment_ids is not None and segment_ids.numel():
        label = row * (int(segment_ids.max()) + 1) + segment_ids
    source = real.flatten().nonzero().squeeze(1)
    if source.numel() == 0:
        return RaggedPlan(source, (), source)
    _, segment, sizes = torch.unique(label.flatten()[source], return_inverse=True, return_counts=True)
    if bool((sizes == sizes[0]).all()):
        order = torch.argsort(segment, stable=True) if segment_ids is not None else None
        laid = source if order is None else source[order]
        length = int(sizes[0])
        place = torch.arange(len(source), device=real.device) // length
        return RaggedPlan(laid, ((len(sizes), length),), place)
    by_length = torch.argsort(sizes, stable=True)
    rank = torch.empty_like(by_length)
    rank[by_length] = torch.arange(len(sizes), device=real.device)
    place = rank[segment]
    order = torch.argsort(place * width + source % width, stable=True)
    lengths, counts = torch.unique_consecutive(sizes[by_length], return_counts=True)
    groups = tuple(zip(counts.tolist(), lengths.tolist(), strict=True))
    return RaggedPlan(source[order], groups, place[order])


def ragged_attention(qkv: Float[Tensor, "N 3 H D"], plan: RaggedPlan, dropout: float = 0.0) -> Float[Tensor, "N H D"]:
    """Bidirectional attention inside every laid row. Exact; no token sees another row.

    On a GPU the rows become one jagged tensor, which torch sends to a variable-length kernel; on a CPU, where that is
    several times slower than padding, equally long rows share one call on a view.
    """
    if qkv.is_cuda and len(plan.groups) > 1:
        return _jagged_attention(qkv, plan, dropout)
    out = []
    for part, (rows, length) in zip(qkv.split([r * n for r, n in plan.groups]), plan.groups, strict=True):
        query, key, value = part.unflatten(0, (rows, length)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        out.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(out) if out else qkv[:, 0]


def _jagged_attention(qkv: Tensor, plan: RaggedPlan, dropout: float) -> Tensor:
    lengths = torch.tensor([0, *plan.lengths], device=qkv.device)
    offsets = lengths.cumsum(0)
    longest = max(plan.lengths)
    query, key, value = (
        torch.nested.nested_tensor_from_jagged(part.contiguous(), offsets, max_seqlen=longest).transpose(1, 2)
        for part in qkv.unbind(1)
    )
    attended = scaled_dot_product_attention(query, key, value, dropout_p=dropout)
    return attended.transpose(1, 2).values()
