"""Gold and H-KL: KL over the tokens both vocabularies have, sorted L1 over those they have not.

Chunk means of full log-probabilities on both sides, by segment sums instead of a one-hot product; the tails need only
their largest entries, found on the means themselves. Backward is closed: with g the slope of a chunk mean,
dz = (g - softmax(z)·Σg) / (n·τ).

The KL over the common tokens is not normalised (their mass need not be 1 on either side), so it may be negative. A pair
with -inf on either side cannot be compared and contributes nothing to it.

Time O(R·(Vs + Vt)), memory O(tile·(Vs + Vt)) beyond the gradient.

Shapes: B rows, S student length, Vs, Vt vocabularies, C chunks of a tile, R rows of a tile, M common tokens, k tail
entries.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from spanwise.loss_parts import LossParts, Ratio
from spanwise.teachers.scores import Missing, TeacherScores
from spanwise.teachers.softmax import safe_log_softmax, tempered
from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.losses.checks import check_scores, check_temperature, chosen_plan, token_map_of
from spanwise.xtoken.losses.largest import largest, largest_values
from spanwise.xtoken.losses.plan import ChunkPlan
from spanwise.xtoken.losses.rows import Tile, chunk_rows, make_tiles, over_logits, segment_sum
from spanwise.xtoken.projection import Projection


class GoldRows:
    """Gold as a RowLoss; ``factor`` is scale · τ²."""

    repeats = False

    def __init__(
        self,
        plan: ChunkPlan,
        scores: TeacherScores,
        token_map: Mapping[str, Int64[Tensor, " n"]],
        *,
        temperature: float = 1.0,
        reverse: bool = False,
        uncommon_topk: int = 8192,
        missing: Missing = "tail_bucket",
        factor: float = 1.0,
    ) -> None:
        if uncommon_topk < 0:
            raise ValueError(
                f"uncommon_topk is {uncommon_topk}; expected 0 or more. It was probably set to -1 to switch the limit "
                "off. Fix: pass the teacher's vocabulary size to compare all of the tails."
            )
        device = plan.student.rows.device
        self.common = tuple(token_map[name].to(device) for name in ("common_student", "common_teacher"))
        self.uncommon = tuple(token_map[name].to(device) for name in ("uncommon_student", "uncommon_teacher"))
        self.plan, self.scores, self.missing = plan, scores, missing
        self.temperature, self.reverse, self.factor = temperature, reverse, factor
        self.rows, self.shape = plan.student.rows, plan.lengths[:2]
        self.width = len(self.common[0]) + len(self.uncommon[0])
        self.teacher_width = len(self.common[1]) + len(self.uncommon[1])
        scores.check_width(self.teacher_width)
        self.tail = min(len(self.uncommon[0]), len(self.uncommon[1]), uncommon_topk)
        self.tiles = make_tiles(plan.student.starts, self.width)
        self.kl = torch.zeros((), dtype=torch.float64, device=device)
        self.l1 = torch.zeros((), dtype=torch.float64, device=device)
        self.agreeing = plan.weight.new_zeros(())

    def evaluate(self, tile: Tile, logits: Float[Tensor, "R V"], *, gradient: bool) -> Float[Tensor, ""]:
        """Weighted sum of KL and L1 over the chunks of the tile."""
        units = slice(tile.first_unit, tile.last_unit)
        chunk = self.plan.student.chunk[tile.first_row : tile.last_row] - tile.first_unit
        sizes = self.plan.student.sizes[units].to(logits.dtype)[:, None]
        weight = self.plan.weight[units].to(logits.dtype)

        logp = safe_log_softmax(tempered(logits, self.temperature))
        s = segment_sum(logp, chunk, len(sizes)).div_(sizes)
        common_t, tail_t = (part.to(s.dtype) for part in self._teacher(tile))
        common_s = s.index_select(1, self.common[0])
        if len(self.common[0]):
            self.agreeing = self.agreeing + ((common_s.argmax(-1) == common_t.argmax(-1)) * weight).sum()
        kl, slope = self._common(common_s, common_t)
        l1, tail_at, tail_slope = self._uncommon(s, tail_t)
        self.kl += (kl * weight).sum(dtype=torch.float64)
        self.l1 += (l1 * weight).sum(dtype=torch.float64)
        if gradient:
            # The chunk means are no longer needed: their memory takes their slope.
            g = s.zero_().index_copy_(1, self.common[0], slope).scatter_(1, tail_at, tail_slope)
            g.mul_((weight * (self.factor / self.temperature))[:, None] / sizes)
            outer = g.sum(-1, keepdim=True).index_select(0, chunk)
            logp.exp_().mul_(-outer)
            if len(g) == len(logits):
                logits.add_(g)
            else:
                logits.add_(g.index_select(0, chunk))
        return ((kl + l1) * weight).sum(dtype=torch.float64) * self.factor

    def _teacher(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Chunk means of the teacher's log-probabilities: of the common tokens, and the largest of the others.

        Read in blocks of their own, so that the wider vocabulary does not set the size of the student's tiles.
        """
        starts = self.plan.teacher.starts[tile.first_unit : tile.last_unit + 1]
        parts: list[tuple[Tensor, Tensor]] = []
        for block in make_tiles(starts - starts[0], self.teacher_width):
            units = (tile.first_unit + block.first_unit, tile.first_unit + block.last_unit)
            rows, chunk, sizes = chunk_rows(self.plan.teacher, units)
            t = self.scores.log_probabilities(rows, self.teacher_width, self.temperature, self.missing)
            if len(t) != len(sizes):
                t = segment_sum(t, chunk, len(sizes)).div_(sizes.to(t.dtype)[:, None])
            tail = largest_values(t.index_select(1, self.uncommon[1]), self.tail)
            parts.append((t.index_select(1, self.common[1]), tail))
        return torch.cat([common for common, _ in parts]), torch.cat([tail for _, tail in parts])

    def _common(self, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """KL per chunk over the common tokens and its slope in ``s``. Both are overwritten."""
        apart = (s == -torch.inf) | (t == -torch.inf)
        difference = torch.sub(t, s).masked_fill_(apart, 0.0)
        p = (s if self.reverse else t).exp_().masked_fill_(apart, 0.0)
        product = difference.mul_(p)
        if self.reverse:
            return -product.sum(-1), p.sub_(product)
        return product.sum(-1), p.neg_()

    def _uncommon(self, s: Tensor, tail_t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """L1 per chunk between the sorted tails, the student ids in it and its slope in ``s``."""
        tail_s, at = largest(s.index_select(1, self.uncommon[0]), self.tail)
        tail_s = tail_s.exp()
        difference = tail_s - tail_t.exp()
        return difference.abs().sum(-1), self.uncommon[0][at], difference.sign() * tail_s


def gold(
    student_logits: Float[Tensor, "B S V"],
    scores: TeacherScores,
    alignment: AlignmentBatch | None,
    projection: Projection | Mapping[str, Int64[Tensor, " n"]],
    *,
    relaxed: bool = False,
    temperature: float = 1.0,
    reverse: bool = False,
    exact_token_match_only: bool = False,
    uncommon_topk: int = 8192,
    missing: Missing = "tail_bucket",
    sample_mask: Float32[Tensor, " D"] | None = None,
    plan: ChunkPlan | None = None,
    inplace: bool = False,
    scale: float | None = None,
) -> LossParts:
    """KL over paired tokens and sorted L1 over the others, of chunk means of log-probabilities.

    Args:
        student_logits: a head wider than the tokenizer is cut, a narrower one refused.
        scores: dense or top-k.
        alignment: not needed with ``plan``.
        projection: the vocabularies are paired from it; or the four tensors of ``build_exact_token_map``, which are
            then used as they are.
        relaxed: pair rows whose first weight is at least 0.6 (H-KL) instead of exact rows only.
        temperature: of both sides; the total is multiplied by its square.
        reverse: student relative to teacher (the L1 is symmetric).
        exact_token_match_only: count only pairs of spans that are correct.
        uncommon_topk: entries of the sorted tails that are compared.
        missing: what top-k scores say about unlisted ids.
        sample_mask: per document (rows are documents here; packed batches pass ``plan``).
        plan: from :func:`~spanwise.xtoken.losses.plan.plan_chunks`.
        inplace: write the gradient into ``student_logits``.
        scale: multiplies the total.

    Returns:
        LossParts; count is the summed weight of the valid chunks; metrics: ``gold_kl`` and ``gold_l1`` (means, with τ²;
        the KL is not normalised and may be negative), ``accuracy`` (share of chunks whose likeliest common token
        agrees).
    """
    plan = chosen_plan(plan, alignment, sample_mask, exact_token_match_only)
    loss = gold_rows(
        plan, scores, projection, relaxed=relaxed, temperature=temperature, reverse=reverse,
        uncommon_topk=uncommon_topk, missing=missing, scale=scale,
    )  # fmt: skip
    return gold_parts(loss, over_logits(student_logits, loss, inplace=inplace), scale)


def gold_rows(
    plan: ChunkPlan,
    scores: TeacherScores,
    projection: Projection | Mapping[str, Int64[Tensor, " n"]],
    *,
    relaxed: bool = False,
    temperature: float = 1.0,
    reverse: bool = False,
    uncommon_topk: int = 8192,
    missing: Missing = "tail_bucket",
    scale: float | None = None,
) -> GoldRows:
    """The RowLoss behind :func:`gold`, for the fused form."""
    check_temperature(temperature)
    check_scores(scores, plan.lengths[0], plan.lengths[2])
    return GoldRows(
        plan,
        scores.at_temperature(temperature),
        token_map_of(projection, relaxed=relaxed),
        temperature=temperature,
        reverse=reverse,
        uncommon_topk=uncommon_topk,
        missing=missing,
        factor=temperature**2 * (1.0 if scale is None else scale),
    )


def gold_parts(loss: GoldRows, total: Float[Tensor, ""], scale: float | None) -> LossParts:
    """What gold returns for an evaluated loss."""
    count, square = loss.plan.count, loss.temperature**2
    metrics = {
        "gold_kl": Ratio((loss.kl * square).to(total.dtype), count),
        "gold_l1": Ratio((loss.l1 * square).to(total.dtype), count),
        "accuracy": Ratio(loss.agreeing, count),
    }
    return LossParts(total, count, metrics, scale)
