"""The losses written out: one-hot averages, full softmax, dense projection. The twin of spanwise.xtoken.losses.

Works in the dtype it is given (float64 as an oracle, float32 as the other side of the benchmark).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chunk_means(values: Tensor, chunk_id: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """[B, T, V] and ids [B, T] → means [B, C, V] and sizes [B, C]; -inf in a chunk makes its mean -inf."""
    member = (chunk_id[:, :, None] == torch.arange(chunks)).to(values.dtype)
    infinite = values == -torch.inf
    sums = torch.bmm(member.transpose(1, 2), values.masked_fill(infinite, 0.0))
    if infinite.any():
        sums = sums.masked_fill(torch.bmm(member.transpose(1, 2), infinite.to(values.dtype)) > 0, -torch.inf)
    sizes = member.sum(1)
    return sums / sizes.clamp(min=1)[..., None], sizes


def shifted(chunk_id: Tensor) -> Tensor:
    """Chunk ids at their predictors."""
    out = torch.full_like(chunk_id, -1)
    out[:, :-1] = chunk_id[:, 1:]
    return out


def valid_chunks(alignment, sample_mask: Tensor | None = None, only_correct: bool = False) -> Tensor:
    """[B, C]: both sides non-empty, pair valid, sample in, nothing at position 0."""
    chunks = alignment.pair_valid.shape[1]
    valid = alignment.pair_valid.clone()
    for ids in (alignment.student_chunk_id, alignment.teacher_chunk_id):
        for c in range(chunks):
            valid[:, c] &= (ids == c).any(1)
            if ids.shape[1]:
                valid[:, c] &= ids[:, 0] != c
    if only_correct:
        valid &= alignment.pair_is_correct
    if sample_mask is not None:
        valid &= (sample_mask > 0)[:, None]
    return valid


def log_softmax(y: Tensor) -> Tensor:
    total = torch.logsumexp(y, -1, keepdim=True)
    return y - total.masked_fill(total == -torch.inf, 0.0)


def important(importance: Tensor, k: int) -> Tensor:
    """The k largest, ties by lowest id, sorted."""
    order = sorted(range(len(importance)), key=lambda i: (-float(importance[i]), i))
    return torch.tensor(sorted(order[:k]))


def projected_kl(
    z: Tensor, y: Tensor, alignment, matrix: Tensor, *, temperature: float = 1.0, reverse: bool = False,
    vocab_topk: int = 8192, scope: str = "document", rows: str = "all", sample_mask: Tensor | None = None,
    only_correct: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(total, count). ``matrix`` is [Vs, Vt], dense or sparse; wider heads are cut."""
    students, teachers = matrix.shape
    z, y = z[..., :students], y[..., :teachers]
    valid = valid_chunks(alignment, sample_mask, only_correct)
    chunks = valid.shape[1]
    student_ids, teacher_ids = shifted(alignment.student_chunk_id), shifted(alignment.teacher_chunk_id)
    weight = valid.to(z.dtype) * (1.0 if sample_mask is None else sample_mask.to(z.dtype)[:, None])
    p = torch.softmax(z / temperature, -1)
    total = torch.zeros((), dtype=z.dtype)
    k = min(vocab_topk, teachers)
    if scope == "microbatch":
        voting = y if rows == "all" else y[:, :-1]
        shared = important(voting.amax((0, 1)), k)
    for b in range(len(z)):
        if not valid[b].any():
            continue
        if scope == "document":
            used = torch.tensor([int(c) >= 0 and bool(valid[b, int(c)]) for c in teacher_ids[b]])
            shared = important(log_softmax(y[b][used] / temperature).amax(0), k)
        if matrix.is_sparse:
            q = torch.sparse.mm(matrix.t(), p[b].t()).t()[:, shared]
        else:
            q = p[b] @ matrix[:, shared]
        t = log_softmax(y[b][:, shared] / temperature)
        q, _ = chunk_means(q[None], student_ids[b : b + 1], chunks)
        t, _ = chunk_means(t[None], teacher_ids[b : b + 1], chunks)
        q, t = q[0], t[0]
        q = q / (q.sum(-1, keepdim=True) + 1e-10)
        lq = (q + 1e-10).log()
        known = t > -torch.inf
        difference = torch.where(known, t, 0.0) - lq
        if reverse:
            each = torch.where(known, -lq.exp() * difference, 0.0).sum(-1)
        else:
            each = (t.exp() * difference).sum(-1)
        total = total + (torch.where(valid[b], each, 0.0) * weight[b]).sum()
    return total * temperature**2, weight.sum()


def gold(
    z: Tensor, y: Tensor, alignment, token_map: dict[str, Tensor], *, temperature: float = 1.0, reverse: bool = False,
    uncommon_topk: int = 8192, sample_mask: Tensor | None = None, only_correct: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(total, count)."""
    cs, ct = token_map["common_student"], token_map["common_teacher"]
    us, ut = token_map["uncommon_student"], token_map["uncommon_teacher"]
    z, y = z[..., : len(cs) + len(us)], y[..., : len(ct) + len(ut)]
    valid = valid_chunks(alignment, sample_mask, only_correct)
    chunks = valid.shape[1]
    weight = valid.to(z.dtype) * (1.0 if sample_mask is None else sample_mask.to(z.dtype)[:, None])
    s, _ = chunk_means(log_softmax(z / temperature), shifted(alignment.student_chunk_id), chunks)
    t, _ = chunk_means(log_softmax(y / temperature), shifted(alignment.teacher_chunk_id), chunks)
    s_common, t_common = s[..., cs], t[..., ct]
    comparable = (s_common > -torch.inf) & (t_common > -torch.inf)
    difference = torch.where(comparable, t_common, 0.0) - torch.where(comparable, s_common, 0.0)
    p = torch.where(comparable, -s_common.exp() if reverse else t_common.exp(), 0.0)
    kl = (p * difference).sum(-1)
    k = min(len(us), len(ut), uncommon_topk)
    tail_s = s[..., us].exp().sort(-1, descending=True).values[..., :k]
    tail_t = t[..., ut].exp().sort(-1, descending=True).values[..., :k]
    each = kl + (tail_s - tail_t).abs().sum(-1)
    return (torch.where(valid, each, 0.0) * weight).sum() * temperature**2, weight.sum()


def cross_entropy(z: Tensor, ids: Tensor, mask: Tensor, sample_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(total, count) of next-token cross entropy."""
    weight = (mask[:, 1:] != 0).to(z.dtype) * sample_mask.to(z.dtype)[:, None]
    aimed = torch.log_softmax(z[:, :-1], -1).gather(2, ids[:, 1:, None]).squeeze(2)
    return -(aimed * weight).sum(), weight.sum()


def chunk_weight(
    alignment, sample_mask: Tensor, dtype: torch.dtype, only_correct: bool = False
) -> tuple[Tensor, Tensor]:
    """Valid chunks and what each counts."""
    valid = valid_chunks(alignment, sample_mask, only_correct)
    return valid, valid.to(dtype) * sample_mask.to(dtype)[:, None]


def uld(
    z: Tensor, y: Tensor, alignment, *, sample_mask: Tensor, temperature: float = 1.0, only_correct: bool = False
) -> tuple[Tensor, Tensor]:
    """(total, count): both sorted, the narrower one filled up with zeros."""
    valid, weight = chunk_weight(alignment, sample_mask, z.dtype, only_correct)
    sides = []
    for logits, ids in ((z, alignment.student_chunk_id), (y, alignment.teacher_chunk_id)):
        mean, _ = chunk_means(torch.softmax(logits / temperature, -1), shifted(ids), valid.shape[1])
        room = max(z.shape[-1], y.shape[-1]) - logits.shape[-1]
        sides.append(torch.nn.functional.pad(mean.sort(-1, descending=True).values, (0, room)))
    each = (sides[0] - sides[1]).abs().sum(-1)
    return (torch.where(valid, each, 0.0) * weight).sum() * temperature**2, weight.sum()


def alm(
    z: Tensor, y: Tensor, alignment, ids: Tensor, teacher_ids: Tensor, *, sample_mask: Tensor,
    temperature: float = 1.0, difference: str = "forward", word_start: Tensor | None = None,
    teacher_start: Tensor | None = None, only_correct: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(total, count): likelihoods of chunks as Bernoulli variables."""
    valid, weight = chunk_weight(alignment, sample_mask, z.dtype, only_correct)
    likelihoods = []
    for logits, tokens, chunk_id, start in (
        (z, ids, alignment.student_chunk_id, word_start),
        (y, teacher_ids, alignment.teacher_chunk_id, teacher_start),
    ):
        observed = torch.log_softmax(logits, -1).gather(2, torch.roll(tokens, -1, 1)[..., None])
        mean, sizes = chunk_means(observed, shifted(chunk_id), valid.shape[1])
        total = mean[..., 0] * sizes
        if start is not None:
            total = total + next_word_mass(logits, chunk_id, valid.shape[1], start)
        likelihoods.append((total / temperature).clamp(max=math.log1p(-1e-6)).exp())
    p, q = likelihoods
    if difference == "abs":
        each = (p - q).abs()
    else:
        a, b = (q, p) if difference == "forward" else (p, q)
        each = a * (a.log() - b.log()) + (1 - a) * (torch.log1p(-a) - torch.log1p(-b))
    return (torch.where(valid, each, 0.0) * weight).sum() * temperature**2, weight.sum()


def next_word_mass(logits: Tensor, chunk_id: Tensor, chunks: int, word_start: Tensor) -> Tensor:
    """[B, C] log-probability that a word begins after the chunk's last token."""
    mass = torch.softmax(logits, -1)[..., word_start].sum(-1).log()
    out = torch.zeros(len(logits), chunks, dtype=logits.dtype)
    for b in range(len(logits)):
        for c in range(chunks):
            places = (chunk_id[b] == c).nonzero().squeeze(1)
            if len(places):
                out[b, c] = mass[b, places[-1]]
    return out


def bucketed_kl(
    z: Tensor, top_ids: Tensor, top_logp: Tensor, log_tail: Tensor, mask: Tensor, sample_mask: Tensor, *,
    temperature: float = 1.0, divergence: str = "forward", beta: float = 0.5,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(total, count) of same_vocab_kl where the teacher lists a few tokens: all others are one outcome on both sides.

    An outcome of probability 0 on a side counts as 1e-10 of the teacher's or as log-probability -1e4 of the student's.
    """
    total, count = torch.zeros((), dtype=z.dtype), torch.zeros((), dtype=z.dtype)
    for b in range(len(z)):
        for position in range(z.shape[1] - 1):
            weight = float(mask[b, position + 1] != 0) * float(sample_mask[b])
            ids = [int(i) for i in top_ids[b, position] if i >= 0]
            listed = [place for place, i in enumerate(top_ids[b, position]) if i >= 0]
            others = [i for i in range(z.shape[-1]) if i not in ids]
            s = torch.log_softmax(z[b, position] / temperature, -1)
            rest = torch.logsumexp(s[others], -1) if others else torch.tensor(-1e4, dtype=z.dtype)
            s = torch.cat([s[ids], rest[None]])
            q = torch.cat([top_logp[b, position][listed].exp(), log_tail[b, position].exp()[None]]).to(z.dtype)
            if divergence == "forward":
                each = (torch.xlogy(q, q) - q * s).sum()
            elif divergence == "reverse":
                each = (s.exp() * (s - q.clamp(min=1e-10).log())).sum()
            else:
                m = beta * q + (1 - beta) * s.exp()
                m = m.clamp(min=1e-30)
                each = beta * (torch.xlogy(q, q) - q * m.log()).sum() + (1 - beta) * (s.exp() * (s - m.log())).sum()
            total, count = total + weight * each, count + weight
    return total * temperature**2, count


def same_vocab_kl(
    z: Tensor, y: Tensor, mask: Tensor, sample_mask: Tensor, *, temperature: float = 1.0,
    divergence: str = "forward", beta: float = 0.5,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(total, count), position by position; a position counts where the next token does."""
    s, t = (torch.log_softmax(logits[:, :-1] / temperature, -1) for logits in (z, y))

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    if divergence == "jsd":
        m = (beta * t.exp() + (1 - beta) * s.exp()).log()
        each = beta * kl(t, m) + (1 - beta) * kl(s, m)
    else:
        each = kl(t, s) if divergence == "forward" else kl(s, t)
    weight = (mask[:, 1:] != 0).to(z.dtype) * sample_mask.to(z.dtype)[:, None]
    return (each * weight).sum() * temperature**2, weight.sum()
