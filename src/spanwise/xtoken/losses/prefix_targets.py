"""The teacher's distribution over student tokens at every student boundary, by bytes, without gradients.

At a boundary, let j be the teacher token that covers the next byte and r its bytes before the boundary:

1. take the teacher's distribution for j;
2. keep the tokens that begin with r and are longer, renormalise;
3. each, with r taken off, gives its mass to the longest student token that is a prefix of what is left;
4. where j ends before the student's own next token u* does, j's mass must not go to a fragment: u* receives the chain
   of the teacher tokens that cover its bytes, the last one as the sum over all tokens that begin with what remains;
   what j had beyond that goes to the tail.

The ``keep`` heaviest student tokens remain, everything else is one tail bucket. O(N·K log K) time, O(tile·K) memory.

Shapes: N supervised positions, U teacher rows read, K teacher's top-k and the token that really followed, G = keep.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from spanwise.teachers.scores import Missing, TeacherScores
from spanwise.xtoken.losses.prefix_plan import PrefixPlan
from spanwise.xtoken.losses.trie import PrefixTrie

# Candidates handled at once; several integer and float columns of this length are alive.
PIECE_CANDIDATES = 1 << 20


@dataclass(frozen=True)
class PrefixTargets:
    """What the teacher says about student tokens.

    Attributes:
        ids: the heaviest student tokens, by falling mass; -1 for an empty slot.
        mass: theirs.
        tail: what is not in ``ids``; mass and tail of a position sum to 1.
        kept: the share of the teacher's mass that extends the bytes already passed, before renormalising.
    """

    ids: Int64[Tensor, "N G"]
    mass: Float[Tensor, "N G"]
    tail: Float[Tensor, " N"]
    kept: Float[Tensor, " N"]


@dataclass(frozen=True)
class _Candidates:
    """Teacher tokens with known probability, per teacher row; the token that followed is always among them if known."""

    ids: Int64[Tensor, "U K"]
    p: Float[Tensor, "U K"]
    tail: Float[Tensor, " U"]
    observed: Float[Tensor, " U"]


def prefix_targets(
    plan: PrefixPlan,
    scores: TeacherScores,
    trie: PrefixTrie,
    *,
    temperature: float = 1.0,
    keep: int = 24,
    teacher_topk: int | None = 64,
    missing: Missing = "tail_bucket",
) -> PrefixTargets:
    """Teacher distributions over student tokens for every supervised position.

    Args:
        plan: from :func:`~spanwise.xtoken.losses.prefix_plan.plan_prefix`, on the device of ``scores``.
        scores: dense or top-k.
        trie: of the two tokenizers.
        temperature: of both sides.
        keep: student tokens kept per position.
        teacher_topk: how much of dense scores is read; None reads all. Top-k scores are read as they are.
        missing: ``"tail_bucket"`` leaves the mass of unlisted teacher tokens in the tail at common boundaries;
            ``"renormalise"`` drops it. Inside a teacher token it is dropped in both, as nobody knows how it continues.
    """
    if keep < 1 or (teacher_topk is not None and teacher_topk < 1):
        raise ValueError(
            f"prefix KL was asked to keep {keep} student tokens and to read {teacher_topk} of the teacher's; expected "
            "at least 1 of each. One was probably set to 0 to switch the limit off. Fix: teacher_topk=None reads all "
            "of dense scores; keep=24 is a good value."
        )
    candidates = _candidates(plan, scores, trie.teacher_vocab_size, temperature, teacher_topk)
    pieces = torch.arange(len(plan.rows), device=plan.rows.device).split(
        max(1, PIECE_CANDIDATES // max(1, candidates.ids.shape[1]))
    )
    made = [_piece(plan, candidates, trie, piece, keep, missing) for piece in pieces]
    if not made:
        none = candidates.tail.new_zeros(0)
        return PrefixTargets(candidates.ids.new_zeros(0, keep), none.new_zeros(0, keep), none, none)
    return PrefixTargets(
        torch.cat([part.ids for part in made]),
        torch.cat([part.mass for part in made]),
        torch.cat([part.tail for part in made]),
        torch.cat([part.kept for part in made]),
    )


def _candidates(
    plan: PrefixPlan, scores: TeacherScores, width: int, temperature: float, teacher_topk: int | None
) -> _Candidates:
    scores = _rows_of(scores, plan.teacher_rows)
    following = plan.following[:, None]
    token_pair = torch.cat([following, following], 1)
    if scores.form == "dense":
        observed = scores.observed(token_pair, temperature=temperature, width=width)[:, 0]
        scores = scores.topk(width if teacher_topk is None else teacher_topk, temperature=temperature, width=width)
    else:
        scores.at_temperature(temperature)
        observed = None if scores.observed_logp is None else scores.observed_logp[:, 0]
    if scores.top_ids is None or scores.top_logp is None or scores.log_tail is None:
        raise ValueError(
            f"prefix KL was given teacher scores of the form '{scores.form}'; expected dense or top-k scores. The "
            "teacher was probably asked for another loss. Fix: ask it for its top-k, 64 is plenty."
        )
    ids, logp = scores.top_ids[:, 0].long(), scores.top_logp[:, 0]
    logp = logp.to(torch.promote_types(logp.dtype, torch.float32))
    if bool((ids >= width).any()):
        raise ValueError(
            f"the teacher's top-k names token {int(ids.max()):,} and its tokenizer ends at {width - 1:,}; expected "
            "ids below the tokenizer's size. The scores were probably taken from a padded head. Fix: cut the head "
            "before the top-k."
        )
    listed = ids == following
    p = logp.exp().masked_fill(ids < 0, 0.0)
    tail = scores.log_tail[:, 0].to(p.dtype).exp()
    if observed is None:
        seen = (p * listed).sum(-1)
        return _Candidates(ids, p, tail, seen)
    seen = observed.to(p.dtype).exp()
    # The token that really followed joins the candidates where top-k had left it out: its mass comes out of the tail.
    extra = torch.where(listed.any(-1), 0.0, torch.minimum(seen, tail))
    return _Candidates(
        torch.cat([ids, following], 1),
        torch.cat([p, extra[:, None]], 1),
        tail - extra,
        torch.where(extra > 0, extra, seen),
    )


def _rows_of(scores: TeacherScores, rows: Tensor) -> TeacherScores:
    """Some positions of the batch as a batch of rows of length 1 (dense rows get a second, empty position)."""
    length = scores.shape[1]

    def pick(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[rows // length, rows % length][:, None]

    if scores.logits is not None:
        logits = scores.logits[rows // length, rows % length][:, None]
        # ``observed`` reads the token after a position, so each row is followed by a copy of itself.
        return TeacherScores(logits=logits.expand(-1, 2, -1))
    return replace(
        scores,
        top_ids=pick(scores.top_ids),
        top_logp=pick(scores.top_logp),
        log_tail=pick(scores.log_tail),
        observed_logp=pick(scores.observed_logp),
        entropy=None,
        max_probability=None,
        next_word_mass=None,
    )


def _piece(
    plan: PrefixPlan, candidates: _Candidates, trie: PrefixTrie, piece: Tensor, keep: int, missing: Missing
) -> PrefixTargets:
    first, passed = plan.first[piece], plan.passed[piece]
    token = plan.following[first]
    ids, p = candidates.ids[first], candidates.p[first]
    inside = passed[:, None] > 0
    known = ids.clamp(min=0)

    # Step 2: ranks of the tokens that begin with the bytes already passed.
    entry = (trie.teacher_start[token] + passed - 1).clamp(min=0)
    extends = _begins_with(trie, known, entry) & (trie.teacher_length[known] > passed[:, None])
    extends = torch.where(inside, extends, True) & (ids >= 0)
    p = p.masked_fill(~extends, 0.0)
    unlisted = torch.where(inside[:, 0] | (missing == "renormalise"), 0.0, candidates.tail[first])
    kept = p.sum(-1) + unlisted
    floor = kept.clamp(min=torch.finfo(p.dtype).tiny)
    p = p / floor[:, None]

    # Step 3: the longest student token that is a prefix of what is left.
    at = (trie.teacher_start[known] + passed[:, None]).clamp(max=max(0, len(trie.longest) - 1))
    receiver = torch.where(inside, _gather(trie.longest, at), trie.whole[known])
    receiver = receiver.masked_fill(~extends, -1)

    # Step 4: the token that really came was a fragment of u*, which receives the chain instead.
    fragment = (plan.links[piece] > 0)[:, None] & (ids == token[:, None])
    head = (p * fragment).sum(-1)
    receiver = receiver.masked_fill(fragment, -1)
    chain = _chain(plan, candidates, trie, piece, head)
    # The tail is added up, not what is missing to 1: it must be exactly 0 where nothing is in it.
    tail = unlisted / floor + (p * (receiver < 0)).sum(-1) - chain
    receiver = torch.cat([receiver, plan.targets[piece, None]], 1)
    ids, mass, light = _heaviest(receiver, torch.cat([p, chain[:, None]], 1), keep, trie.student_vocab_size)
    return PrefixTargets(ids, mass, (tail + light).clamp(min=0.0), kept)


def _chain(plan: PrefixPlan, candidates: _Candidates, trie: PrefixTrie, piece: Tensor, head: Tensor) -> Tensor:
    """Probability of the teacher tokens that cover u*, given the first one's; 0 where one token covers it alone."""
    chain = torch.where(plan.links[piece] > 0, head, 0.0)
    open_ = (plan.links[piece] > 0).nonzero().squeeze(1)
    step = 1
    while len(open_):
        at = piece[open_]
        row = plan.first[at] + step
        final = plan.links[at] == step
        entry = (trie.teacher_start[plan.following[row]] + plan.needed[at] - 1).clamp(min=0)
        ids = candidates.ids[row]
        continues = _begins_with(trie, ids.clamp(min=0), entry) & (ids >= 0)
        ending = (candidates.p[row] * continues).sum(-1)
        chain[open_] = chain[open_] * torch.where(final, ending, candidates.observed[row])
        open_ = open_[~final]
        step += 1
    return chain


def _begins_with(trie: PrefixTrie, ids: Int64[Tensor, "N K"], entry: Int64[Tensor, " N"]) -> Bool[Tensor, "N K"]:
    """Which tokens begin with the prefix that ``entry`` names."""
    rank = trie.rank[ids]
    low, high = _gather(trie.prefix_low, entry)[:, None], _gather(trie.prefix_high, entry)[:, None]
    return (rank >= low) & (rank < high)


def _gather(table: Tensor, at: Tensor) -> Tensor:
    """``table[at]``, and -1 where the table is empty (a teacher of special tokens only)."""
    return table[at] if len(table) else torch.full_like(at, -1)


def _heaviest(receiver: Tensor, mass: Tensor, keep: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Add up the mass of each student token and keep the heaviest, ties by lowest id; -1 receives nothing.

    Returns ids, mass, and the summed mass of the tokens not kept.
    """
    ids, order = torch.where(receiver < 0, width, receiver).sort(dim=1)
    mass = mass.gather(1, order)
    opens = torch.ones_like(ids, dtype=torch.bool)
    opens[:, 1:] = ids[:, 1:] != ids[:, :-1]
    run = opens.cumsum(1) - 1
    summed = torch.zeros_like(mass).scatter_add_(1, run, mass.masked_fill(ids == width, 0.0))
    names = torch.full_like(ids, -1).scatter_(1, run, ids)
    summed, order = summed.sort(dim=1, descending=True, stable=True)
    names = names.gather(1, order)[:, :keep]
    light = summed[:, keep:].sum(-1)
    summed = summed[:, :keep]
    if summed.shape[1] < keep:
        room = keep - summed.shape[1]
        summed = torch.nn.functional.pad(summed, (0, room))
        names = torch.nn.functional.pad(names, (0, room), value=-1)
    return names.masked_fill(summed <= 0, -1), summed, light
