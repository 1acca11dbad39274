"""Chunks as the losses see them: averages over chunk ids, which chunks are valid, and alignments from flat batches.

Sums run in float32 (float64 for float64 input) whatever the autocast around them, since a mean of bf16 sums moves the
gradient by percents. ``chunk_average_log_probs`` is a segment add: O(B·T·V) time and O(B·C·V) memory, no one-hot mask.

Shapes: B rows, T length, V vocabulary, C chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.xtoken.alignment import AlignmentBatch


def chunk_average_log_probs(
    log_probs: Float[Tensor, "B T V"], chunk_id: Int[Tensor, "B T"], max_chunks: int
) -> tuple[Float[Tensor, "B C V"], Float[Tensor, "B C"]]:
    """Average log-probabilities over the chunks that ``chunk_id`` names.

    Args:
        log_probs: what to average.
        chunk_id: values in [-1, max_chunks); -1 belongs to no chunk.
        max_chunks: C, 0 is allowed.

    Returns:
        The averages (0 for an empty chunk) and the chunk sizes as floats.

    >>> means, sizes = chunk_average_log_probs(torch.tensor([[[2.0], [4.0], [9.0]]]), torch.tensor([[1, 1, -1]]), 2)
    >>> means.tolist(), sizes.tolist()
    ([[[0.0], [3.0]]], [[0.0, 2.0]])
    """
    if chunk_id.numel() and (int(chunk_id.max()) >= max_chunks or int(chunk_id.min()) < -1):
        raise ValueError(
            f"chunk ids run from {int(chunk_id.min())} to {int(chunk_id.max())} and max_chunks is {max_chunks}; "
            "expected ids from -1 (no chunk) to max_chunks - 1. The ids probably belong to another batch. Fix: pass "
            "max_chunks=alignment.pair_valid.shape[1]."
        )
    batch, length, width = log_probs.shape
    compute = torch.promote_types(log_probs.dtype, torch.float32)
    with torch.autocast(log_probs.device.type, enabled=False):
        # One bucket more than asked, for the positions of no chunk.
        place = torch.where(chunk_id < 0, max_chunks, chunk_id)
        row = torch.arange(batch, device=place.device)[:, None]
        flat = (row * (max_chunks + 1) + place).reshape(-1)
        sums = torch.zeros(batch * (max_chunks + 1), width, dtype=compute, device=log_probs.device)
        sums = sums.index_add(0, flat, log_probs.reshape(batch * length, width).to(compute))
        sizes = torch.bincount(flat, minlength=batch * (max_chunks + 1)).to(compute)
        sizes = sizes.view(batch, max_chunks + 1)[:, :max_chunks]
        means = sums.view(batch, max_chunks + 1, width)[:, :max_chunks] / sizes.clamp(min=1.0)[..., None]
    return means, sizes


def valid_chunk_mask(
    s_sizes: Float[Tensor, "B C"] | Int[Tensor, "B C"],
    t_sizes: Float[Tensor, "B C"] | Int[Tensor, "B C"],
    pair_valid: Bool[Tensor, "B C"],
) -> Bool[Tensor, "B C"]:
    """Both sides have tokens and the pair is valid.

    >>> valid_chunk_mask(torch.tensor([[1, 0]]), torch.tensor([[2, 2]]), torch.tensor([[True, True]])).tolist()
    [[True, False]]
    """
    return (s_sizes > 0) & (t_sizes > 0) & pair_valid


def alignment_from_flat_batch(data: Mapping[str, Any], *, teacher_index: int | None = None) -> AlignmentBatch:
    """The alignment that a collator laid out as ``alignment_*`` (or ``alignment_{i}_*``) keys.

    Args:
        data: a batch.
        teacher_index: which teacher, for batches of several; None for the unindexed keys.
    """
    prefix = "alignment_" if teacher_index is None else f"alignment_{teacher_index}_"
    missing = [f.name for f in fields(AlignmentBatch) if f.default is MISSING and prefix + f.name not in data]
    if missing:
        present = sorted(key for key in data if key.startswith("alignment_"))
        raise ValueError(
            f"the batch lacks {', '.join(prefix + name for name in missing)}; expected every field of AlignmentBatch. "
            f"It has {present or 'no alignment_* key'}. The collator was probably given no aligner, or a list of "
            "teachers, whose keys carry an index. Fix: pass aligner=TokenAligner(…) to the collator, or "
            "teacher_index=0 here."
        )
    found = {f.name: data[prefix + f.name] for f in fields(AlignmentBatch) if prefix + f.name in data}
    return AlignmentBatch(**found)
