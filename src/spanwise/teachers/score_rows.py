"""Single rows of a teacher's scores, picked out of a batch: whole, or put together again from the tokens it lists.

Rows are positions counted through the batch (row · T + position). O(N·V) for N rows, whatever the batch.

Shapes: N rows picked, T teacher length, V vocabulary, K top-k.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from spanwise.teachers.softmax import safe_log_softmax

Missing = Literal["tail_bucket", "renormalise"]

# Rows of logits are read in pieces of about this many elements, so that a full-vocabulary float32 copy never exists.
PIECE_ELEMENTS = 1 << 22
ACCELERATOR_PIECE_ELEMENTS = 1 << 26


def pick(values: Float[Tensor, "B T X"], rows: Int[Tensor, " N"], width: int | None = None) -> Float[Tensor, "N Y"]:
    """Some positions as a fresh float32 (float64 stays) matrix, cut to ``width``; O(N·width) whatever the strides."""
    length = values.shape[1]
    # A teacher that was run without no_grad gives logits with a graph, which nothing here follows.
    kept = values.detach() if width is None else values.detach()[..., :width]
    if values.is_contiguous():  # a view of it as rows copies them whole, faster than element by element
        picked = kept.flatten(0, 1).index_select(0, rows)
    else:
        picked = kept[rows // length, rows % length]
    return picked.to(torch.promote_types(values.dtype, torch.float32))


def _pick_integers(values: Int[Tensor, "B T X"], rows: Int[Tensor, " N"]) -> Int[Tensor, "N X"]:
    length = values.shape[1]
    return values[rows // length, rows % length].long()


def pick_listed(
    ids: Tensor, logp: Tensor, tail: Tensor, rows: Tensor, width: int
) -> tuple[Int64[Tensor, "N K"], Float[Tensor, "N K"], Float[Tensor, " N"]]:
    """The top-k columns of some positions."""
    picked = _pick_integers(ids, rows)
    if bool((picked >= width).any()):
        raise ValueError(_beyond(int(picked.max()), width))
    return picked, pick(logp, rows), pick(tail[..., None], rows).squeeze(1)


def piece_rows(width: int, device: torch.device) -> int:
    """How many rows of logits are read at a time; many more where every launch costs."""
    elements = PIECE_ELEMENTS if device.type == "cpu" else ACCELERATOR_PIECE_ELEMENTS
    return max(1, elements // max(width, 1))


def pieces(count: int, width: int, device: torch.device) -> list[Tensor]:
    """All positions of a batch, in the pieces that are read at a time."""
    step = piece_rows(width, device)
    return list(torch.arange(count, device=device).split(step)) if count else []


def spread(
    ids: Int[Tensor, "N K"], logp: Float[Tensor, "N K"], tail: Float[Tensor, " N"], width: int, missing: Missing
) -> Float[Tensor, "N width"]:
    """Listed tokens as a whole row: ``"tail_bucket"`` shares the tail evenly among the others, ``"renormalise"`` gives
    them nothing."""
    listed = ids >= 0
    logp = logp.masked_fill(~listed, -torch.inf)
    if missing == "renormalise":
        logp = safe_log_softmax(logp)
        filler = torch.full_like(tail, -torch.inf)
    elif missing == "tail_bucket":
        unlisted = (width - listed.sum(-1)).to(tail.dtype)
        filler = torch.where(unlisted > 0, tail - unlisted.clamp(min=1).log(), torch.full_like(tail, -torch.inf))
    else:
        raise ValueError(
            f"missing={missing!r} says what to do with the mass that top-k scores left out; expected 'tail_bucket' or "
            "'renormalise'. It is probably misspelt. Fix: pass one of the two."
        )
    full = filler[:, None].expand(-1, width + 1).clone()
    return full.scatter_(1, torch.where(listed, ids, width), logp)[:, :width]


def _beyond(largest: int, width: int) -> str:
    return (
        f"the teacher's top-k names token {largest:,} and its side of the vocabulary ends at {width - 1:,}; expected "
        "ids below the tokenizer's size. The scores were probably taken from a padded head or by another teacher. "
        "Fix: cut the head to the tokenizer before taking the top-k, or rebuild the projection for this teacher."
    )
