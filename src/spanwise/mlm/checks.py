"""What a batch must be before a loss or a predictor looks at it, said in one place. O(1), shapes alone.

Shapes: B rows, S width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor


def token_ids(batch: Mapping[str, Any], beside: Sequence[str]) -> Int[Tensor, "B S"]:
    """``input_ids`` of a batch; ValueError where they are no whole numbers [B, S], or where ``beside`` lies otherwise.

    Args:
        beside: columns that must begin with [B, S] where the batch has them.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise ValueError(
            f"the batch has {_told(ids)} under input_ids; expected whole numbers in a tensor of [rows, columns]. One "
            "row was probably passed without its batch, or rows were not collated. Fix: use a collator of "
            "spanwise.mlm, or torch.tensor([ids])."
        )
    for name in beside:
        other = batch.get(name)
        if isinstance(other, Tensor) and other.shape[:2] != ids.shape:
            raise ValueError(
                f"the batch has {_told(other)} under {name} and {_told(ids)} under input_ids; expected one entry of "
                "the former for each token. One of the two was probably cut, padded or extended alone. "
                "Fix: collate them together."
            )
    return ids


def _told(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
