"""Prefix KL: the teacher's distribution, brought to the student's vocabulary at every student boundary by bytes.

Where each position's teacher distribution comes from is written in ``prefix_targets.py``. Here it is compared with the
student on the kept ids and one tail bucket on both sides. The student's tail is the log-sum-exp over everything else,
not one minus the rest, so it is exact also when it is tiny. Time O(N·Vs), memory O(tile · Vs) beyond the gradient.

A student logit of -inf says that the student cannot produce the id: its teacher mass joins the tail.

Shapes: B rows, S student length, T teacher length, N supervised positions, G ids kept, D documents.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from spanwise.loss_parts import LossParts, Ratio
from spanwise.teachers.scores import Missing, TeacherScores
from spanwise.teachers.softmax import tempered
from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.losses.buckets import compare, take_listed, write_gradient
from spanwise.xtoken.losses.checks import check_scores, check_temperature
from spanwise.xtoken.losses.prefix_plan import PrefixPlan, plan_prefix
from spanwise.xtoken.losses.prefix_targets import PrefixTargets, prefix_targets
from spanwise.xtoken.losses.rows import Tile, over_logits, row_tiles
from spanwise.xtoken.losses.trie import PrefixTrie


class PrefixRows:
    """Prefix KL as a RowLoss; ``factor`` is scale · τ²."""

    repeats = False

    def __init__(
        self,
        plan: PrefixPlan,
        targets: PrefixTargets,
        width: int,
        *,
        temperature: float = 1.0,
        reverse: bool = False,
        min_mass: float = 0.1,
        factor: float = 1.0,
    ) -> None:
        self.rows, self.shape, self.width, self.factor = plan.rows, plan.lengths[:2], width, factor
        self.plan, self.targets, self.temperature, self.reverse = plan, targets, temperature, reverse
        self.tiles = row_tiles(len(plan.rows), width, plan.rows.device)
        self.used = targets.kept >= min_mass
        self.weight = plan.weight * self.used

    def evaluate(self, tile: Tile, logits: Float[Tensor, "R V"], *, gradient: bool) -> Float[Tensor, ""]:
        """Weighted sum of the divergences of the tile."""
        span = slice(tile.first_row, tile.last_row)
        listed = take_listed(tempered(logits, self.temperature), self.targets.ids[span])
        mass, tail = self.targets.mass[span].to(logits.dtype), self.targets.tail[span].to(logits.dtype)
        divergence, slope, tail_slope = compare(listed, mass, tail, "reverse" if self.reverse else "forward")
        weight = self.weight[span].to(logits.dtype)
        if gradient:
            write_gradient(logits, listed, slope, tail_slope, weight * (self.factor / self.temperature))
        return (divergence * weight).sum(dtype=torch.float64) * self.factor


def prefix_kl(
    student_logits: Float[Tensor, "B S V"],
    scores: TeacherScores,
    alignment: AlignmentBatch | None = None,
    *,
    trie: PrefixTrie,
    student_input_ids: Int[Tensor, "B S"] | None = None,
    teacher_input_ids: Int[Tensor, "B T"] | None = None,
    temperature: float = 1.0,
    reverse: bool = False,
    keep: int = 24,
    teacher_topk: int | None = 64,
    min_mass: float = 0.1,
    missing: Missing = "tail_bucket",
    sample_mask: Float32[Tensor, " D"] | None = None,
    token_mask: Int[Tensor, "B S"] | Bool[Tensor, "B S"] | None = None,
    teacher_token_mask: Int[Tensor, "B T"] | Bool[Tensor, "B T"] | None = None,
    segment_ids: Int[Tensor, "B S"] | None = None,
    teacher_segment_ids: Int[Tensor, "B T"] | None = None,
    plan: PrefixPlan | None = None,
    targets: PrefixTargets | None = None,
    inplace: bool = False,
    scale: float | None = None,
) -> LossParts:
    """Divergence between teacher and student over student tokens at every student boundary.

    Args:
        student_logits: a head wider than the student's tokenizer is cut.
        scores: dense or top-k; truncated scores allow their own temperature only.
        alignment: with byte offsets; not needed with ``plan``.
        trie: of the two tokenizers.
        student_input_ids: not needed with ``plan``.
        teacher_input_ids: likewise.
        temperature: of both sides; the total is multiplied by its square.
        reverse: student relative to teacher.
        keep: student tokens compared one by one; the others are one bucket.
        teacher_topk: how much of dense scores is read, None for all.
        min_mass: positions where less of the teacher's mass extends the bytes already passed contribute 0 (they stay in
            ``count``, which is known before any score, and show in the metric ``skipped``).
        missing: what happens with the mass that top-k scores left out.
        sample_mask: per document.
        token_mask: only needed with left padding.
        teacher_token_mask: likewise.
        segment_ids: packed rows.
        teacher_segment_ids: likewise.
        plan: from :func:`~spanwise.xtoken.losses.prefix_plan.plan_prefix`, instead of alignment, ids and masks.
        targets: from :func:`~spanwise.xtoken.losses.prefix_targets.prefix_targets`, where they were made ahead.
        inplace: write the gradient into ``student_logits``.
        scale: multiplies the total.

    Returns:
        LossParts; count is the summed weight of the supervised positions; metrics: ``prefix_kl`` (mean over positions,
        with τ²), ``skipped`` (share of positions), ``kept_mass`` (mean).
    """
    check_temperature(temperature)
    if plan is None:
        if alignment is None or student_input_ids is None or teacher_input_ids is None:
            raise ValueError(
                "prefix_kl was given neither a plan nor alignment, student_input_ids and teacher_input_ids; expected "
                "one of the two. A part of the batch was probably left out. Fix: pass all three, or "
                "plan=plan_prefix(…)."
            )
        plan = plan_prefix(
            alignment,
            trie,
            student_input_ids,
            teacher_input_ids,
            sample_mask=sample_mask,
            token_mask=token_mask,
            teacher_token_mask=teacher_token_mask,
            segment_ids=segment_ids,
            teacher_segment_ids=teacher_segment_ids,
        )
    loss = prefix_rows(
        plan, scores, trie, temperature=temperature, reverse=reverse, keep=keep, teacher_topk=teacher_topk,
        min_mass=min_mass, missing=missing, targets=targets, scale=scale,
    )  # fmt: skip
    return prefix_parts(loss, over_logits(student_logits, loss, inplace=inplace), scale)


def prefix_rows(
    plan: PrefixPlan,
    scores: TeacherScores,
    trie: PrefixTrie,
    *,
    temperature: float = 1.0,
    reverse: bool = False,
    keep: int = 24,
    teacher_topk: int | None = 64,
    min_mass: float = 0.1,
    missing: Missing = "tail_bucket",
    targets: PrefixTargets | None = None,
    scale: float | None = None,
) -> PrefixRows:
    """The RowLoss behind :func:`prefix_kl`, for the fused form."""
    if targets is None:
        check_scores(scores, plan.lengths[0], plan.lengths[2])
        targets = prefix_targets(
            plan, scores, trie, temperature=temperature, keep=keep, teacher_topk=teacher_topk, missing=missing
        )
    factor = temperature**2 * (1.0 if scale is None else scale)
    return PrefixRows(
        plan,
        targets,
        trie.student_vocab_size,
        temperature=temperature,
        reverse=reverse,
        min_mass=min_mass,
        factor=factor,
    )


def prefix_parts(loss: PrefixRows, total: Float[Tensor, ""], scale: float | None) -> LossParts:
    """What prefix_kl returns for an evaluated loss."""
    count = loss.plan.count
    weight = loss.plan.weight
    metrics = {
        "prefix_kl": Ratio(total.detach() / (scale or 1.0), count),
        "skipped": Ratio((weight * ~loss.used).sum(), count),
        "kept_mass": Ratio((weight * loss.targets.kept.clamp(max=1.0)).sum(), count),
    }
    return LossParts(total, count, metrics, scale)
