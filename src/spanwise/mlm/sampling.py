"""From logits to tokens: filters, temperature, and one uniform number per position.

A token is drawn by inverting the cumulative distribution, which has the same law as Gumbel-max (argmax of
logits/temperature plus Gumbel noise) and needs one random number per position instead of V. Temperature 0 is the
argmax. O(M·V); with top_p O(M·V log V).

Shapes: M positions, V vocabulary, K kept tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class TokenSampler:
    """How a token is drawn; the values are checked when it is made.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep that many tokens; more than V keeps all.
        top_p: keep the most probable tokens until their sum reaches it.
        top_p_rule: ``inclusive`` keeps the token that crosses top_p, ``exclusive`` drops it (at least one is kept).
    """

    temperature: float | int = 1.0
    top_k: int | None = None
    top_p: float | int | None = None
    top_p_rule: str = "inclusive"

    def __post_init__(self) -> None:
        problem, fix = "", ""
        if self.top_k is not None and self.top_p is not None:
            problem, fix = f"top_k={self.top_k} and top_p={self.top_p} were both given", "pass only one of them"
        elif self.top_k is not None and self.top_k < 1:
            problem, fix = f"top_k={self.top_k} was given", "pass at least 1, or None to keep all tokens"
        elif self.top_p is not None and not 0 < self.top_p <= 1:
            problem, fix = f"top_p={self.top_p} was given", "pass a number above 0 and at most 1; 1 keeps all tokens"
        elif not 0 <= self.temperature < float("inf"):
            problem, fix = f"temperature={self.temperature} was given", "pass 0 for greedy, or a positive number"
        elif self.top_p_rule not in ("inclusive", "exclusive"):
            problem, fix = f"top_p_rule={self.top_p_rule!r} was given", "pass 'inclusive' or 'exclusive'"
        if problem:
            raise ValueError(
                f"{problem}; expected at most one filter with top_k >= 1, 0 < top_p <= 1 and temperature >= 0. The "
                f"value probably comes from a recipe where 0 means off. Fix: {fix}."
            )

    def __call__(self, logits: Float[Tensor, "M V"], uniform: Float[Tensor, " M"]) -> Int[Tensor, " M"]:
        """One token per position. -inf logits are never drawn.

        >>> TokenSampler(temperature=0)(torch.tensor([[0.0, 2.0]]), torch.zeros(1)).tolist()
        [1]
        """
        if self.temperature == 0 or self.top_k == 1 or logits.shape[0] == 0:
            return logits.argmax(-1)
        scaled = logits.float() / self.temperature
        if self.top_k is not None:
            kept, tokens = scaled.topk(min(self.top_k, scaled.shape[-1]), dim=-1)
            return tokens.gather(1, _draw(kept.softmax(-1), uniform)[:, None]).squeeze(1)
        probabilities = scaled.softmax(-1)
        if self.top_p is None or self.top_p == 1:
            return _draw(probabilities, uniform)
        ordered, tokens = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        reached = ordered.cumsum(-1)
        kept = reached - ordered < self.top_p if self.top_p_rule == "inclusive" else reached <= self.top_p
        kept[:, 0] = True
        return tokens.gather(1, _draw(ordered * kept, uniform)[:, None]).squeeze(1)


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The index at which the running sum first exceeds uniform · total; never one of weight 0."""
    reached = weights.cumsum(-1)
    target = uniform.to(reached.dtype)[:, None] * reached[:, -1:]
    index = torch.searchsorted(reached, target, right=True).squeeze(1).clamp(max=weights.shape[-1] - 1)
    drawn = weights.gather(1, index[:, None]).squeeze(1)
    return torch.where(drawn > 0, index, weights.argmax(-1))


def forbid(logits: Float[Tensor, "M V"], tokens: Sequence[int]) -> Float[Tensor, "M V"]:
    """The logits with ``tokens`` at -inf; ids beyond the vocabulary are passed over. The input is not changed."""
    inside = sorted({token for token in tokens if 0 <= token < logits.shape[-1]})
    return logits.index_fill(-1, torch.tensor(inside, dtype=torch.long, device=logits.device), float("-inf"))
