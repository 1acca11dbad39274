"""Softmax of rows that are ours to overwrite: in place, and without NaN where a row holds nothing.

On the CPU torch's own kernel reads a row twice and writes it once, where a log-sum-exp followed by a subtraction costs
several times that and memory for a second tile. Other devices do not promise that kernel to work in place: the
subtraction stays there. O(N·V) time, O(N) memory on the CPU, O(N·V) elsewhere.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def safe_log_softmax(logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """Log-softmax over the last dimension, in place; a row of nothing but -inf stays as it is instead of turning into
    NaN."""
    if logits.device.type == "cpu":
        return _by_kernel(logits, torch.log_softmax, -torch.inf)
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    return logits.sub_(total.masked_fill_(total == -torch.inf, 0.0))


def safe_softmax(logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """Softmax over the last dimension, in place; a row of nothing but -inf becomes 0 instead of NaN."""
    if logits.device.type == "cpu":
        return _by_kernel(logits, torch.softmax, 0.0)
    return safe_log_softmax(logits).exp_()


def tempered(logits: Float[Tensor, "N V"], temperature: float) -> Float[Tensor, "N V"]:
    """Logits over τ, in place; at τ = 1 nothing is touched."""
    return logits if temperature == 1.0 else logits.div_(temperature)


def _by_kernel(logits: Tensor, kernel: Callable[..., Tensor], of_nothing: float) -> Tensor:
    if not logits.numel():
        return logits
    nothing = logits.amax(-1, keepdim=True) == -torch.inf
    kernel(logits, -1, out=logits)
    return logits.masked_fill_(nothing, of_nothing) if bool(nothing.any()) else logits
