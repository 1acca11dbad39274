"""ALM: the probability of every chunk as each side sees it, compared as two Bernoulli variables.

Only the observed path is read: a chunk's log-probability is the sum of its tokens'. From the teacher one number per
token is enough (``TeacherScores.observed_logp``), so any served teacher and any pair of tokenizers will do: no
projection, no vocabulary. Likelihoods are raised to 1/τ. O(R·Vs) time for the student's softmax, O(chunks) for
everything else.

Debiasing: a chunk that ends where a longer token could have gone on is less likely for one tokenizer than for the
other; both sides are multiplied by the probability that what follows starts a word, read at the chunk's last token.

Shapes: B rows, S student length, T teacher length, Vs student vocabulary, C chunks of a tile, R rows of a tile, P
pairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from spanwise.loss_parts import LossParts, Ratio
from spanwise.teachers.scores import TeacherScores
from spanwise.teachers.softmax import safe_log_softmax
from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.losses.checks import check_ids, check_scores, check_temperature, chosen_plan
from spanwise.xtoken.losses.plan import ChunkPlan
from spanwise.xtoken.losses.rows import Tile, make_tiles, over_logits

Difference = Literal["forward", "reverse", "abs"]
EPSILON = 1e-6
# A token that truncated scores do not list counts as this unlikely, and one that the student cannot produce as this.
LEAST_LOG = -80.0
STUDENTS_LEAST_LOG = -1e4


class AlmRows:
    """ALM as a RowLoss; ``factor`` is scale · τ²."""

    def __init__(
        self,
        plan: ChunkPlan,
        teacher_logp: Float[Tensor, " N"],
        targets: Int[Tensor, " R"],
        width: int,
        *,
        word_start: Bool[Tensor, " Vs"] | None = None,
        temperature: float = 1.0,
        difference: Difference = "forward",
        factor: float = 1.0,
    ) -> None:
        self.plan, self.teacher_logp, self.width = plan, teacher_logp, width
        self.word_start, self.temperature, self.difference, self.factor = word_start, temperature, difference, factor
        self.repeats, self.shape = word_start is not None, plan.lengths[:2]
        self.rows, self.targets, self.chunk, starts = (
            plan.student.rows,
            targets,
            plan.student.chunk,
            plan.student.starts,
        )
        if word_start is not None:
            # Each chunk gets one more row, the position of its last token, aimed at no token (-1).
            order = torch.cat([self.chunk * 2, torch.arange(plan.chunks, device=starts.device) * 2 + 1]).argsort(
                stable=True
            )
            last = self.rows[starts[1:] - 1] + 1 if plan.chunks else self.rows
            self.rows = torch.cat([self.rows, last])[order]
            self.targets = torch.cat([targets, torch.full_like(last, -1)])[order]
            self.chunk = torch.cat([self.chunk, torch.arange(plan.chunks, device=starts.device)])[order]
            starts = starts + torch.arange(len(starts), device=starts.device)
        self.tiles = make_tiles(starts, width)

    def evaluate(self, tile: Tile, logits: Float[Tensor, "R V"], *, gradient: bool) -> Float[Tensor, ""]:
        """Weighted sum of the Bernoulli divergences of the tile."""
        span = slice(tile.first_row, tile.last_row)
        chunk = self.chunk[span] - tile.first_unit
        targets = self.targets[span, None]
        weight = self.plan.weight[tile.first_unit : tile.last_unit].to(logits.dtype)
        logp = safe_log_softmax(logits)
        read = logp.gather(1, targets.clamp(min=0)).squeeze(1)
        p = logp.exp_() if gradient or self.word_start is not None else logp
        mass = None
        if self.word_start is not None:
            mass = p[:, self.word_start].sum(-1).clamp(min=torch.finfo(p.dtype).tiny)
            read = torch.where(targets.squeeze(1) < 0, mass.log(), read)
        observed = torch.zeros_like(weight).index_add_(0, chunk, read)
        loss, slope = bernoulli(
            observed / self.temperature,
            self.teacher_logp[tile.first_unit : tile.last_unit].to(observed.dtype) / self.temperature,
            self.difference,
        )
        if gradient:
            coefficient = (slope * weight * (self.factor / self.temperature)).index_select(0, chunk)[:, None]
            if mass is not None and self.word_start is not None:
                ends = (targets < 0).to(p.dtype)
                p.mul_(1 - (self.word_start.to(p.dtype) / mass[:, None]) * ends)
                p.scatter_add_(1, targets.clamp(min=0), ends - 1)
            else:
                p.scatter_add_(1, targets, torch.full_like(coefficient, -1.0))
            p.mul_(-coefficient)
        return (loss * weight).sum(dtype=torch.float64) * self.factor


def bernoulli(s: Float[Tensor, " C"], t: Float[Tensor, " C"], difference: Difference) -> tuple[Tensor, Tensor]:
    """Divergence of two Bernoulli variables with log-probabilities ``s`` (student) and ``t``, and its slope in
    ``s``."""
    limit = torch.log1p(torch.tensor(-EPSILON, dtype=torch.float64)).item()
    inside = (s < limit) & (s > STUDENTS_LEAST_LOG)
    s, t = s.clamp(min=STUDENTS_LEAST_LOG, max=limit), t.clamp(min=LEAST_LOG, max=limit)
    p, q = s.exp(), t.exp()
    if difference == "abs":
        return (p - q).abs(), torch.where(inside, (p - q).sign() * p, 0.0)
    rest_s, rest_t = log1mexp(s), log1mexp(t)
    if difference == "forward":
        loss = q * (t - s) + (1 - q) * (rest_t - rest_s)
        slope = -q + (1 - q) * (s - rest_s).exp()
    elif difference == "reverse":
        loss = p * (s - t) + (1 - p) * (rest_s - rest_t)
        slope = p * (s - t - rest_s + rest_t)
    else:
        raise ValueError(
            f"difference={difference!r} says how chunks are compared; expected 'forward', 'reverse' or 'abs'. It is "
            "probably misspelt. Fix: pass one of the three."
        )
    return loss, torch.where(inside, slope, 0.0)


def log1mexp(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """log(1 - exp(x)) for x < 0, accurate at both ends.

    >>> [round(v, 6) for v in log1mexp(torch.tensor([-1e-6, -40.0], dtype=torch.float64)).tolist()]
    [-13.815511, -0.0]
    """
    return torch.where(x > -0.6931472, (-torch.expm1(x)).log(), torch.log1p(-x.exp()))


def merge_pairs(alignment: AlignmentBatch, outcome: Int[Tensor, "B P"]) -> AlignmentBatch:
    """Outcome chunks: pairs of one ``outcome`` become one chunk, valid and correct where all of them are.

    Args:
        alignment: chunks to merge.
        outcome: for every pair the outcome it belongs to, non-decreasing along the row; -1 leaves it out.
    """
    pairs = outcome.shape[1]
    place = torch.where(alignment.pair_valid & (outcome >= 0), outcome, pairs).long()
    exists = torch.zeros(len(outcome), pairs + 1, dtype=torch.bool, device=outcome.device).scatter_(1, place, True)
    wrong = torch.zeros_like(exists).scatter_(
        1, torch.where(alignment.pair_is_correct | (outcome < 0), pairs, outcome).long(), True
    )
    broken = torch.zeros_like(exists).scatter_(
        1, torch.where(alignment.pair_valid | (outcome < 0), pairs, outcome).long(), True
    )

    def renamed(chunk_id: Tensor) -> Tensor:
        new = torch.gather(outcome.long(), 1, chunk_id.clamp(min=0))
        return torch.where(chunk_id >= 0, new, -1)

    valid = exists[:, :pairs] & ~broken[:, :pairs]
    return replace(
        alignment,
        pair_valid=valid,
        pair_is_correct=valid & ~wrong[:, :pairs],
        student_chunk_id=renamed(alignment.student_chunk_id),
        teacher_chunk_id=renamed(alignment.teacher_chunk_id),
        num_chunks=exists[:, :pairs].sum(1),
    )


def alm(
    student_logits: Float[Tensor, "B S V"],
    scores: TeacherScores,
    alignment: AlignmentBatch | None,
    *,
    student_input_ids: Int[Tensor, "B S"],
    teacher_input_ids: Int[Tensor, "B T"] | None = None,
    temperature: float = 1.0,
    difference: Difference = "forward",
    word_start: Bool[Tensor, " Vs"] | None = None,
    exact_token_match_only: bool = False,
    sample_mask: Float32[Tensor, " D"] | None = None,
    plan: ChunkPlan | None = None,
    student_vocab_size: int | None = None,
    inplace: bool = False,
    scale: float | None = None,
) -> LossParts:
    """Divergence of chunk likelihoods along the observed text.

    Args:
        student_logits: a head wider than ``student_vocab_size`` is cut.
        scores: ``observed_logp`` at temperature 1, or dense logits with ``teacher_input_ids``. Top-k scores count
            an unlisted token as practically impossible.
        alignment: not needed with ``plan``; :func:`merge_pairs` makes larger outcome chunks.
        student_input_ids: the tokens that were observed.
        teacher_input_ids: needed where ``scores`` has no ``observed_logp``.
        temperature: likelihoods are raised to 1/τ; the total is multiplied by τ².
        difference: ``"forward"`` and ``"reverse"`` KL, or ``"abs"``, the total variation.
        word_start: which student tokens start a word or end the text; switches debiasing on, for which ``scores``
            must carry ``next_word_mass``.
        exact_token_match_only: count only pairs that are correct.
        sample_mask: per document (rows are documents here; packed batches pass ``plan``).
        plan: from :func:`~spanwise.xtoken.losses.plan.plan_chunks`.
        student_vocab_size: the tokenizer's size.
        inplace: write the gradient into ``student_logits`` (not with debiasing).
        scale: multiplies the total.

    Returns:
        LossParts; count is the summed weight of the valid chunks; metrics: ``alm`` (mean, with τ²).
    """
    plan = chosen_plan(plan, alignment, sample_mask, exact_token_match_only)
    check_temperature(temperature)
    check_scores(scores, plan.lengths[0], plan.lengths[2])
    width = student_logits.shape[-1] if student_vocab_size is None else student_vocab_size
    if tuple(student_input_ids.shape) != plan.lengths[:2]:
        raise ValueError(
            f"student_input_ids are {tuple(student_input_ids.shape)} and the alignment's student side is "
            f"{plan.lengths[:2]}; expected equal shapes. They probably belong to another batch. Fix: pass the ids that "
            "were aligned."
        )
    targets = student_input_ids.reshape(-1)[plan.student.rows + 1].long()
    check_ids(targets, width, "student")
    if word_start is not None and len(word_start) < width:
        raise ValueError(
            f"word_start marks {len(word_start):,} tokens and the student scores {width:,}; expected a mark for each. "
            "It was probably made for the teacher. Fix: make it from the student's tokenizer."
        )
    loss = AlmRows(
        plan,
        _chunk_logp(plan, scores, teacher_input_ids, debias=word_start is not None),
        targets,
        width,
        word_start=None if word_start is None else word_start[:width],
        temperature=temperature,
        difference=difference,
        factor=temperature**2 * (1.0 if scale is None else scale),
    )
    total = over_logits(student_logits, loss, inplace=inplace)
    return LossParts(total, plan.count, {"alm": Ratio(total.detach() / (scale or 1.0), plan.count)}, scale)


def _chunk_logp(plan: ChunkPlan, scores: TeacherScores, teacher_input_ids: Tensor | None, *, debias: bool) -> Tensor:
    """The teacher's log-probability of every chunk."""
    if scores.observed_logp is None and teacher_input_ids is None:
        raise ValueError(
            "alm was given teacher scores without observed_logp and no teacher_input_ids; expected one of them. The "
            "teacher was probably asked for its top-k alone. Fix: ask it for the observed tokens' log-probabilities, "
            "or pass the ids."
        )
    at_one = scores.temperature == 1.0
    if not at_one and (debias or scores.logits is None or teacher_input_ids is None):
        raise ValueError(
            f"alm was given {scores.form} teacher scores taken at temperature {scores.temperature:g}; expected 1, as "
            "it raises the likelihoods of whole chunks to 1/τ itself. The teacher was probably asked at the loss's "
            "temperature. Fix: ask it at temperature 1; the loss keeps its own."
        )
    ready = scores.observed_logp if at_one else None
    observed = (ready if ready is not None else scores.observed(_given(teacher_input_ids))).reshape(-1)
    chunks = torch.zeros(plan.chunks, dtype=torch.promote_types(observed.dtype, torch.float32), device=observed.device)
    chunks.index_add_(0, plan.teacher.chunk, observed[plan.teacher.rows].to(chunks.dtype))
    if debias:
        if scores.next_word_mass is None:
            raise ValueError(
                "alm was asked to debias and the teacher scores have no next_word_mass; expected the probability that "
                "the next token starts a word. The teacher was probably asked for less. Fix: "
                "scores.with_statistics(ids, word_start=…), or leave word_start out."
            )
        mass = scores.next_word_mass.reshape(-1)[plan.teacher.rows[plan.teacher.starts[1:] - 1] + 1]
        chunks = chunks + mass.to(chunks.dtype).clamp(min=torch.finfo(chunks.dtype).tiny).log()
    return chunks


def _given(ids: Tensor | None) -> Tensor:
    if ids is None:
        raise ValueError("teacher_input_ids are missing; expected [B, T] ids. Fix: pass the teacher's tokens.")
    return ids
