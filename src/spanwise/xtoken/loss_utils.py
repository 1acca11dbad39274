"""Helpers of the cross-tokenizer losses, under the names and with the contracts they have in NeMo RL.

Thin: averages live in ``chunks.py``, projection files in ``projection_file.py``, the exact map in ``exact_map.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from spanwise.xtoken.chunks import alignment_from_flat_batch, chunk_average_log_probs, valid_chunk_mask

__all__ = ["alignment_from_flat_batch", "chunk_average_log_probs", "dp_all_reduce_sum", "valid_chunk_mask"]


def dp_all_reduce_sum(
    local: Float[Tensor, "*shape"] | Int[Tensor, "*shape"], *, group: Any | None = None
) -> Float32[Tensor, "*shape"]:
    """Sum a count over the data-parallel ranks.

    Args:
        local: this rank's count; not modified.
        group: the data-parallel process group. Tensor- and context-parallel replicas hold the same chunks and must
            not be in it: summing over them divides loss and gradient by their number. None is the default group.

    Returns:
        A fresh float32 tensor; a copy of ``local`` when torch.distributed is not initialised.

    >>> dp_all_reduce_sum(torch.tensor(3))
    tensor(3.)
    """
    total = local.detach().to(torch.float32, copy=True)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(total, group=group)
    return total
