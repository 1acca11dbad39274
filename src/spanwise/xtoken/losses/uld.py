"""ULD: L1 between sorted chunk means of probabilities, the baseline that needs no pairing of vocabularies.

Tokens are compared by rank alone; the shorter vocabulary is filled with zeros. Full sorts on both sides: O(C·V log V)
time, O(tile·(Vs + Vt)) memory.

Shapes: B rows, S student length, Vs, Vt vocabularies, C chunks of a tile, R rows of a tile.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from spanwise.loss_parts import LossParts, Ratio
from spanwise.teachers.scores import Missing, TeacherScores
from spanwise.teachers.softmax import safe_softmax, tempered
from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.losses.checks import check_scores, check_temperature, chosen_plan
from spanwise.xtoken.losses.largest import largest, largest_values
from spanwise.xtoken.losses.plan import ChunkPlan
from spanwise.xtoken.losses.rows import Tile, chunk_rows, make_tiles, over_logits, segment_sum


class UldRows:
    """ULD as a RowLoss; ``factor`` is scale · τ²."""

    repeats = False

    def __init__(
        self,
        plan: ChunkPlan,
        scores: TeacherScores,
        width: int,
        teacher_width: int,
        *,
        temperature: float = 1.0,
        missing: Missing = "tail_bucket",
        factor: float = 1.0,
    ) -> None:
        self.plan, self.scores, self.missing = plan, scores, missing
        self.temperature, self.factor = temperature, factor
        self.rows, self.shape = plan.student.rows, plan.lengths[:2]
        self.width, self.teacher_width = width, teacher_width
        self.tiles = make_tiles(plan.student.starts, max(width, teacher_width))

    def evaluate(self, tile: Tile, logits: Float[Tensor, "R V"], *, gradient: bool) -> Float[Tensor, ""]:
        """Weighted sum of the sorted L1 distances of the tile."""
        units = slice(tile.first_unit, tile.last_unit)
        chunk = self.plan.student.chunk[tile.first_row : tile.last_row] - tile.first_unit
        sizes = self.plan.student.sizes[units].to(logits.dtype)[:, None]
        weight = self.plan.weight[units].to(logits.dtype)
        p = safe_softmax(tempered(logits, self.temperature))
        ranked, order = largest(segment_sum(p, chunk, len(sizes)).div_(sizes), self.width)
        rows, teacher_chunk, teacher_sizes = chunk_rows(self.plan.teacher, tile.units)
        q = self.scores.log_probabilities(rows, self.teacher_width, self.temperature, self.missing).exp()
        q = segment_sum(q, teacher_chunk, len(sizes)) / teacher_sizes.to(q.dtype)[:, None]
        q = largest_values(q, self.teacher_width).to(p.dtype)
        both = min(self.width, self.teacher_width)
        # What one vocabulary has beyond the other's size is compared with zeros.
        distance = q[:, both:].sum(-1) + ranked[:, both:].sum(-1)
        difference = ranked[:, :both] - q[:, :both]
        distance += difference.abs().sum(-1)
        if gradient:
            slope = torch.ones_like(ranked)
            slope[:, :both] = difference.sign()
            slope = torch.empty_like(slope).scatter_(1, order, slope)
            slope *= (weight * (self.factor / self.temperature))[:, None] / sizes
            slope = slope.index_select(0, chunk)
            slope.sub_((p * slope).sum(-1, keepdim=True))
            p.mul_(slope)
        return (distance * weight).sum(dtype=torch.float64) * self.factor


def uld(
    student_logits: Float[Tensor, "B S V"],
    scores: TeacherScores,
    alignment: AlignmentBatch | None,
    *,
    temperature: float = 1.0,
    exact_token_match_only: bool = False,
    missing: Missing = "tail_bucket",
    sample_mask: Float32[Tensor, " D"] | None = None,
    plan: ChunkPlan | None = None,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
    inplace: bool = False,
    scale: float | None = None,
) -> LossParts:
    """Sorted L1 between chunk means of probabilities.

    Args:
        student_logits: a head wider than ``student_vocab_size`` is cut.
        scores: dense or top-k (which needs ``teacher_vocab_size``).
        alignment: not needed with ``plan``.
        temperature: of both sides; the total is multiplied by its square.
        exact_token_match_only: count only pairs that are correct.
        missing: what top-k scores say about unlisted ids.
        sample_mask: per document (rows are documents here; packed batches pass ``plan``).
        plan: from :func:`~spanwise.xtoken.losses.plan.plan_chunks`.
        student_vocab_size: the tokenizer's size; default: the head's.
        teacher_vocab_size: likewise.
        inplace: write the gradient into ``student_logits``.
        scale: multiplies the total.

    Returns:
        LossParts; count is the summed weight of the valid chunks; metrics: ``uld`` (mean, with τ²).
    """
    plan = chosen_plan(plan, alignment, sample_mask, exact_token_match_only)
    check_temperature(temperature)
    check_scores(scores, plan.lengths[0], plan.lengths[2])
    if teacher_vocab_size is None:
        if scores.logits is None:
            raise ValueError(
                f"uld was given {scores.form} teacher scores and no teacher_vocab_size; expected the size, since "
                "truncated scores do not tell it. Fix: pass teacher_vocab_size=len(teacher_tokenizer)."
            )
        teacher_vocab_size = scores.logits.shape[-1]
    width = student_logits.shape[-1] if student_vocab_size is None else student_vocab_size
    loss = UldRows(
        plan,
        scores.at_temperature(temperature),
        width,
        teacher_vocab_size,
        temperature=temperature,
        missing=missing,
        factor=temperature**2 * (1.0 if scale is None else scale),
    )
    total = over_logits(student_logits, loss, inplace=inplace)
    return LossParts(total, plan.count, {"uld": Ratio(total.detach() / (scale or 1.0), plan.count)}, scale)
