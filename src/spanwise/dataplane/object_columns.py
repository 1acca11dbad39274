"""Columns of Python objects: N rows of anything, as an object array of shape (N,) or as tensordict's leaves for them.

What a wire made of a payload is undone here, so that a reader never sees a wrapper. O(N); nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def object_stack(column: np.ndarray) -> Any:
    """An object array of shape (N,) as the leaf tensordict has for objects, one per row."""
    from tensordict import NonTensorData, NonTensorStack

    if len(column) == 0:
        return NonTensorData(data=column, batch_size=[0])
    return NonTensorStack(*[NonTensorData(data=item, batch_size=[]) for item in column])


def object_array(items: Sequence[Any]) -> np.ndarray:
    """An object array of shape (N,), whatever the items are: lists and arrays inside stay items."""
    column = np.empty(len(items), dtype=object)
    for row, item in enumerate(items):
        column[row] = item
    return column


def unwrap_wire_stripped_payload(item: Any) -> Any:
    """The payload of an object that a wire may have stripped of it.

    TransferQueue's encoder writes every TensorDict as its tensors alone, so an object arrives as an empty
    ``TensorDict({}, batch_size=[])``: that signature, and only that, becomes None. A payload that is still there
    (``_non_tensordict["data"]``) wins; everything else passes unchanged.
    """
    kept = getattr(item, "_non_tensordict", None)
    if isinstance(kept, dict) and "data" in kept:
        return kept["data"]
    if type(item).__name__ != "TensorDict":
        return item
    from tensordict import TensorDictBase

    stripped = isinstance(item, TensorDictBase) and item.batch_size == torch.Size([]) and not list(item.keys())
    return None if stripped else item


def column_of(name: str, leaf: Any) -> Any:
    """A leaf of a batch as a tensor or an object array of shape (N,), whatever wrapper a wire put round its rows."""
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, np.ndarray):
        return leaf
    if isinstance(leaf, list):
        return object_array([unwrap_wire_stripped_payload(item) for item in leaf])
    members = getattr(leaf, "tensordicts", None)
    if members is not None:
        items = [unwrap_wire_stripped_payload(member) for member in members]
        if not any(hasattr(item, "batch_size") for item in items):
            return object_array(items)
    kept = getattr(leaf, "_non_tensordict", None)
    if members is None and isinstance(kept, dict) and "data" in kept:
        data = kept["data"]
        rows = leaf.batch_size[0] if leaf.batch_size else 1
        whole = isinstance(data, np.ndarray) and data.dtype == object and data.shape == (rows,)
        return data if whole else object_array([data] * rows)
    raise TypeError(
        f"column '{name}' is a {type(leaf).__name__}; expected a tensor or an object column. A nested TensorDict "
        "was probably put into the batch. Fix: flatten it, e.g. td.flatten_keys('.')."
    )
