"""Top-k scores and statistics of dense logits in one pass.

The same values as ``TeacherScores.with_statistics(...).topk(...)``, which read the logits several times. What is needed
of a position is its log-sum-exp, one exponential per token, and its k largest logits. Time about half, memory
O(piece · V) beyond the logits and O(B·T·k) for the result.

Shapes: B rows, T teacher length, V vocabulary, K top-k.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.teachers.score_rows import piece_rows
from spanwise.teachers.scores import TeacherScores
from spanwise.teachers.teacher import ScoreRequest


def summarise(logits: Float[Tensor, "B T V"], request: ScoreRequest) -> TeacherScores:
    """Top-k scores at the request's temperature, statistics where it asks for them.

    Args:
        logits: cut to the tokenizer's width; -inf is allowed as long as a row has a finite entry.
        request: ``top_k`` must be set.
    """
    rows, length, width = logits.shape
    k = min(request.top_k or width, width)
    compute = torch.promote_types(logits.dtype, torch.float32)
    count = rows * length
    flat = logits.reshape(count, width)
    following = torch.zeros_like(request.input_ids)
    following[:, :-1] = request.input_ids[:, 1:]
    targets = following.reshape(-1)
    ids = torch.empty(count, k, dtype=torch.long, device=logits.device)
    logp = torch.empty(count, k, dtype=compute, device=logits.device)
    tail, observed, entropy, mass = (torch.zeros(count, dtype=compute, device=logits.device) for _ in range(4))
    words = None if request.word_start is None else request.word_start[:width].to(logits.device, compute)
    step = piece_rows(width, logits.device)
    for begin in range(0, count, step):
        span = slice(begin, begin + step)
        values = flat[span].to(compute) / request.temperature
        total = values.logsumexp(-1)
        top, ids[span] = values.topk(k, dim=-1)
        logp[span] = top - total[:, None]
        if request.statistics:
            observed[span] = values.gather(1, targets[span, None]).squeeze(1) - total
        probability = values.sub_(total[:, None]).exp()
        if request.statistics:
            # -inf · 0 has no place in a sum: such tokens have probability 0 and add nothing.
            entropy[span] = -(probability * values.masked_fill_(values == -torch.inf, 0.0)).sum(-1)
            if words is not None:
                mass[span] = probability @ words
        tail[span] = probability.scatter_(1, ids[span], 0.0).sum(-1).log()
    shape = (rows, length)
    observed = observed.view(shape)
    observed[:, -1] = 0.0
    return TeacherScores(
        top_ids=ids.view(rows, length, k),
        top_logp=logp.view(rows, length, k),
        log_tail=tail.view(shape),
        observed_logp=observed if request.statistics else None,
        entropy=entropy.view(shape) if request.statistics else None,
        max_probability=logp[:, 0].exp().view(shape) if request.statistics else None,
        next_word_mass=mass.view(shape) if request.statistics and words is not None else None,
        temperature=request.temperature,
    )
