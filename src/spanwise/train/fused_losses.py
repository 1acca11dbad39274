"""The distillation terms computed inside the LM head: the student's logits never exist as a whole.

The model runs as usual, wrapped or not, but its head is asked for one position only; the last hidden states are taken
from its decoder and every loss reads the head in tiles, under the autocast that the decoder ran in. Memory O(tile · V)
instead of O(B · S · V). Used only where the head as we read it gives the model's own logits (compared on one row);
otherwise the plain path is taken.

A sharded head (FSDP2) is gathered by the model's own forward and read after it: accelerate leaves the head's group
whole until the backward pass, which then reduces what the losses added to its gradient like any other. A head that is
sharded again at once takes the plain path.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spanwise.batch import model_inputs
from spanwise.loss_parts import LossParts
from spanwise.train.distill_terms import TeacherTerm
from spanwise.train.sharding import is_sharded

FUSABLE = frozenset({"prefix_kl", "projected_kl", "gold", "h_kl"})
# Below this the logits are small and computing them once is faster than once per loss.
LARGE_VOCABULARY = 32_768


def wants_fused(setting: bool | None, terms: Mapping[str, TeacherTerm], vocabulary: int) -> bool:
    """Whether a run should try: asked for, or the vocabulary is large and every family can."""
    able = all(term.family.name in FUSABLE for term in terms.values())
    return able and (vocabulary >= LARGE_VOCABULARY if setting is None else setting)


def verified_head(model: Any, input_ids: Tensor) -> Any:
    """The head, if reading it gives the model's own logits and the model can leave them out; else None."""
    from spanwise.xtoken.losses.head import checked_head

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "logits_to_keep" not in inspect.signature(inner.forward).parameters:
        say_unfused(f"{type(inner).__name__} cannot leave its logits out (its forward takes no logits_to_keep)")
        return None
    if is_sharded(model) and not _is_whole_after_a_forward(model, input_ids[:1, :16]):
        say_unfused("the head is sharded again right after the forward (fsdp_reshard_after_forward)")
        return None
    return checked_head(model, input_ids[:1, :16])


def say_unfused(why: str) -> None:
    """Warn that a run that wants its losses in the head computes whole logits."""
    warnings.warn(f"the fused loss is not used: {why}; the plain one is, which holds whole logits", stacklevel=3)


def _is_whole_after_a_forward(model: Any, input_ids: Tensor) -> bool:
    """Whether the head can be read between forward and backward. All ranks must ask, since all gather."""
    from spanwise.xtoken.losses.head import read_head

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(input_ids=input_ids)
    finally:
        model.train(training)
    head = read_head(model)
    tensors = (head.weight, head.bias, head.lora_a, head.lora_b)
    return not any(isinstance(tensor, DTensor) for tensor in tensors)


@dataclass(frozen=True)
class LastHidden:
    """What a decoder gave its head, and the type of the head's products where autocast sets one."""

    states: Tensor
    product: torch.dtype | None

    def over(self, head: Any, rows: Any) -> Tensor:
        """The total of a RowLoss over the head, computed as the model itself computes its head."""
        from spanwise.xtoken.losses.fused import fused

        # Gradients are made here, before a scaler could lift them into float16's range.
        half = None if self.product == torch.float16 else self.product
        with torch.autocast(self.states.device.type, half or torch.bfloat16, enabled=half is not None):
            return fused(self.states.to(head.weight.dtype), head, rows)


def last_hidden(model: nn.Module, bare: Any, batch: Mapping[str, Any]) -> LastHidden:
    """Run ``model`` (perhaps wrapped) and return what its decoder gave the head."""
    from spanwise.xtoken.losses.head import noted_autocast

    inner = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
    caught: list[Tensor] = []

    def catch(module: nn.Module, arguments: Any, output: Any) -> None:
        caught.append(output.last_hidden_state)

    decoder = inner.get_decoder()
    handle = decoder.register_forward_hook(catch)
    try:
        with noted_autocast(decoder) as noted:
            model(**model_inputs(batch), use_cache=False, logits_to_keep=1)
    finally:
        handle.remove()
    return LastHidden(caught[-1], noted[-1])


def fused_losses(
    hidden: LastHidden,
    head: Any,
    terms: Mapping[str, TeacherTerm],
    batch: Mapping[str, Any],
    scales: Mapping[str, float],
) -> dict[str, LossParts]:
    """Every term of the batch; cross entropy shares the tiles of the first teacher."""
    from spanwise.xtoken.losses.cross_entropy import CrossEntropyRows, cross_entropy_parts
    from spanwise.xtoken.losses.fused import together
    from spanwise.xtoken.losses.plan import token_plan_of_batch

    plain = None
    if "ce" in scales:
        size = next((term.student_size for term in terms.values()), len(head.weight))
        plain = CrossEntropyRows(token_plan_of_batch(batch), size, scales["ce"])
    parts: dict[str, LossParts] = {}
    for name, term in terms.items():
        rows, finish = term.rows(term.teacher.score(term.request(batch)), batch, scales[name])
        if plain is not None and not rows.repeats and rows.width == plain.width:
            both = together(rows, plain)
            total = hidden.over(head, both)
            share = both.totals[1].to(total.dtype)
            parts["ce"] = cross_entropy_parts(both.cross_entropy, share, scales["ce"])
            parts[name] = finish(rows, total - share, scales[name])
            plain = None
        else:
            parts[name] = finish(rows, hidden.over(head, rows), scales[name])
    if plain is not None:
        parts["ce"] = cross_entropy_parts(plain, hidden.over(head, plain), scales["ce"])
    return parts


def unwrapped(model: nn.Module) -> Any:
    """The model inside DDP."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
