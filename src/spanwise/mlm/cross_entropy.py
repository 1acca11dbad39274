"""Weighted cross-entropy that turns its logits into their own gradient.

The plain loss holds three [M, V] arrays at its peak (logits, log-softmax, gradient). Here the softmax overwrites the
logits tile by tile while the loss is summed, and backward scales that same buffer: one array. Gradients are those of
the plain loss. O(1) memory beyond the logits.

Shapes: M scored positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

TILE_ELEMENTS = 1 << 21


class _WeightedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        ctx, logits, targets, weights = args
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        buffer = logits.detach()
        rows = max(1, TILE_ELEMENTS // max(1, logits.shape[1]))
        for start in range(0, len(logits), rows):
            tile = buffer[start : start + rows]
            target = targets[start : start + rows, None]
            weight = weights[start : start + rows, None].float()
            scores = tile.float()
            largest = scores.amax(1, keepdim=True)
            right = scores.gather(1, target) - largest
            # One exponential serves the loss and its gradient: softmax - onehot, times weight.
            normaliser = scores.sub_(largest).exp_().sum(1, keepdim=True)
            total += ((normaliser.log() - right) * weight).sum()
            if ctx.needs_input_grad[0]:
                scores.mul_(weight / normaliser).scatter_add_(1, target, -weight)
                if scores.data_ptr() != tile.data_ptr():
                    tile.copy_(scores)
        if ctx.needs_input_grad[0]:
            ctx.gradients = [buffer]
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.gradients:
            raise RuntimeError(
                "backward ran a second time through a loss whose gradient was kept in its logits; expected one "
                "backward per forward. retain_graph=True was probably used. Fix: call the loss again before the "
                "second backward."
            )
        return ctx.gradients.pop().mul_(grad_outputs[0]), None, None


def weighted_cross_entropy(
    logits: Float[Tensor, "M V"], targets: Int[Tensor, " M"], weights: Float[Tensor, " M"]
) -> Float[Tensor, ""]:
    """The sum of weight · cross-entropy, float32. ``logits`` are used up: do not read them afterwards.

    >>> float(weighted_cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]), torch.tensor([1.0, 0.5])))
    2.079441547393799
    """
    if logits.requires_grad and logits.is_leaf:
        logits = logits.clone()
    total: Any = _WeightedCrossEntropy.apply(logits, targets, weights)  # apply is untyped
    return total
