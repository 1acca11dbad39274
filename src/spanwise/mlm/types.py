"""The shapes of what goes in and comes out, as typed dictionaries. Nothing here runs.

Shapes: batch rows, seq_len columns.
"""

from __future__ import annotations

from typing import Any, NotRequired, Protocol, TypedDict

from jaxtyping import Bool, Float, Int
from torch import Tensor


class MLMBatch(TypedDict, total=False):
    """What a training collator returns (as a BatchedDataDict with these keys).

    Attributes:
        input_ids: ids with MASK where a token is hidden.
        attention_mask: 1 for tokens that are attended, 0 for padding.
        target_ids: the ids before hiding; -100 on padding that is not trained on.
        noise_t: the share hidden per row.
        noise_weight: the weight of hidden tokens in the likelihood bound, per row.
        fixed_positions_mask: True where a token is never hidden (prompts, infilling).
        positions: positions that restart per segment (packed rows).
        segment_ids: 1…n per segment, 0 on padding (packed rows).
        labels_shifted: always False.
    """

    input_ids: Int[Tensor, "batch seq_len"]
    attention_mask: Int[Tensor, "batch seq_len"]
    target_ids: Int[Tensor, "batch seq_len"]
    noise_t: Float[Tensor, " batch"]
    noise_weight: Float[Tensor, " batch"]
    fixed_positions_mask: Bool[Tensor, "batch seq_len"]
    positions: Int[Tensor, "batch seq_len"]
    segment_ids: Int[Tensor, "batch seq_len"]
    labels_shifted: bool


class PackedFlexMLMBatch(TypedDict):
    """What :class:`PackedMLMCollator` returns at least."""

    input_ids: Int[Tensor, "batch seq_len"]
    target_ids: Int[Tensor, "batch seq_len"]
    positions: Int[Tensor, "batch seq_len"]
    segment_ids: Int[Tensor, "batch seq_len"]


class MLMSeq2SeqPredictionBatch(TypedDict):
    """Prefixes, padded on the left, and where known the suffixes, padded on the right."""

    input_ids: Int[Tensor, "batch prefix_seq_len"]
    attention_mask: Int[Tensor, "batch prefix_seq_len"]
    target_ids: NotRequired[Int[Tensor, "batch suffix_seq_len"]]


class MLMUncondtionalPredictionBatch(TypedDict):
    """All MASK."""

    input_ids: Int[Tensor, "batch seq_len"]
    attention_mask: Int[Tensor, "batch seq_len"]


MLMUnconditionalPredictionBatch = MLMUncondtionalPredictionBatch


class MLMLossDict(TypedDict):
    """What a loss returns when it is called: the mean."""

    loss: Float[Tensor, ""]


class MLMStepResults(TypedDict):
    """What ``MLMPredictor.decode`` takes; other keys are carried along."""

    x: Int[Tensor, "batch seq_len"]


class MLMPredictionDict(TypedDict):
    """What ``MLMPredictor.predict`` returns.

    Attributes:
        loss: None.
        text: one decoded row each.
        ids: the filled rows.
        time_taken: seconds until each row was filled.
        output_start_idx: the first column that was appended, per row.
        steps_taken: forwards that each row took part in.
        tokens_per_forward: tokens filled per forward, per row; 0 where nothing was to fill.
        forwards: calls of the model for the whole batch.
    """

    loss: Float[Tensor, " batch"] | None
    text: list[str]
    ids: Int[Tensor, "batch seq_len"]
    time_taken: list[float]
    output_start_idx: Int[Tensor, " batch"]
    steps_taken: list[int]
    tokens_per_forward: list[float]
    forwards: int


class MLMModel(Protocol):
    """A callable from ids, attention mask and positions to logits of every position."""

    def __call__(
        self,
        x_t: Int[Tensor, "batch seq_len"],
        attention_mask: Int[Tensor, "batch seq_len"] | None = None,
        positions: Int[Tensor, "batch seq_len"] | None = None,
        *arguments: Any,
        **options: Any,
    ) -> Float[Tensor, "batch seq_len vocab_size"]: ...
