"""KL and Jensen-Shannon for a teacher with the student's own tokenizer: position by position, no projection.

``divergence``: ``"forward"`` KL(teacher ‖ student), ``"reverse"`` KL(student ‖ teacher), ``"jsd"`` β·KL(t ‖ m) + (1 -
β)·KL(s ‖ m) with m = β·t + (1 - β)·s. The mass that top-k scores left out is one outcome more on both sides, or is left
out (see ``missing``). Time O(R·V), memory O(tile·V) beyond the gradient.

A student logit of -inf is an id the student cannot produce: it contributes nothing.

Shapes: B rows, S length, V vocabulary, R rows of a tile, D documents.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from spanwise.loss_parts import LossParts, Ratio
from spanwise.teachers.scores import Missing, TeacherScores
from spanwise.teachers.softmax import safe_log_softmax, tempered
from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.losses.buckets import Divergence, compare, take_listed, write_gradient
from spanwise.xtoken.losses.checks import check_scores, check_temperature
from spanwise.xtoken.losses.plan import TokenPlan, plan_tokens
from spanwise.xtoken.losses.rows import Tile, over_logits, row_tiles


class SameVocabRows:
    """Per-position divergence as a RowLoss; ``factor`` is scale · τ²."""

    repeats = False

    def __init__(
        self,
        plan: TokenPlan,
        scores: TeacherScores,
        width: int,
        *,
        temperature: float = 1.0,
        divergence: Divergence = "forward",
        beta: float = 0.5,
        missing: Missing = "tail_bucket",
        factor: float = 1.0,
    ) -> None:
        self.plan, self.scores, self.width, self.rows, self.shape = plan, scores, width, plan.rows, plan.shape
        self.temperature, self.divergence, self.beta = temperature, divergence, beta
        self.missing, self.factor = missing, factor
        scores.check_width(width)
        self.tiles = row_tiles(len(plan.rows), width, plan.rows.device)

    def evaluate(self, tile: Tile, logits: Float[Tensor, "R V"], *, gradient: bool) -> Float[Tensor, ""]:
        """Weighted sum of the divergences of the tile."""
        if self.scores.form == "topk" and self.missing == "tail_bucket":
            return self._in_buckets(tile, logits, gradient=gradient)
        rows = self.rows[tile.first_row : tile.last_row]
        weight = self.plan.weight[tile.first_row : tile.last_row].to(logits.dtype)
        s = safe_log_softmax(tempered(logits, self.temperature))
        t = self.scores.log_probabilities(rows, self.width, self.temperature, self.missing).to(s.dtype)
        p, q = s.exp(), t.exp()
        if self.divergence == "forward":
            known = (q > 0) & (s > -torch.inf)
            q = torch.where(known, q, 0.0)
            loss = (q * torch.where(known, t - s, 0.0)).sum(-1)
            slope = p.mul_(q.sum(-1, keepdim=True)).sub_(q)
        else:
            known = (p > 0) & (t > -torch.inf)
            if self.divergence == "reverse":
                each = torch.where(known, s - t, 0.0)
                loss = (p * each).sum(-1)
            else:
                mixture = (self.beta * q + (1 - self.beta) * p).clamp(min=torch.finfo(p.dtype).tiny).log()
                each = torch.where(p > 0, s - mixture, 0.0).mul_(1 - self.beta)
                towards = torch.where(q > 0, t - mixture, 0.0)
                loss = (p * each).sum(-1) + self.beta * (q * towards).sum(-1)
            slope = each.sub_((p * each).sum(-1, keepdim=True)).mul_(p)
            if self.divergence == "reverse":
                # Mass on ids the teacher cannot produce is left out of the sum, but still moves with the softmax.
                left_out = torch.where(known, p, 0.0)
                slope += left_out - p * left_out.sum(-1, keepdim=True)
        if gradient:
            logits.copy_(slope.mul_((weight * (self.factor / self.temperature))[:, None]))
        return (loss * weight).sum(dtype=torch.float64) * self.factor

    def _in_buckets(self, tile: Tile, logits: Float[Tensor, "R V"], *, gradient: bool) -> Float[Tensor, ""]:
        """The same over what truncated scores know: the listed tokens, and all others together."""
        ids, mass, rest = self.scores.listed_at(self.rows[tile.first_row : tile.last_row], self.width)
        listed = take_listed(tempered(logits, self.temperature), ids)
        loss, slope, rest_slope = compare(
            listed, mass.to(logits.dtype), rest.to(logits.dtype), self.divergence, self.beta
        )
        weight = self.plan.weight[tile.first_row : tile.last_row].to(logits.dtype)
        if gradient:
            write_gradient(logits, listed, slope, rest_slope, weight * (self.factor / self.temperature))
        return (loss * weight).sum(dtype=torch.float64) * self.factor


def same_vocab_kl(
    student_logits: Float[Tensor, "B S V"],
    scores: TeacherScores,
    alignment: AlignmentBatch | None = None,
    *,
    input_ids: Int[Tensor, "B S"] | None = None,
    mask: Int[Tensor, "B S"] | Bool[Tensor, "B S"] | None = None,
    temperature: float = 1.0,
    divergence: Divergence = "forward",
    beta: float = 0.5,
    missing: Missing = "tail_bucket",
    sample_mask: Float32[Tensor, " D"] | None = None,
    segment_ids: Int[Tensor, "B S"] | None = None,
    plan: TokenPlan | None = None,
    student_vocab_size: int | None = None,
    inplace: bool = False,
    scale: float | None = None,
) -> LossParts:
    """Per-position KL or Jensen-Shannon divergence between models of one tokenizer.

    Args:
        student_logits: a head wider than ``student_vocab_size`` is cut.
        scores: dense or top-k, of the same positions.
        alignment: not used; there is nothing to align.
        input_ids: the tokens; not needed with ``plan``.
        mask: what is trained on, 1 or True; its first column is never read.
        temperature: of both sides; the total is multiplied by its square.
        divergence: ``"forward"``, ``"reverse"`` or ``"jsd"``.
        beta: the teacher's share of the mixture in ``"jsd"``, in (0, 1).
        missing: what becomes of the mass that top-k scores left out: ``"tail_bucket"`` compares it as one outcome with
            the student's mass on all unlisted ids; ``"renormalise"`` leaves it out.
        sample_mask: per document.
        segment_ids: packed rows.
        plan: from :func:`~spanwise.xtoken.losses.plan.plan_tokens`, instead of the four above.
        student_vocab_size: the tokenizer's size; default: the head's.
        inplace: write the gradient into ``student_logits``.
        scale: multiplies the total.

    Returns:
        LossParts; count is the summed weight of the supervised tokens; metrics: ``same_vocab_kl`` (mean, with τ²).
    """
    check_temperature(temperature)
    if divergence not in ("forward", "reverse", "jsd") or not 0 < beta < 1:
        raise ValueError(
            f"same_vocab_kl was asked for divergence={divergence!r} with beta={beta}; expected 'forward', 'reverse' "
            "or 'jsd', and beta between 0 and 1. The ends of beta are the two KLs. Fix: use 'forward' or 'reverse' "
            "for those."
        )
    if plan is None:
        if input_ids is None:
            raise ValueError(
                "same_vocab_kl was given neither input_ids nor a plan; expected one. The batch was probably not "
                "unpacked. Fix: pass input_ids=batch['input_ids'] and mask=batch['token_mask'], or "
                "plan=plan_tokens(…)."
            )
        plan = plan_tokens(input_ids, mask, sample_mask=sample_mask, segment_ids=segment_ids)
    check_scores(scores, *plan.shape)
    width = student_logits.shape[-1] if student_vocab_size is None else student_vocab_size
    loss = SameVocabRows(
        plan,
        scores.at_temperature(temperature),
        width,
        temperature=temperature,
        divergence=divergence,
        beta=beta,
        missing=missing,
        factor=temperature**2 * (1.0 if scale is None else scale),
    )
    total = over_logits(student_logits, loss, inplace=inplace)
    return LossParts(total, plan.count, {"same_vocab_kl": Ratio(total.detach() / (scale or 1.0), plan.count)}, scale)
