"""AlignmentBatch: which chunk every token of a student and a teacher belongs to.

A chunk is a pair of contiguous token spans, one on each side, that cover the same bytes; indices increase along the
row. One-sided pairs have an empty side; they stay ``pair_valid`` and the losses drop them by size. Memory O(B·(S+T+P)).

Shapes: B rows, S student length, T teacher length, P largest number of pairs (at least 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Int8, Int32, Int64
from torch import Tensor


@dataclass(frozen=True)
class AlignmentBatch:
    """One batch of alignments.

    Attributes:
        pair_valid: the pair exists (padding of P is False).
        pair_is_correct: both sides cover the same bytes, proven; role pairs (BOS, EOS, turn end) count too.
        student_exact_partition_mask: the token sits in a correct one-to-one pair.
        teacher_exact_partition_mask: likewise.
        student_chunk_id: the pair of each token, -1 where it has none (padding always).
        teacher_chunk_id: likewise.
        num_chunks: pairs per row, one-sided ones included.
        quality: 0 exact, 1 canonical, 2 resync, 3 failed. Only with ``byte_offsets=True``, else None.
        student_byte_end: where each token ends in the canonical bytes on which both sides agreed; -1 on padding, where
            they did not agree, and for tokens whose own bytes a canonical form changed. So a token with an end covers
            as many bytes before it as it has, but for a dummy prefix at the very start. Tokens that were inserted end
            where they stand. Only with ``byte_offsets=True``, else None.
        teacher_byte_end: likewise.
    """

    pair_valid: Bool[Tensor, "B P"]
    pair_is_correct: Bool[Tensor, "B P"]
    student_exact_partition_mask: Bool[Tensor, "B S"]
    teacher_exact_partition_mask: Bool[Tensor, "B T"]
    student_chunk_id: Int64[Tensor, "B S"]
    teacher_chunk_id: Int64[Tensor, "B T"]
    num_chunks: Int64[Tensor, " B"]
    quality: Int8[Tensor, " B"] | None = None
    student_byte_end: Int32[Tensor, "B S"] | None = None
    teacher_byte_end: Int32[Tensor, "B T"] | None = None
