"""The distillation terms computed inside the LM head: the student's logits never exist as a whole.

The model runs as usual, wrapped or not, but its head is asked for one position only; the last hidden states are taken
from its decoder and every loss reads the head in tiles. Memory O(tile · V) instead of O(B · S · V). Used only where the
head as we read it gives the model's own logits (compared on one row) and is not sharded; otherwise the plain path is
taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spanwise.batch import model_inputs
from spanwise.loss_parts import LossParts
from spanwise.train.distill_terms import TeacherTerm

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
        return None
    return checked_head(model, input_ids[:1, :16])


def last_hidden(model: nn.Module, bare: Any, batch: Mapping[str, Any]) -> Tensor:
    """Run ``model`` (perhaps wrapped) and return what its decoder gave the head."""
    inner = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
    caught: list[Tensor] = []

    def catch(module: nn.Module, arguments: Any, output: Any) -> None:
        caught.append(output.last_hidden_state)

    handle = inner.get_decoder().register_forward_hook(catch)
    try:
        model(**model_inputs(batch), use_cache=False, logits_to_keep=1)
    finally:
        handle.remove()
    return caught[-1]


def fused_losses(
    hidden: Tensor, head: Any, terms: Mapping[str, TeacherTerm], batch: Mapping[str, Any], scales: Mapping[str, float]
) -> dict[str, LossParts]:
    """Every term of the batch; cross entropy shares the tiles of the first teacher."""
    from spanwise.xtoken.losses.cross_entropy import CrossEntropyRows, cross_entropy_parts
    from spanwise.xtoken.losses.fused import fused, together
    from spanwise.xtoken.losses.plan import token_plan_of_batch

    hidden = hidden.to(head.weight.dtype)
    plain = None
    if "ce" in scales:
        size = next((term.student_size for term in terms.values()), len(head.weight))
        plain = CrossEntropyRows(token_plan_of_batch(batch), size, scales["ce"])
    parts: dict[str, LossParts] = {}
    for name, term in terms.items():
        rows, finish = term.rows(term.teacher.score(term.request(batch)), batch, scales[name])
        if plain is not None and not rows.repeats and rows.width == plain.width:
            both = together(rows, plain)
            total = fused(hidden, head, both)
            share = both.totals[1].to(total.dtype)
            parts["ce"] = cross_entropy_parts(both.cross_entropy, share, scales["ce"])
            parts[name] = finish(rows, total - share, scales[name])
            plain = None
        else:
            parts[name] = finish(rows, fused(hidden, head, rows), scales[name])
    if plain is not None:
        parts["ce"] = cross_entropy_parts(plain, fused(hidden, head, plain), scales["ce"])
    return parts


def unwrapped(model: nn.Module) -> Any:
    """The model inside DDP."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP has spread the parameters: a head is then whole inside the model's own forward only."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())
