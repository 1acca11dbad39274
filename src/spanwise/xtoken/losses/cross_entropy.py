"""Next-token cross entropy, the term that stands beside every distillation loss.

Float32 at temperature 1 over ``(loss_mask or token_mask)[:, 1:]``, gated and weighted by ``sample_mask``. Backward is
softmax minus one-hot, made in the tile that computed the softmax. Time O(R·V), memory O(tile · V) beyond the gradient.

Shapes: B rows, S length, V vocabulary, R supervised positions, D documents.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from spanwise.loss_parts import LossParts, Ratio
from spanwise.teachers.softmax import safe_log_softmax
from spanwise.xtoken.losses.checks import check_ids
from spanwise.xtoken.losses.plan import TokenPlan, plan_tokens
from spanwise.xtoken.losses.rows import Tile, over_logits, row_tiles


class CrossEntropyRows:
    """Cross entropy as a RowLoss; ``factor`` multiplies the total."""

    repeats = False

    def __init__(self, plan: TokenPlan, width: int, factor: float) -> None:
        check_ids(plan.targets, width, "student")
        self.plan, self.rows, self.shape, self.width, self.factor = plan, plan.rows, plan.shape, width, factor
        self.tiles = row_tiles(len(plan.rows), width, plan.rows.device)
        self.correct = plan.weight.new_zeros(())

    def evaluate(self, tile: Tile, logits: Float[Tensor, "R V"], *, gradient: bool) -> Float[Tensor, ""]:
        """Weighted sum of -log p(target) over the tile."""
        span = slice(tile.first_row, tile.last_row)
        targets = self.plan.targets[span, None]
        weight = self.plan.weight[span, None].to(logits.dtype)
        # Before the logarithm, which may round two logits to one.
        self.correct = self.correct + ((logits.amax(-1, keepdim=True) == logits.gather(1, targets)) * weight).sum()
        logp = safe_log_softmax(logits)
        aimed = logp.gather(1, targets)
        loss = -(aimed * weight).sum(dtype=torch.float64)
        if gradient:
            logp.exp_().scatter_add_(1, targets, torch.full_like(aimed, -1.0)).mul_(weight * self.factor)
        return loss * self.factor


def next_token_ce(
    student_logits: Float[Tensor, "B S V"],
    input_ids: Int[Tensor, "B S"] | None = None,
    mask: Int[Tensor, "B S"] | Bool[Tensor, "B S"] | None = None,
    *,
    sample_mask: Float32[Tensor, " D"] | None = None,
    segment_ids: Int[Tensor, "B S"] | None = None,
    plan: TokenPlan | None = None,
    student_vocab_size: int | None = None,
    inplace: bool = False,
    scale: float | None = None,
) -> LossParts:
    """Cross entropy of the next token.

    Args:
        student_logits: any floating dtype.
        input_ids: the tokens; not needed with ``plan``.
        mask: what is trained on, 1 or True; its first column is never read.
        sample_mask: per document.
        segment_ids: packed rows.
        plan: what :func:`~spanwise.xtoken.losses.plan.plan_tokens` returned, instead of the four above.
        student_vocab_size: the tokenizer's size; a wider head is cut to it before the softmax.
        inplace: write the gradient into ``student_logits``.
        scale: multiplies the total.

    Returns:
        LossParts; count is the summed weight of the supervised tokens, metrics has ``ce`` (nats per token) and
        ``accuracy``.

    >>> parts = next_token_ce(torch.zeros(1, 3, 8), torch.tensor([[1, 2, 3]]))
    >>> round(float(parts.mean()), 4), float(parts.count)
    (2.0794, 2.0)
    """
    if plan is None:
        if input_ids is None:
            raise ValueError(
                "next_token_ce was given neither input_ids nor a plan; expected one. The batch was probably not "
                "unpacked. Fix: pass input_ids=batch['input_ids'] and mask=batch['token_mask'], or "
                "plan=plan_tokens(…)."
            )
        plan = plan_tokens(input_ids, mask, sample_mask=sample_mask, segment_ids=segment_ids)
    width = student_logits.shape[-1] if student_vocab_size is None else student_vocab_size
    loss = CrossEntropyRows(plan, width, 1.0 if scale is None else scale)
    total = over_logits(student_logits, loss, inplace=inplace)
    return cross_entropy_parts(loss, total, scale)


def cross_entropy_parts(loss: CrossEntropyRows, total: Float[Tensor, ""], scale: float | None) -> LossParts:
    """What next_token_ce returns for an evaluated loss."""
    count = loss.plan.count
    plain = total.detach() / loss.factor if loss.factor else torch.zeros_like(total.detach())
    return LossParts(total, count, {"ce": Ratio(plain, count), "accuracy": Ratio(loss.correct, count)}, scale)
