"""Pre-trained models as masked language models, behind the one call that loss and predictor use.

``score(model, …)`` asks any model for the logits of chosen positions. Ours computes just those. A transformers model is
wrapped so that its body runs as it is and its head sees the chosen rows only: a hook replaces what the body returns by
those rows, which works for every head that acts position by position. Every model is told where each token stands among
the attended ones of its row or segment, so padding and packing change nothing. An autoregressive model becomes
bidirectional by the mask it is given, and its logits are read one place to the left. Any other callable is asked for
everything. Beside the model: O(B·S) integers, and an O(B·S²) mask for segments, windows and autoregressive models.

Shapes: B rows, S width, M chosen positions, V vocabulary.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from spanwise.mlm.model import (
    MODEL_TYPE,
    RotaryTransformerMLMModel,
    check_ids,
    check_positions,
    count_positions,
    real_tokens,
)

# The kernels that take a mask of query × key.
KERNELS = ("eager", "sdpa")


class LogitsShiftBy1:
    """logits[i] ← logits[i - 1], the first kept: what a next-token head says about the place itself.

    >>> LogitsShiftBy1()(torch.tensor([[[1.0], [2.0], [3.0]]])).flatten().tolist()
    [1.0, 1.0, 2.0]
    """

    def __call__(
        self, logits: Float[Tensor, "B S V"], source: Int[Tensor, "B S"] | None = None
    ) -> Float[Tensor, "B S V"]:
        """The shifted logits; the input is not changed. ``source`` is what :func:`columns_before` says of the rows."""
        if source is None:
            return torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
        return logits[torch.arange(len(logits), device=logits.device)[:, None], source]


def columns_before(real: Bool[Tensor, "B S"], place: Int[Tensor, "B S"]) -> Int[Tensor, "B S"]:
    """The column of the attended token before each one; the first of a row or segment (place 0) is its own.

    Without it the first token of a packed document would be read from the document before it, and the first behind
    padding from a PAD.

    >>> real = torch.tensor([[False, True, True, False, True]])
    >>> columns_before(real, count_positions(real)).tolist()
    [[0, 1, 1, 3, 2]]
    """
    column = torch.arange(place.shape[1], device=place.device).expand_as(place)
    last = torch.where(real, column, -1).cummax(1).values.roll(1, 1)
    return torch.where((place == 0) | (column == 0) | (last < 0), column, last)


class MaskedLMBackbone(nn.Module):
    """A transformers model with a masked-LM head (``AutoModelForMaskedLM``) as :class:`MLMModel`.

    Args:
        model: BERT, ModernBERT, RoBERTa, … anything whose head acts on each position alone.
    """

    takes_where = True

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.training = model.training  # a wrapper is made where it is needed and changes nothing
        self.num_embeddings: int = self.inner.get_input_embeddings().num_embeddings
        config = self.inner.config
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self.first_position, self.table_length = _position_table(self.inner)
        if self.table_length is not None:
            self.max_length = self.table_length
        windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
        self.window: int | None = getattr(config, "sliding_window", None) if windowed else None

    @property
    def inner(self) -> Any:
        """The model inside DistributedDataParallel, or the model itself."""
        return getattr(self.model, "module", self.model)

    def forward(
        self,
        x_t: Int[Tensor, "B S"],
        attention_mask: Tensor | None = None,
        positions: Int[Tensor, "B S"] | None = None,
        token_type_ids: Int[Tensor, "B S"] | None = None,
        *,
        where: Bool[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "*shape V"]:
        """Logits of every position, or with ``where`` of the chosen ones, [M, V] in row-major order."""
        real = real_tokens(x_t, attention_mask, None)
        place = count_positions(real) if positions is None else positions
        check_ids(x_t, self.num_embeddings)
        if self.table_length is not None and x_t.shape[1] > self.table_length:
            check_positions(place, self.table_length)
        inputs = self._inputs(x_t, attention_mask, place)
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        source = self._source(real, place)
        if where is None:
            logits: Tensor = self.model(**inputs).logits
            return logits if source is None else LogitsShiftBy1()(logits, source)
        flat = torch.arange(x_t.numel(), device=x_t.device).view_as(x_t)
        chosen = (flat if source is None else flat[:, :1] + source)[where]

        def keep_chosen(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
            return _chosen_rows(output, chosen)

        hook = self._body().register_forward_hook(keep_chosen)
        try:
            logits = self.model(**inputs).logits
        finally:
            hook.remove()
        return logits.reshape(-1, logits.shape[-1])

    def _inputs(self, x_t: Tensor, attention_mask: Tensor | None, place: Tensor) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": x_t}
        # Models without this argument know relative places only.
        if "position_ids" in inspect.signature(self._body().forward).parameters:
            inputs["position_ids"] = place + self.first_position
        if attention_mask is None:
            return inputs | {"attention_mask": torch.ones_like(x_t)}
        apart = attention_mask.ndim == 3
        if apart:
            check_kernel(self.model)
        allowed = _attended(attention_mask)
        if not apart and (self.window is None or _kernel(self.model) not in KERNELS):
            return inputs | {"attention_mask": allowed.long()}
        allowed = allowed if apart else allowed[:, None, :].expand(-1, x_t.shape[1], -1)
        mask: Any = self._additive(allowed)
        if self.window is not None:
            # A window counts tokens, not columns: padding between two tokens does not part them.
            near = (place[:, :, None] - place[:, None, :]).abs() <= self.window
            mask = {"full_attention": mask, "sliding_attention": self._additive(allowed & near)}
        return inputs | {"attention_mask": mask}

    def _additive(self, allowed: Bool[Tensor, "B S S"]) -> Float[Tensor, "B 1 S S"]:
        """0 where a query may see a key: the one form that every kernel of :data:`KERNELS` adds to its scores."""
        dtype = self.inner.get_input_embeddings().weight.dtype
        zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return zeros.masked_fill(~allowed, torch.finfo(dtype).min).unsqueeze(1)

    def _source(self, real: Tensor, place: Tensor) -> Tensor | None:
        """The column each position's logits are read from; None: its own."""
        return None

    def _body(self) -> nn.Module:
        body = getattr(self.inner, self.inner.base_model_prefix, None)
        if not isinstance(body, nn.Module):
            raise ValueError(
                f"{type(self.inner).__name__} has no body under '{self.inner.base_model_prefix}'; expected a "
                "transformers model with a head on a body. The body itself was probably passed. "
                "Fix: load it with AutoModelForMaskedLM."
            )
        return body


class BidirectionalCausalLM(MaskedLMBackbone):
    """An autoregressive transformers model (``AutoModelForCausalLM``) that attends both ways, for masked diffusion.

    The mask it gets is query × key and additive, which replaces the causal one in models that accept a prepared mask
    (Llama, Qwen, SmolLM, … under eager or sdpa attention). Logits are shifted by one (:class:`LogitsShiftBy1`).
    """

    def __init__(self, model: Any) -> None:
        check_kernel(model)
        super().__init__(model)

    def _inputs(self, x_t: Tensor, attention_mask: Tensor | None, place: Tensor) -> dict[str, Any]:
        allowed = torch.ones_like(x_t, dtype=torch.bool) if attention_mask is None else _attended(attention_mask)
        if allowed.ndim == 2:
            allowed = allowed[:, None, :].expand(-1, x_t.shape[1], -1)
        places = place + self.first_position
        return {
            "input_ids": x_t, "attention_mask": self._additive(allowed), "position_ids": places, "use_cache": False,
        }  # fmt: skip

    def _source(self, real: Tensor, place: Tensor) -> Tensor:
        return columns_before(real, place)


def check_kernel(model: Any) -> None:
    """Refuse a kernel that takes no mask of query × key."""
    if _kernel(model) not in KERNELS:
        raise ValueError(
            f"the model attends with {_kernel(model)!r} and needs a mask of query × key, for packed rows or to attend "
            "both ways; expected 'sdpa' or 'eager', which take one. It was probably loaded for speed, and flash "
            "attention would stay causal or mix documents. Fix: load it with attn_implementation='sdpa'."
        )


def _kernel(model: Any) -> str:
    return getattr(getattr(model, "module", model).config, "_attn_implementation", "sdpa")


def _position_table(model: nn.Module) -> tuple[int, int | None]:
    """The row of the position table that a first token gets, and how many tokens it serves; 0 and None without a table.

    RoBERTa and its kind count from behind PAD's row, a few others from 2.
    """
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        weight: Any = getattr(table, "weight", None)
        if isinstance(table, nn.Module) and isinstance(weight, Tensor):
            behind_pad: Any = getattr(table, "padding_idx", None)
            counted: Any = getattr(module, "position_ids", None)
            first = 0 if counted is None else int(counted.flatten()[0])
            first = first if behind_pad is None else behind_pad + 1
            return first, len(weight) - first
    return 0, None


def _attended(attention_mask: Tensor) -> Bool[Tensor, "..."]:
    """True = attend. What has nothing to see sees everything: its values are not used, and they stay finite."""
    mask = attention_mask != 0
    return mask | ~mask.any(-1, keepdim=True)


def _chosen_rows(output: Any, source: Tensor) -> Any:
    """The body's output with [1, M, d] chosen hidden states in place of [B, S, d]."""
    hidden = output[0]
    chosen = hidden.reshape(-1, hidden.shape[-1])[source].unsqueeze(0)
    if isinstance(output, tuple):
        return (chosen, *output[1:])
    output["last_hidden_state"] = chosen
    return output


def as_mlm_model(model: Any) -> Any:
    """``model`` itself where it can be called as an :class:`MLMModel`, else its wrapper.

    transformers' masked-LM and causal-LM models are wrapped; what is neither is returned as it is.
    """
    inner = getattr(model, "module", model)
    if getattr(inner, "takes_where", False) or not hasattr(inner, "base_model_prefix"):
        return model
    return BidirectionalCausalLM(model) if is_causal(type(inner).__name__) else MaskedLMBackbone(model)


def is_causal(architecture: str) -> bool:
    """Whether a transformers class predicts the next token.

    transformers' own tables decide, for XLM and Flaubert name their masked models ``…WithLMHeadModel``; a class that
    they do not know (of a checkpoint's own code) is told by its name.
    """
    from transformers.models.auto import modeling_auto

    if architecture in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
        return False
    known = architecture in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return known or architecture.endswith(("ForCausalLM", "LMHeadModel"))


def score(
    model: Callable[..., Any],
    ids: Int[Tensor, "B S"],
    attention_mask: Tensor | None,
    positions: Int[Tensor, "B S"] | None,
    where: Bool[Tensor, "B S"],
    *,
    segment_ids: Int[Tensor, "B S"] | None = None,
    logits_hook: Callable[[Tensor], Tensor] | None = None,
    padded: bool = False,
) -> Float[Tensor, "M V"]:
    """The logits of ``where`` in row-major order, by the cheapest way the model offers.

    Args:
        model: as :func:`as_mlm_model` returns it.
        logits_hook: a change of the logits of whole rows, which are then computed whole.
        padded: compute padding too (targets lie on it).
    """
    inner = getattr(model, "module", model)  # DistributedDataParallel
    ours = isinstance(inner, RotaryTransformerMLMModel)
    real = real_tokens(ids, attention_mask, segment_ids)
    if segment_ids is not None and not ours:
        same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & real[:, None, :]
        positions = count_positions(real, segment_ids) if positions is None else positions
        if attention_mask is not None and attention_mask.ndim == 3:
            same = same & (attention_mask != 0)
        attention_mask, segment_ids = same.long(), None
    extra = {} if segment_ids is None else {"segment_ids": segment_ids}
    if logits_hook is None and getattr(inner, "takes_where", False):
        if padded and ours and attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, :].expand(-1, ids.shape[1], -1)
        logits: Tensor = model(ids, attention_mask, positions, where=where, **extra)
        return logits
    whole: Any = model(ids, attention_mask, positions, **extra)
    whole = getattr(whole, "logits", whole)  # transformers' models answer with more than logits
    if isinstance(logits_hook, LogitsShiftBy1):
        place = count_positions(real, segment_ids) if positions is None else positions
        return logits_hook(whole, columns_before(real, place))[where]
    return (whole if logits_hook is None else logits_hook(whole))[where]


def load_masked_lm(source: str | os.PathLike[str]) -> Any:
    """A masked language model from a folder or hub name: ours, or any that transformers loads, wrapped.

    Ours is told by its config; else ``AutoModelForMaskedLM`` is tried, and for a causal checkpoint
    :class:`BidirectionalCausalLM` wraps it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    try:
        config: Any = AutoConfig.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no model could be loaded from '{source}' ({str(error).splitlines()[0]}); expected a folder made by "
            "save_pretrained or a hub name. The path is probably misspelt. Fix: check that it holds a config.json."
        ) from error
    if config.model_type == MODEL_TYPE:
        return RotaryTransformerMLMModel.from_pretrained(source)
    causal = any(is_causal(name) for name in config.architectures or [])
    loader: Any = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    return as_mlm_model(loader.from_pretrained(str(source)).eval())
