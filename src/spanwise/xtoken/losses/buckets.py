"""Listed ids one by one, everything else as one bucket: how a whole student meets a teacher that lists a few tokens.

Both sides are distributions over the listed ids and the bucket. The student's share of the bucket is summed over all
other ids, not one minus the rest, so it is exact also when it is tiny. O(R·V) time, no second tile.

Shapes: R rows of a tile, V student vocabulary, G ids listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

Divergence = Literal["forward", "reverse", "jsd"]

# A bucket with no student token in it has log-probability -inf; the loss stays finite with this instead.
NO_BUCKET = -1e4
SMALLEST_MASS = 1e-10


@dataclass(frozen=True)
class Listed:
    """The student's side of one tile.

    Attributes:
        at: where each listed id stands; empty slots repeat the one in slot ``first``.
        first: the first slot that holds an id.
        used: slots that hold an id.
        logp: log-probabilities of the listed ids.
        others: log-probability of the bucket.
        total: sum of the exponentials that :func:`take_listed` left in the tile.
    """

    at: Int64[Tensor, "R G"]
    first: Int64[Tensor, "R 1"]
    used: Bool[Tensor, "R G"]
    logp: Float[Tensor, "R G"]
    others: Float[Tensor, " R"]
    total: Float[Tensor, " R"]


def take_listed(logits: Float[Tensor, "R V"], ids: Int64[Tensor, "R G"]) -> Listed:
    """Take the listed ids out of a tile of logits, which keeps the exponentials of the others, relative to the largest.

    Args:
        logits: overwritten.
        ids: each once per row, -1 for an empty slot.
    """
    used = ids >= 0
    first = used.int().argmax(-1, keepdim=True)
    # Empty slots repeat an id, so that scattering to them changes nothing.
    at = torch.where(used, ids, ids.gather(1, first).clamp(min=0))
    values = logits.gather(1, at)
    logits.scatter_(1, at, torch.where(used.gather(1, first), -torch.inf, values))
    largest = logits.amax(-1, keepdim=True)
    largest = largest.masked_fill_(largest == -torch.inf, 0.0)
    total = logits.sub_(largest).exp_().sum(-1)
    others = total.log() + largest.squeeze(1)
    everything = torch.logaddexp(others, values.masked_fill(~used, -torch.inf).logsumexp(-1))
    everything = everything.masked_fill(everything == -torch.inf, 0.0)
    return Listed(at, first, used, values - everything[:, None], (others - everything).clamp(min=NO_BUCKET), total)


def compare(
    listed: Listed,
    mass: Float[Tensor, "R G"],
    rest: Float[Tensor, " R"],
    divergence: Divergence,
    beta: float = 0.5,
) -> tuple[Float[Tensor, " R"], Float[Tensor, "R G"], Float[Tensor, " R"]]:
    """Divergence per row, and its slopes in the log-probabilities of the listed ids and of the bucket.

    An id that the student cannot produce (log-probability -inf) gives its mass to the bucket.

    Args:
        listed: the student.
        mass: the teacher's, 0 in empty slots.
        rest: the teacher's mass of the bucket.
        divergence: KL(teacher ‖ student), its reverse, or Jensen-Shannon.
        beta: the teacher's share of the mixture in the last.
    """
    possible = listed.used & (listed.logp > -torch.inf)
    q = torch.where(possible, mass, 0.0)
    rest = rest + (mass - q).sum(-1)
    logp = torch.where(possible, listed.logp, 0.0)
    if divergence == "forward":
        loss = (torch.xlogy(q, q) - q * logp).sum(-1) + torch.xlogy(rest, rest) - rest * listed.others
        return loss, -q, -rest
    p, others = torch.where(possible, logp.exp(), 0.0), listed.others.exp()
    if divergence == "reverse":
        difference = logp - torch.where(possible, q, 1.0).log()
        at_rest = listed.others - rest.clamp(min=SMALLEST_MASS).log()
        return (p * difference).sum(-1) + others * at_rest, p * (difference + 1), others * (at_rest + 1)
    loss, slope = _jensen_shannon(p, logp, q, beta)
    bucket, bucket_slope = _jensen_shannon(others, listed.others, rest, beta)
    return loss.sum(-1) + bucket, slope, bucket_slope


def write_gradient(
    tile: Float[Tensor, "R V"],
    listed: Listed,
    slope: Float[Tensor, "R G"],
    rest_slope: Float[Tensor, " R"],
    weight: Float[Tensor, " R"],
) -> None:
    """Overwrite a tile, as :func:`take_listed` left it, by the gradient in the logits it was made from.

    With s the log-probabilities of the buckets and g = dL/ds: dz = g - p Σg for a listed id, and its share of
    g_rest - p_rest Σg for any other.
    """
    everything = slope.sum(-1) + rest_slope
    inner = slope - torch.where(listed.used, listed.logp.exp(), 0.0) * everything[:, None]
    inner = inner * weight[:, None]
    outer = (rest_slope - listed.others.exp() * everything) * weight
    tile.mul_((outer / listed.total.clamp(min=torch.finfo(tile.dtype).tiny))[:, None])
    repeated = torch.where(
        listed.used.gather(1, listed.first), inner.gather(1, listed.first), tile.gather(1, listed.at)
    )
    tile.scatter_(1, listed.at, torch.where(listed.used, inner, repeated))


def _jensen_shannon(p: Tensor, logp: Tensor, q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Each outcome's part of β·KL(q ‖ m) + (1 - β)·KL(p ‖ m), and its slope in log p."""
    mixture = (beta * q + (1 - beta) * p).clamp(min=torch.finfo(p.dtype).tiny).log()
    slope = (1 - beta) * p * (logp - mixture)
    return slope + beta * (torch.xlogy(q, q) - q * mixture), slope
