"""The student's LM head as the fused losses see it: weight, bias, LoRA, scaling and soft-capping, read from the model.

What a model does after its last hidden state is only partly visible in its configuration, so what was read is compared
with the model's own logits on one row, in the type in which the model itself multiplies (autocast has its own); where
they differ the head is refused with a warning and the unfused path is to be used.

Shapes: V head width, H hidden size, r LoRA rank, S row length.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Agreement with the model's logits, relative to their largest magnitude, by the dtype of the product.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Head:
    """logits = softcap · tanh(multiplier · (h Wᵀ + b + s · h Aᵀ Bᵀ) / softcap).

    Attributes:
        weight: W.
        bias: b, if any.
        multiplier: a constant on the logits (Cohere's ``logit_scale``, 1 / Granite's ``logits_scaling``).
        softcap: Gemma's ``final_logit_softcapping``; None for none.
        lora_a: A, if the head carries LoRA.
        lora_b: B.
        lora_scaling: s.
    """

    weight: Float[Tensor, "V H"]
    bias: Float[Tensor, " V"] | None = None
    multiplier: float = 1.0
    softcap: float | None = None
    lora_a: Float[Tensor, "r H"] | None = None
    lora_b: Float[Tensor, "V r"] | None = None
    lora_scaling: float = 1.0

    def logits(self, hidden: Float[Tensor, "*n H"]) -> Float[Tensor, "*n V"]:
        """The plain form, with autograd: what the fused losses never build for all rows at once."""
        out = torch.nn.functional.linear(hidden, self.weight, self.bias)
        if self.lora_a is not None and self.lora_b is not None:
            low = torch.nn.functional.linear(hidden, self.lora_a)
            out = out + self.lora_scaling * torch.nn.functional.linear(low, self.lora_b)
        out = out * self.multiplier
        return out if self.softcap is None else self.softcap * torch.tanh(out / self.softcap)


def read_head(model: Any) -> Head:
    """What a model's configuration and modules say about its head; not yet compared with what the model does."""
    layer = model.get_output_embeddings()
    if layer is None:
        raise ValueError(
            f"{type(model).__name__} has no output embeddings; expected a causal language model with an LM head. A "
            "bare encoder was probably passed. Fix: load it with AutoModelForCausalLM, or use the unfused losses."
        )
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    multiplier = float(getattr(config, "logit_scale", None) or 1.0)
    divisor = getattr(config, "logits_scaling", None)
    if divisor:
        multiplier /= float(divisor)
    base = getattr(layer, "base_layer", layer)
    _refuse_other_layers(layer, base)
    adapters = list(getattr(layer, "active_adapters", [])) if base is not layer else []
    if getattr(layer, "merged", False) or getattr(layer, "disable_adapters", False):
        adapters = []
    if len(adapters) > 1:
        raise ValueError(
            f"the LM head carries the LoRA adapters {adapters}; expected one. Fix: activate one, or use the unfused "
            "losses."
        )
    for adapter in adapters:
        _refuse_hidden_work(layer, adapter)
    a = layer.lora_A[adapters[0]].weight if adapters else None
    b = layer.lora_B[adapters[0]].weight if adapters else None
    scaling = float(layer.scaling[adapters[0]]) if adapters else 1.0
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(base.weight, getattr(base, "bias", None), multiplier, softcap, a, b, scaling)


def _refuse_other_layers(layer: Any, base: Any) -> None:
    """Raise for a head that is no plain matrix with at most LoRA on it: quantised, or under another kind of adapter."""
    weight = getattr(base, "weight", None)
    plain = isinstance(weight, Tensor) and weight.is_floating_point() and weight.ndim == 2
    # PEFT wraps what it trains beside LoRA: a whole copy shows its own weight, single rows do not.
    rows_alone = hasattr(layer, "original_module") and not hasattr(layer, "modules_to_save")
    if not plain or rows_alone or (base is not layer and not hasattr(layer, "lora_A")):
        kind = type(layer)
        raise ValueError(
            f"the LM head is a {kind.__module__}.{kind.__qualname__}; expected a linear layer of floating-point "
            "weights, with LoRA or without, which is all that the fused form computes. It was probably quantised, or "
            "given another kind of adapter. Fix: leave the head out of both, or use the unfused losses."
        )


def _refuse_hidden_work(layer: Any, adapter: str) -> None:
    """Raise for what a comparison before training cannot see: dropout, and variants that begin as plain LoRA."""
    dropout = getattr(layer.lora_dropout[adapter], "p", 0.0)
    if dropout > 0:
        raise ValueError(
            f"the LoRA adapter {adapter!r} on the LM head has lora_dropout = {dropout}; expected 0, since the fused "
            "form reads the head's weights and drops nothing. The dropout of the other layers was probably meant. Fix: "
            "leave the head out of target_modules, set lora_dropout=0, or use the unfused losses."
        )
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    if variant is not None:
        raise ValueError(
            f"the LoRA adapter {adapter!r} on the LM head is a {type(variant).__name__}; expected plain LoRA, whose "
            "product is all that the fused form adds. DoRA or another variant was probably asked for. Fix: leave the "
            "head out of target_modules, or use the unfused losses."
        )


@contextlib.contextmanager
def noted_autocast(layer: Any) -> Iterator[list[torch.dtype | None]]:
    """While it lasts, every forward of ``layer`` notes the type that autocast gives its products; None without.

    accelerate turns autocast on inside ``model.forward`` alone, so it can only be seen from a layer.
    """
    noted: list[torch.dtype | None] = []

    def note(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        device = next(module.parameters()).device.type
        noted.append(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)

    handle = layer.register_forward_hook(note)
    try:
        yield noted
    finally:
        handle.remove()


def checked_head(model: Any, input_ids: Int[Tensor, "1 S"]) -> Head | None:
    """The model's head, compared with the model's own logits on one row; None, with a warning, where they differ.

    Args:
        model: a transformers causal language model, PEFT-wrapped or not; run once in evaluation mode, left as it was.
        input_ids: one row of tokens.
    """
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            head = read_head(model)
            with noted_autocast(model.get_output_embeddings()) as noted:
                out = model(input_ids=input_ids, output_hidden_states=True)
            expected = out.logits.float()
            hidden = out.hidden_states[-1].to(head.weight.dtype)
            product = noted[-1] if noted else None
            with torch.autocast(hidden.device.type, product or torch.bfloat16, enabled=product is not None):
                made = head.logits(hidden).float()
    except ValueError as error:
        warnings.warn(f"the fused loss is not used: {error}", stacklevel=2)
        return None
    finally:
        for module, was in training.items():  # one by one: a part may have been frozen in evaluation mode
            module.training = was
    finite = expected.isfinite() & (expected.abs() < 1e30)
    largest = float(expected[finite].abs().max()) if bool(finite.any()) else 1.0
    gap = (
        float((made - expected)[finite].abs().max())
        if made.shape == expected.shape and bool(finite.any())
        else torch.inf
    )
    if gap > TOLERANCE.get(product or head.weight.dtype, 1e-3) * max(largest, 1.0):
        warnings.warn(
            f"the fused loss is not used: the head read from {type(model).__name__} (bias, scaling, soft-capping, "
            f"LoRA) gives logits that differ by {gap:.3g} from the model's own, whose largest is {largest:.3g}; "
            "expected equal ones. The model probably does something after its last hidden state that its "
            "configuration does not say. The unfused path is exact and needs more memory.",
            stacklevel=2,
        )
        return None
    return head
