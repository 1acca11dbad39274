"""P-KL: student probabilities, carried to the teacher's vocabulary by a projection, against the teacher's.

Everything is linear up to the projected chunk mean, so probabilities are averaged over the chunk first and projected
after, only the student ids that touch the document's teacher set S, by one sparse product: time O(R·Vs + C·k·K) instead
of O(R·Vs·K + R·Vt), no matrix wider than the tile. Backward is closed: dP = dQ·M_Sᵀ / n, dz = p·(dP - ⟨p, dP⟩) / τ.

A teacher log-probability of -inf (in one position of a chunk it makes the geometric mean 0) contributes nothing.

Shapes: B rows, S student length, Vs student vocabulary, Vt teacher vocabulary, D documents, C chunks of a tile, R rows
of a tile, k size of S, E projection entries that touch S, u student ids that touch S.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from spanwise.loss_parts import LossParts, Ratio
from spanwise.teachers.scores import Missing, TeacherScores
from spanwise.teachers.softmax import safe_softmax, tempered
from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.losses.checks import check_scores, check_temperature, chosen_plan, projection_of
from spanwise.xtoken.losses.plan import ChunkPlan
from spanwise.xtoken.losses.rows import Tile, chunk_rows, make_tiles, over_logits, segment_sum
from spanwise.xtoken.losses.shared_set import (
    TopkRows,
    TopkScope,
    check_shared,
    rows_in_set,
    set_of_batch,
    set_of_document,
)
from spanwise.xtoken.projection import Entries, Projection

EPSILON = 1e-10


@dataclass(frozen=True)
class _Restricted:
    """The projection's columns S, with the student rows that touch them.

    forward: CSR [k, u] (projects), backward: CSR [u, k] (brings gradients back).
    """

    ids: Tensor
    students: Tensor
    forward: Tensor
    backward: Tensor


class ProjectedRows:
    """P-KL as a RowLoss; ``factor`` is scale · τ²."""

    repeats = False

    def __init__(
        self,
        plan: ChunkPlan,
        scores: TeacherScores,
        projection: Projection,
        *,
        temperature: float = 1.0,
        reverse: bool = False,
        vocab_topk: int = 8192,
        topk_scope: TopkScope = "document",
        topk_rows: TopkRows = "all",
        missing: Missing = "tail_bucket",
        factor: float = 1.0,
    ) -> None:
        if vocab_topk < 1:
            raise ValueError(
                f"vocab_topk is {vocab_topk}; expected at least 1. It was probably set to 0 to switch the limit off. "
                "Fix: pass the teacher's vocabulary size to use all of it."
            )
        if topk_scope not in ("document", "microbatch"):
            raise ValueError(
                f"topk_scope={topk_scope!r} says where the compared tokens are picked; expected 'document' or "
                "'microbatch'. It is probably misspelt. Fix: pass one of the two."
            )
        self.plan, self.scores, self.missing = plan, scores, missing
        self.temperature, self.reverse, self.factor = temperature, reverse, factor
        self.rows, self.shape, self.width = plan.student.rows, plan.lengths[:2], projection.student_vocab_size
        self.teacher_width = projection.teacher_vocab_size
        self.vocab_topk = min(vocab_topk, self.teacher_width)
        self.entries: Entries = projection.entries()
        scores.check_width(self.teacher_width)
        check_shared(scores, plan.documents, self.teacher_width)
        self.shared = (
            set_of_batch(scores, self.teacher_width, self.vocab_topk, topk_rows) if topk_scope == "microbatch" else None
        )
        breaks = None if self.shared is not None else plan.document
        self.tiles = make_tiles(plan.student.starts, self.width, breaks=breaks)
        self.agreeing = plan.weight.new_zeros(())
        self._document = -1
        self._restricted: _Restricted | None = None

    def evaluate(self, tile: Tile, logits: Float[Tensor, "R V"], *, gradient: bool) -> Float[Tensor, ""]:
        """Weighted sum of the chunk divergences of the tile."""
        units = slice(tile.first_unit, tile.last_unit)
        narrow = self._restriction(int(self.plan.document[tile.first_unit]) if self.shared is None else 0)
        sizes = self.plan.student.sizes[units].to(logits.dtype)[:, None]
        chunk = self.plan.student.chunk[tile.first_row : tile.last_row] - tile.first_unit
        weight = self.plan.weight[units].to(logits.dtype)

        p = safe_softmax(tempered(logits, self.temperature))
        touching = p.index_select(1, narrow.students)
        mean_p = segment_sum(touching, chunk, len(sizes)).div_(sizes)
        q = torch.mm(narrow.forward.to(p.dtype), mean_p.t()).t()
        t = self._teacher(tile, narrow).to(p.dtype)
        self.agreeing = self.agreeing + ((q.argmax(-1) == t.argmax(-1)) * weight).sum()

        mass = q.sum(-1, keepdim=True) + EPSILON
        q = q / mass
        lq = (q + EPSILON).log()
        known = t > -torch.inf
        difference = torch.where(known, t, 0.0) - lq
        if self.reverse:
            divergence = torch.where(known, -(q + EPSILON) * difference, 0.0).sum(-1)
            slope = torch.where(known, 1.0 - difference, 0.0)
        else:
            p_teacher = t.exp()
            divergence = (p_teacher * difference).sum(-1)
            slope = -p_teacher / (q + EPSILON)
        if gradient:
            slope = (slope - (slope * q).sum(-1, keepdim=True)) / mass
            slope *= (weight * (self.factor / self.temperature))[:, None] / sizes
            back = torch.mm(narrow.backward.to(p.dtype), slope.t()).t()
            touching = touching.mul_(back.index_select(0, chunk))
            p.mul_(-touching.sum(-1, keepdim=True)).index_add_(1, narrow.students, touching)
        return (divergence * weight).sum(dtype=torch.float64) * self.factor

    def _teacher(self, tile: Tile, narrow: _Restricted) -> Tensor:
        """Chunk means of the log-probabilities renormalised inside S, [C, k]."""
        rows, chunk, sizes = chunk_rows(self.plan.teacher, tile.units)
        t = rows_in_set(self.scores, rows, narrow.ids, self.teacher_width, self.temperature, self.missing)
        return segment_sum(t, chunk, len(sizes)).div_(sizes.to(t.dtype)[:, None])

    def _restriction(self, document: int) -> _Restricted:
        """S and the projection's columns in it, for a document; the last one is kept."""
        if self._restricted is not None and document == self._document:
            return self._restricted
        if self.shared is not None:
            ids = self.shared
        else:
            of_document = (self.plan.document[self.plan.teacher.chunk] == document).nonzero().squeeze(1)
            ids = set_of_document(
                self.scores,
                self.plan.teacher.rows[of_document],
                document,
                self.teacher_width,
                self.vocab_topk,
                self.temperature,
                self.missing,
            )
        self._document, self._restricted = document, _restrict(self.entries, ids, self.teacher_width)
        return self._restricted


def _restrict(entries: Entries, ids: Tensor, teacher_width: int) -> _Restricted:
    column = torch.full((teacher_width,), -1, dtype=torch.long, device=ids.device)
    column[ids] = torch.arange(len(ids), device=ids.device)
    at = column[entries.teacher]
    kept = (at >= 0).nonzero().squeeze(1)
    at, weight = at[kept], entries.weight[kept]
    students, row = torch.unique_consecutive(entries.student[kept], return_inverse=True)
    shape = (len(students), len(ids))
    by_column = at.argsort(stable=True)
    return _Restricted(
        ids,
        students,
        _csr(at[by_column], row[by_column], weight[by_column], (shape[1], shape[0])),
        _csr(row, at, weight, shape),
    )


def _csr(row: Tensor, column: Tensor, weight: Tensor, shape: tuple[int, int]) -> Tensor:
    """A CSR matrix of entries sorted by row; int32 indices, which the CPU's sparse product takes without converting."""
    counts = torch.bincount(row, minlength=shape[0])
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support is in beta|invariant checks)")
        return torch.sparse_csr_tensor(starts, column.to(torch.int32), weight, shape, check_invariants=False)


def projected_kl(
    student_logits: Float[Tensor, "B S V"],
    scores: TeacherScores,
    alignment: AlignmentBatch | None,
    projection: Projection | Float[Tensor, "Vs Vt"],
    *,
    temperature: float = 1.0,
    reverse: bool = False,
    exact_token_match_only: bool = False,
    vocab_topk: int = 8192,
    topk_scope: TopkScope = "document",
    topk_rows: TopkRows = "all",
    missing: Missing = "tail_bucket",
    sample_mask: Float32[Tensor, " D"] | None = None,
    plan: ChunkPlan | None = None,
    inplace: bool = False,
    scale: float | None = None,
) -> LossParts:
    """Divergence of chunk means over the teacher's most important tokens.

    Args:
        student_logits: a head wider than the projection's student side is cut, a narrower one refused.
        scores: dense, top-k, or a shared set (identical to dense in value).
        alignment: not needed with ``plan``.
        projection: Projection, or a sparse [Vs, Vt] tensor as ``get_sparse_projection_matrix`` returns it.
        temperature: of both sides; the total is multiplied by its square.
        reverse: student relative to teacher.
        exact_token_match_only: count only pairs that are correct.
        vocab_topk: size of S.
        topk_scope: ``"document"`` picks S from the document's own valid chunks, so that nothing depends on which
            documents share a micro-batch; ``"microbatch"`` picks one S from raw logits of the whole micro-batch.
        topk_rows: for ``"microbatch"``: positions that vote, ``"all"`` or ``"all_but_last"``; padding votes too.
        missing: what top-k scores say about unlisted ids.
        sample_mask: per document (rows are documents here; packed batches pass ``plan``).
        plan: from :func:`~spanwise.xtoken.losses.plan.plan_chunks`.
        inplace: write the gradient into ``student_logits``.
        scale: multiplies the total.

    Returns:
        LossParts; count is the summed weight of the valid chunks; metrics: ``projected_kl`` (mean, with τ²) and
        ``accuracy`` (share of chunks whose likeliest teacher token agrees).
    """
    plan = chosen_plan(plan, alignment, sample_mask, exact_token_match_only)
    loss = projected_rows(
        plan, scores, projection, temperature=temperature, reverse=reverse, vocab_topk=vocab_topk,
        topk_scope=topk_scope, topk_rows=topk_rows, missing=missing, scale=scale,
    )  # fmt: skip
    return projected_parts(loss, over_logits(student_logits, loss, inplace=inplace), scale)


def projected_rows(
    plan: ChunkPlan,
    scores: TeacherScores,
    projection: Projection | Float[Tensor, "Vs Vt"],
    *,
    temperature: float = 1.0,
    reverse: bool = False,
    vocab_topk: int = 8192,
    topk_scope: TopkScope = "document",
    topk_rows: TopkRows = "all",
    missing: Missing = "tail_bucket",
    scale: float | None = None,
) -> ProjectedRows:
    """The RowLoss behind :func:`projected_kl`, for the fused form."""
    check_temperature(temperature)
    check_scores(scores, plan.lengths[0], plan.lengths[2])
    return ProjectedRows(
        plan,
        scores.at_temperature(temperature),
        projection_of(projection),
        temperature=temperature,
        reverse=reverse,
        vocab_topk=vocab_topk,
        topk_scope=topk_scope,
        topk_rows=topk_rows,
        missing=missing,
        factor=temperature**2 * (1.0 if scale is None else scale),
    )


def projected_parts(loss: ProjectedRows, total: Float[Tensor, ""], scale: float | None) -> LossParts:
    """What projected_kl returns for an evaluated loss."""
    count = loss.plan.count
    metrics = {
        "projected_kl": Ratio(total.detach() / (scale or 1.0), count),
        "accuracy": Ratio(loss.agreeing, count),
    }
    return LossParts(total, count, metrics, scale)
