"""The integer plan: which positions a loss reads and how much it counts, before any floating-point work.

A loss over chunks or tokens is a sum and a count. The count follows from ids, masks and chunk ids alone, so a trainer
plans every micro-batch of an optimizer step first, adds the counts over micro-batches and ranks (one all-reduce), and
hands each loss ``scale = weight / global count``. Positions that no plan names (prompts, padding, invalid chunks) cost
nothing later. O(B·(S + T + P)) integers.

A chunk is valid when both sides have tokens, the pair is valid, its document's ``sample_mask`` is above 0, and every
token of it has a predictor: the first token of a row, of a packed segment or after left padding has none.

Shapes: B rows, S student length, T teacher length, P pairs per row, D documents (D = B unless packed), N valid chunks,
R rows (predictor positions, counted through the batch as row · length + position).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int, Int64
from torch import Tensor

from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.chunks import alignment_from_flat_batch


@dataclass(frozen=True)
class Side:
    """The predictor rows of one side's tokens in valid chunks, grouped by chunk.

    Attributes:
        rows: predictor positions (the token's own position minus one), chunk by chunk.
        chunk: the chunk of each, non-decreasing.
        starts: where each chunk's rows begin; the last entry is R.
    """

    rows: Int64[Tensor, " R"]
    chunk: Int64[Tensor, " R"]
    starts: Int64[Tensor, " N1"]

    @property
    def sizes(self) -> Int64[Tensor, " N"]:
        """Rows per chunk, at least 1."""
        return self.starts.diff()

    def keep(self, chunks: Int64[Tensor, " n"]) -> Side:
        """The rows of some chunks, given in ascending order."""
        place = torch.full((len(self.starts),), -1, dtype=torch.long, device=chunks.device)
        place[chunks] = torch.arange(len(chunks), device=chunks.device)
        chunk = place[self.chunk]
        kept = (chunk >= 0).nonzero().squeeze(1)
        sizes = self.sizes[chunks]
        return Side(self.rows[kept], chunk[kept], torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))


@dataclass(frozen=True)
class ChunkPlan:
    """The valid chunks of a batch, ordered by document.

    Attributes:
        student: the student's rows.
        teacher: the teacher's rows.
        document: document of each chunk.
        weight: its document's ``sample_mask``.
        correct: both sides cover the same bytes.
        documents: D.
        lengths: (B, S, T), for checking the tensors a loss is given.
        counted: what each chunk counts, where it is not its weight (documents weighted by teacher).
    """

    student: Side
    teacher: Side
    document: Int64[Tensor, " N"]
    weight: Float32[Tensor, " N"]
    correct: Bool[Tensor, " N"]
    documents: int
    lengths: tuple[int, int, int]
    counted: Float32[Tensor, " N"] | None = None

    @property
    def chunks(self) -> int:
        """N."""
        return len(self.document)

    @property
    def count(self) -> Float32[Tensor, ""]:
        """What the loss counts: the summed weight of the valid chunks."""
        return (self.weight if self.counted is None else self.counted).sum()

    def to(self, device: torch.device | str) -> ChunkPlan:
        """The same plan on another device."""
        sides = [
            Side(side.rows.to(device), side.chunk.to(device), side.starts.to(device))
            for side in (self.student, self.teacher)
        ]
        document, weight, correct = (x.to(device) for x in (self.document, self.weight, self.correct))
        counted = None if self.counted is None else self.counted.to(device)
        return ChunkPlan(sides[0], sides[1], document, weight, correct, self.documents, self.lengths, counted)

    def correct_only(self) -> ChunkPlan:
        """The plan without the chunks that are not correct."""
        if bool(self.correct.all()):
            return self
        kept = self.correct.nonzero().squeeze(1)
        student, teacher = self.student.keep(kept), self.teacher.keep(kept)
        return ChunkPlan(
            student,
            teacher,
            self.document[kept],
            self.weight[kept],
            self.correct[kept],
            self.documents,
            self.lengths,
            None if self.counted is None else self.counted[kept],
        )

    def of_document(self, weights: Float[Tensor, " D"]) -> ChunkPlan:
        """The same chunks and the same count, with every document's part of the total multiplied by ``weights``."""
        counted = self.weight if self.counted is None else self.counted
        return replace(self, weight=self.weight * weights.float()[self.document], counted=counted)


@dataclass(frozen=True)
class TokenPlan:
    """The supervised tokens of a batch.

    Attributes:
        rows: predictor positions.
        targets: the token each of them predicts.
        document: document of each.
        weight: its document's ``sample_mask``.
        documents: D.
        shape: (B, S).
        counted: the count, where it is not the summed weight.
    """

    rows: Int64[Tensor, " R"]
    targets: Int64[Tensor, " R"]
    document: Int64[Tensor, " R"]
    weight: Float32[Tensor, " R"]
    documents: int
    shape: tuple[int, int]
    counted: Float32[Tensor, ""] | None = None

    @property
    def count(self) -> Float32[Tensor, ""]:
        """What the loss counts: the summed weight of the supervised tokens."""
        return self.weight.sum() if self.counted is None else self.counted

    def of_document(self, weights: Float[Tensor, " D"]) -> TokenPlan:
        """The same tokens and the same count, with every document's part of the total multiplied by ``weights``."""
        return replace(self, weight=self.weight * weights.float()[self.document], counted=self.count)

    def take(self, order: Int64[Tensor, " n"]) -> TokenPlan:
        """Some of the tokens, in the order named, with the count of all."""
        return replace(
            self,
            rows=self.rows[order],
            targets=self.targets[order],
            document=self.document[order],
            weight=self.weight[order],
            counted=self.count,
        )


def plan_chunks(
    alignment: AlignmentBatch,
    *,
    sample_mask: Float32[Tensor, " D"] | None = None,
    token_mask: Int[Tensor, "B S"] | Bool[Tensor, "B S"] | None = None,
    teacher_token_mask: Int[Tensor, "B T"] | Bool[Tensor, "B T"] | None = None,
    segment_ids: Int[Tensor, "B S"] | None = None,
    teacher_segment_ids: Int[Tensor, "B T"] | None = None,
    pair_document: Int[Tensor, "B P"] | None = None,
    exact_token_match_only: bool = False,
) -> ChunkPlan:
    """Which chunks count and which rows of both sides they read.

    Args:
        alignment: chunk ids, -1 for none.
        sample_mask: per document; above 0 lets it in and multiplies its weight. Default 1.
        token_mask: real tokens of the student; only needed with left padding, whose first token has no predictor.
        teacher_token_mask: likewise.
        segment_ids: packed rows, 0 = padding, 1…n.
        teacher_segment_ids: likewise.
        pair_document: packed rows: the document of every pair.
        exact_token_match_only: count only pairs that are correct.
    """
    batch, pairs = alignment.pair_valid.shape
    device = alignment.pair_valid.device
    by_row = torch.arange(batch, device=device)[:, None].expand(batch, pairs)
    document = by_row if pair_document is None else pair_document
    documents = _documents(batch, sample_mask, packed=pair_document is not None, document=document)
    weight = torch.ones(documents, device=device) if sample_mask is None else sample_mask.float()
    pair_weight = weight[document.clamp(min=0)] if documents else weight.new_zeros(batch, pairs)
    valid = alignment.pair_valid & (document >= 0) & (pair_weight > 0)
    if exact_token_match_only:
        valid = valid & alignment.pair_is_correct
    sides = (
        (alignment.student_chunk_id, without_predictor(alignment.student_chunk_id, segment_ids, token_mask)),
        (
            alignment.teacher_chunk_id,
            without_predictor(alignment.teacher_chunk_id, teacher_segment_ids, teacher_token_mask),
        ),
    )
    valid = valid.reshape(-1)
    for chunk_id, orphan in sides:
        key = _pair_key(chunk_id, pairs)
        size = torch.bincount(key[key >= 0], minlength=batch * pairs)
        broken = torch.bincount(key[(key >= 0) & orphan.reshape(-1)], minlength=batch * pairs)
        valid = valid & (size > 0) & (broken == 0)
    kept = valid.nonzero().squeeze(1)
    kept = kept[document.reshape(-1)[kept].argsort(stable=True)]
    place = torch.full((batch * pairs,), -1, dtype=torch.long, device=device)
    place[kept] = torch.arange(len(kept), device=device)
    student, teacher = (_side(_pair_key(chunk_id, pairs), place, len(kept)) for chunk_id, _ in sides)
    return ChunkPlan(
        student,
        teacher,
        document.reshape(-1)[kept].long(),
        pair_weight.reshape(-1)[kept],
        alignment.pair_is_correct.reshape(-1)[kept],
        documents,
        (batch, alignment.student_chunk_id.shape[1], alignment.teacher_chunk_id.shape[1]),
    )


def plan_tokens(
    input_ids: Int[Tensor, "B S"],
    mask: Int[Tensor, "B S"] | Bool[Tensor, "B S"] | None = None,
    *,
    sample_mask: Float32[Tensor, " D"] | None = None,
    segment_ids: Int[Tensor, "B S"] | None = None,
) -> TokenPlan:
    """Which tokens next-token cross entropy and same-tokenizer losses are trained on.

    Args:
        input_ids: the tokens.
        mask: what is trained on (``loss_mask`` if present, else ``token_mask``); its first column is never read.
        sample_mask: per document; above 0 lets it in and multiplies its weight. Default 1.
        segment_ids: packed rows; a segment's first token has no predictor.
    """
    batch, length = input_ids.shape
    device = input_ids.device
    document = document_of_position(segment_ids) if segment_ids is not None else None
    if document is None:
        document = torch.arange(batch, device=device)[:, None].expand(batch, length)
    documents = _documents(batch, sample_mask, packed=segment_ids is not None, document=document)
    weight = torch.ones(documents, device=device) if sample_mask is None else sample_mask.float()
    trained = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask != 0
    trained = trained & ~without_predictor(input_ids, segment_ids, None) & (document >= 0)
    token_weight = weight[document.clamp(min=0)] if documents else weight.new_zeros(batch, length)
    kept = (trained & (token_weight > 0)).reshape(-1).nonzero().squeeze(1)
    return TokenPlan(
        kept - 1,
        input_ids.reshape(-1)[kept].long(),
        document.reshape(-1)[kept].long(),
        token_weight.reshape(-1)[kept],
        documents,
        (batch, length),
    )


def count_chunks(alignment: AlignmentBatch, **options: Any) -> Float32[Tensor, ""]:
    """The count of every chunk loss (P-KL, gold, ALM, ULD); arguments as in :func:`plan_chunks`."""
    return plan_chunks(alignment, **options).count


def count_tokens(input_ids: Int[Tensor, "B S"], mask: Tensor | None = None, **options: Any) -> Float32[Tensor, ""]:
    """The count of next_token_ce and same_vocab_kl; arguments as in :func:`plan_tokens`."""
    return plan_tokens(input_ids, mask, **options).count


def chunk_plan_of_batch(
    batch: Mapping[str, Any], *, teacher_index: int | None = None, exact_token_match_only: bool = False
) -> ChunkPlan:
    """:func:`plan_chunks` with everything read from a collator's batch."""
    infix = "" if teacher_index is None else f"{teacher_index}_"
    return plan_chunks(
        alignment_from_flat_batch(batch, teacher_index=teacher_index),
        sample_mask=batch.get("sample_mask"),
        token_mask=batch.get("token_mask"),
        teacher_token_mask=batch.get(f"teacher_{infix}token_mask"),
        segment_ids=batch.get("segment_ids"),
        teacher_segment_ids=batch.get(f"teacher_{infix}segment_ids"),
        pair_document=batch.get(f"alignment_{infix}pair_document"),
        exact_token_match_only=exact_token_match_only,
    )


def token_plan_of_batch(batch: Mapping[str, Any]) -> TokenPlan:
    """:func:`plan_tokens` with everything read from a collator's batch: ``loss_mask`` if present, else
    ``token_mask``."""
    return plan_tokens(
        batch["input_ids"],
        batch["loss_mask"] if "loss_mask" in batch else batch.get("token_mask"),
        sample_mask=batch.get("sample_mask"),
        segment_ids=batch.get("segment_ids"),
    )


def document_of_position(segment_ids: Int[Tensor, "B S"]) -> Int64[Tensor, "B S"]:
    """The document of every position of packed rows, counted row by row; -1 on padding.

    >>> document_of_position(torch.tensor([[1, 1, 2, 0], [1, 2, 2, 3]])).tolist()
    [[0, 0, 1, -1], [2, 3, 3, 4]]
    """
    if segment_ids.numel() == 0:
        return segment_ids.long()
    per_row = segment_ids.amax(dim=1).long()
    before = per_row.cumsum(0) - per_row
    return torch.where(segment_ids > 0, before[:, None] + segment_ids - 1, -1)


def _documents(batch: int, sample_mask: Tensor | None, *, packed: bool, document: Tensor) -> int:
    needed = (int(document.max()) + 1 if document.numel() else 0) if packed else batch
    documents = needed if sample_mask is None else len(sample_mask)
    if documents < needed or (documents != needed and not packed):
        raise ValueError(
            f"sample_mask has {documents} entries for {needed} documents in {batch} rows; expected one per document. "
            "A mask of another batch, or one per row of a packed batch, was probably passed. Fix: pass the "
            "collator's own sample_mask, and pair_document / segment_ids with it when rows are packed."
        )
    return documents


def without_predictor(like: Tensor, segment_ids: Tensor | None, token_mask: Tensor | None) -> Tensor:
    """True where no earlier position of the same document predicts this one."""
    orphan = torch.zeros_like(like, dtype=torch.bool)
    orphan[:, :1] = True
    if segment_ids is not None:
        orphan[:, 1:] |= segment_ids[:, 1:] != segment_ids[:, :-1]
    if token_mask is not None:
        orphan[:, 1:] |= token_mask[:, :-1] == 0
    return orphan


def _pair_key(chunk_id: Tensor, pairs: int) -> Tensor:
    """Row · P + chunk, -1 for none; refuses chunk ids beyond the pairs."""
    largest = int(chunk_id.max()) if chunk_id.numel() else -1
    if largest >= pairs:
        raise ValueError(
            f"a chunk id is {largest} and the alignment has {pairs} pairs per row; expected ids below {pairs}. The "
            "chunk ids probably belong to another batch, or pair_valid was cut. Fix: pass the alignment as the "
            "aligner made it."
        )
    row = torch.arange(len(chunk_id), device=chunk_id.device)[:, None]
    return torch.where(chunk_id >= 0, row * pairs + chunk_id, -1).reshape(-1)


def _side(key: Tensor, place: Tensor, chunks: int) -> Side:
    if not len(place):
        key = key[:0]
    chunk = torch.where(key >= 0, place[key.clamp(min=0)], -1) if len(key) else key
    tokens = (chunk >= 0).nonzero().squeeze(1)
    order = chunk[tokens].argsort(stable=True)
    tokens, chunk = tokens[order], chunk[tokens][order]
    sizes = torch.bincount(chunk, minlength=chunks)
    return Side(tokens - 1, chunk, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))
