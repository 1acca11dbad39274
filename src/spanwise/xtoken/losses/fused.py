"""Any RowLoss from hidden states and the LM head: logits exist for one tile at a time, in value and gradient.

For every tile: logits = head(hidden rows), evaluate in place, then the three products of the backward pass (hidden,
weight and, with LoRA, the low-rank pair) while the tile is hot. Memory beyond the gradients of hidden states and head
is O(tile·V), whatever the number of rows; no [rows, V] tensor is ever allocated. :func:`together` lets cross entropy
share the tile.

    loss = projected_rows(plan, scores, projection, scale=kd_weight / kd_count)
    ce = CrossEntropyRows(plan_tokens(ids, mask), width, ce_weight / ce_count)
    total = fused(hidden, checked_head(model, ids[:1]), together(loss, ce))

Shapes: B rows, S length, H hidden size, V head width, R rows of a tile, r LoRA rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from typing_extensions import override

from spanwise.loss_parts import nothing_counted
from spanwise.xtoken.losses.cross_entropy import CrossEntropyRows
from spanwise.xtoken.losses.head import Head
from spanwise.xtoken.losses.rows import RowLoss, Tile, check_batch, hand_out, row_tiles, versions


def fused(hidden: Float[Tensor, "B S H"], head: Head, loss: RowLoss) -> Float[Tensor, ""]:
    """The total of ``loss`` with a graph to hidden states and head.

    Args:
        hidden: the last hidden states.
        head: from :func:`~spanwise.xtoken.losses.head.checked_head`; a head wider than ``loss.width`` is cut.
        loss: a RowLoss (``projected_rows``, ``gold_rows``, ``prefix_rows``, ``CrossEntropyRows``,
            :func:`together`), already given its scale.
    """
    check_batch("hidden states", hidden, loss)
    if len(head.weight) < loss.width:
        raise ValueError(
            f"the student's head scores {len(head.weight):,} tokens and its tokenizer has {loss.width:,}; expected a "
            "head at least as wide. The projection or tokenizer probably belongs to another student. Fix: rebuild "
            "the projection: spanwise project build STUDENT TEACHER -o FILE, or resize the model's embeddings."
        )
    if not len(loss.rows):
        parameters = [t for t in (head.weight, head.bias, head.lora_a, head.lora_b) if t is not None]
        return nothing_counted(hidden, *parameters).to(torch.promote_types(hidden.dtype, torch.float32))
    tensors = (hidden, head.weight, head.bias, head.lora_a, head.lora_b)
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors]
    total: Tensor = cast("Any", _OverHead).apply(*tensors, head, loss, wanted)
    return total


class TogetherRows:
    """A divergence and cross entropy over the same logits; its total is the sum of both."""

    def __init__(self, divergence: RowLoss, cross_entropy: CrossEntropyRows) -> None:
        if divergence.shape != cross_entropy.shape:
            raise ValueError(
                f"losses planned for {divergence.shape} and {cross_entropy.shape} (rows, tokens) were put together; "
                "expected one batch. One of the plans probably belongs to another. Fix: plan both from one batch."
            )
        if divergence.repeats or divergence.width != cross_entropy.width:
            raise ValueError(
                f"losses of widths {divergence.width:,} and {cross_entropy.width:,} were put together (one reads rows "
                f"twice: {divergence.repeats}); expected one width and single readings. Fix: give both the student "
                "tokenizer's size, or evaluate them one after the other."
            )
        self.divergence, self.width, self.repeats = divergence, divergence.width, False
        self.shape = divergence.shape
        tokens = cross_entropy.plan.rows
        largest = int(torch.cat([tokens, divergence.rows]).max()) + 1 if len(tokens) + len(divergence.rows) else 0
        place = torch.full((largest,), -1, dtype=torch.long, device=tokens.device)
        place[divergence.rows] = torch.arange(len(divergence.rows), device=tokens.device)
        # Tokens in the order of the divergence's rows, then those it does not read.
        at = place[tokens]
        order = torch.where(at < 0, len(divergence.rows), at).argsort(stable=True)
        shared = int((at >= 0).sum())
        self.cross_entropy = CrossEntropyRows(cross_entropy.plan.take(order), self.width, cross_entropy.factor)
        self.at: Int64[Tensor, " n"] = at[order][:shared]
        alone = self.cross_entropy.plan.rows[shared:]
        self.rows = torch.cat([divergence.rows, alone])
        self.shared, self.own = shared, len(divergence.rows)
        tiles = row_tiles(len(alone), self.width, alone.device)
        extra = [Tile(self.own + t.first_row, self.own + t.last_row, -1, -1) for t in tiles]
        self.tiles = [*divergence.tiles, *extra]
        self.totals = [torch.zeros((), dtype=torch.float64, device=tokens.device) for _ in range(2)]

    def evaluate(self, tile: Tile, logits: Float[Tensor, "R V"], *, gradient: bool) -> Float[Tensor, ""]:
        """Both parts of the tile; ``totals`` keeps them apart."""
        if tile.first_unit < 0:
            first = tile.first_row - self.own + self.shared
            ce = self.cross_entropy.evaluate(_tokens(first, len(logits)), logits, gradient=gradient)
            self.totals[1] += ce
            return ce
        bounds = torch.tensor([tile.first_row, tile.last_row], device=self.at.device)
        first, last = torch.searchsorted(self.at, bounds).tolist()
        inside = self.at[first:last] - tile.first_row
        copy = logits.clone() if len(inside) == len(logits) else logits.index_select(0, inside)
        ce = self.cross_entropy.evaluate(_tokens(first, last - first), copy, gradient=gradient)
        own = self.divergence.evaluate(tile, logits, gradient=gradient)
        if gradient and len(inside) == len(logits):
            logits.add_(copy)
        elif gradient:
            logits.index_add_(0, inside, copy)
        self.totals[0] += own
        self.totals[1] += ce
        return own + ce


def together(divergence: RowLoss, cross_entropy: CrossEntropyRows) -> TogetherRows:
    """Evaluate cross entropy in the tiles of ``divergence``: one pass over the logits instead of two."""
    return TogetherRows(divergence, cross_entropy)


def _tokens(first: int, count: int) -> Tile:
    return Tile(first, first + count, first, first + count)


class _OverHead(torch.autograd.Function):
    """Evaluates a RowLoss over head(hidden) and keeps only the gradients of hidden states and head."""

    @staticmethod
    @override
    def forward(*arguments: Any, **_: Any) -> Tensor:
        ctx, hidden, weight, bias, lora_a, lora_b, head, loss, wanted = arguments
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        device = flat.device.type
        product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        if product == torch.float16:
            # Gradients are made here, before a scaler could lift them into float16's range.
            product = torch.float32
        tensors = [None if t is None else t.detach() for t in (weight, bias, lora_a, lora_b)]
        work = _HeadPass(flat.to(product), [None if t is None else t.to(product) for t in tensors], head, loss)
        with torch.no_grad(), torch.autocast(device, enabled=False):
            total = work.run(wanted)
        shapes = [hidden, weight, bias, lora_a, lora_b]
        ctx.gradients = [
            None if g is None or t is None else (g if t.dtype == torch.float16 else g.to(t.dtype)).view(t.shape)
            for g, t in zip(work.gradients, shapes, strict=True)
        ]
        ctx.versions = versions(ctx.gradients)
        return total

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad_output,) = grad_outputs
        return (*hand_out(ctx, grad_output), None, None, None)


class _HeadPass:
    """One pass over all tiles. Gradients of the head accumulate in float32 at least."""

    def __init__(self, hidden: Tensor, tensors: list[Tensor | None], head: Head, loss: RowLoss) -> None:
        self.hidden, self.head, self.loss = hidden, head, loss
        weight, bias, self.lora_a, lora_b = tensors
        # A head wider than the tokenizer is cut; only A does not have the vocabulary as its first dimension.
        self.weight, self.bias, self.lora_b = (None if t is None else t[: loss.width] for t in (weight, bias, lora_b))
        self.full = tensors
        self.compute = torch.promote_types(hidden.dtype, torch.float32)
        self.gradients: list[Tensor | None] = [None] * 5

    def run(self, wanted: list[bool]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.hidden.device)
        every = [self.hidden, *self.full]
        self.gradients = [
            torch.zeros(t.shape, dtype=self.compute, device=t.device) if want and t is not None else None
            for want, t in zip(wanted, every, strict=True)
        ]
        for tile in self.loss.tiles:
            rows = self.loss.rows[tile.first_row : tile.last_row]
            hidden = self.hidden.index_select(0, rows)
            logits, low, slope = self._logits(hidden)
            total += self.loss.evaluate(tile, logits, gradient=any(wanted))
            if any(wanted):
                if slope is not None:
                    logits.mul_(slope)
                self._backward(
                    rows, hidden, low, logits.mul_(self.head.multiplier) if self.head.multiplier != 1 else logits
                )
        return total.to(self.compute)

    def _logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """A tile of logits, the low-rank hidden states, and the slope of the soft cap."""
        weight = cast("Tensor", self.weight)
        logits = torch.mm(hidden, weight.t())
        low = None
        if self.lora_a is not None and self.lora_b is not None:
            low = torch.mm(hidden, self.lora_a.t())
            logits.addmm_(low, self.lora_b.t(), alpha=self.head.lora_scaling)
        logits = logits.to(self.compute)
        if self.bias is not None:
            logits.add_(self.bias.to(self.compute))
        if self.head.multiplier != 1:
            logits.mul_(self.head.multiplier)
        if self.head.softcap is None:
            return logits, low, None
        logits.div_(self.head.softcap).tanh_()
        slope = 1 - logits * logits
        return logits.mul_(self.head.softcap), low, slope

    def _backward(self, rows: Tensor, hidden: Tensor, low: Tensor | None, gradient: Tensor) -> None:
        to_hidden, to_weight, to_bias, to_a, to_b = self.gradients
        width = self.loss.width
        if to_bias is not None:
            to_bias[:width] += gradient.sum(0)
        gradient = gradient.to(hidden.dtype)
        if to_weight is not None:
            _add_product(to_weight[:width], gradient.t(), hidden)
        back = torch.mm(gradient, cast("Tensor", self.weight)) if to_hidden is not None else None
        if low is not None and self.lora_a is not None and self.lora_b is not None:
            if to_b is not None:
                _add_product(to_b[:width], gradient.t(), low, self.head.lora_scaling)
            to_low = torch.mm(gradient, self.lora_b) * self.head.lora_scaling
            if to_a is not None:
                _add_product(to_a, to_low.t(), hidden)
            if back is not None:
                back.addmm_(to_low, self.lora_a)
        if to_hidden is not None and back is not None:
            to_hidden.index_add_(0, rows, back.to(to_hidden.dtype))


def _add_product(target: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> None:
    """target += alpha · left @ right, without a second matrix where the dtypes agree."""
    if target.dtype == left.dtype:
        target.addmm_(left, right, alpha=alpha)
    else:
        target.add_(torch.mm(left, right), alpha=alpha)
