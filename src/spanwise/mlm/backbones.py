"""Pre-trained models as masked language models, behind the one call that loss and predictor use.

``score(model, …)`` asks any model for the logits of chosen positions. Ours computes just those. A transformers model is
wrapped so that its body runs as it is and its head sees the chosen rows only: a hook replaces what the body returns by
those rows, which works for every head that acts position by position. An autoregressive model becomes bidirectional by
the mask it is given, and its logits are read one place to the left. Any other callable is asked for everything.

Shapes: B rows, S width, M chosen positions, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from spanwise.mlm.model import MODEL_TYPE, RotaryTransformerMLMModel, count_positions


class LogitsShiftBy1:
    """logits[i] ← logits[i - 1], the first kept: what a next-token head says about the place itself.

    >>> LogitsShiftBy1()(torch.tensor([[[1.0], [2.0], [3.0]]])).flatten().tolist()
    [1.0, 1.0, 2.0]
    """

    def __call__(self, logits: Float[Tensor, "B S V"]) -> Float[Tensor, "B S V"]:
        """The shifted logits; the input is not changed."""
        return torch.cat([logits[:, :1], logits[:, :-1]], dim=1)


class MaskedLMBackbone(nn.Module):
    """A transformers model with a masked-LM head (``AutoModelForMaskedLM``) as :class:`MLMModel`.

    Args:
        model: BERT, ModernBERT, RoBERTa, … anything whose head acts on each position alone.
    """

    takes_where = True
    shift = 0

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.num_embeddings: int = self.inner.get_input_embeddings().num_embeddings
        config = self.inner.config
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)

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
        inputs = self._inputs(x_t, attention_mask, positions)
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        if where is None:
            logits: Tensor = self.model(**inputs).logits
            return LogitsShiftBy1()(logits) if self.shift else logits
        source = self._source(where)

        def keep_chosen(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
            return _chosen_rows(output, source)

        hook = self._body().register_forward_hook(keep_chosen)
        try:
            logits = self.model(**inputs).logits
        finally:
            hook.remove()
        return logits.reshape(-1, logits.shape[-1])

    def _inputs(self, x_t: Tensor, attention_mask: Tensor | None, positions: Tensor | None) -> dict[str, Any]:
        mask = torch.ones_like(x_t) if attention_mask is None else (attention_mask != 0).long()
        if mask.ndim == 3:
            mask = mask.unsqueeze(1)
        # An all-padding row attends to everything: its values are not used, and they stay finite.
        return {"input_ids": x_t, "attention_mask": mask | (mask.sum(-1, keepdim=True) == 0).long()}

    def _body(self) -> nn.Module:
        body = getattr(self.inner, self.inner.base_model_prefix, None)
        if not isinstance(body, nn.Module):
            raise ValueError(
                f"{type(self.inner).__name__} has no body under '{self.inner.base_model_prefix}'; expected a "
                "transformers model with a head on a body. The body itself was probably passed. "
                "Fix: load it with AutoModelForMaskedLM."
            )
        return body

    def _source(self, where: Tensor) -> Tensor:
        """Flat places in [B·S] whose hidden state gives the logits of ``where``."""
        places = where.flatten().nonzero().squeeze(1)
        if not self.shift:
            return places
        return torch.where(places % where.shape[1] > 0, places - 1, places)


class BidirectionalCausalLM(MaskedLMBackbone):
    """An autoregressive transformers model (``AutoModelForCausalLM``) that attends both ways, for masked diffusion.

    The mask it gets is query × key and additive, which replaces the causal one in models that accept a prepared mask
    (Llama, Qwen, SmolLM, … under eager or sdpa attention). Logits are shifted by one (:class:`LogitsShiftBy1`).
    """

    shift = 1

    def __init__(self, model: Any) -> None:
        kernel = getattr(getattr(model, "module", model).config, "_attn_implementation", "sdpa")
        if kernel not in ("eager", "sdpa"):
            raise ValueError(
                f"the model attends with {kernel!r}; expected 'sdpa' or 'eager', which take "
                "the mask that makes it bidirectional. Flash attention would stay causal. "
                "Fix: load it with attn_implementation='sdpa'."
            )
        super().__init__(model)

    def _inputs(self, x_t: Tensor, attention_mask: Tensor | None, positions: Tensor | None) -> dict[str, Any]:
        width = x_t.shape[1]
        real = torch.ones_like(x_t, dtype=torch.bool) if attention_mask is None else attention_mask != 0
        keys = real if real.ndim == 2 else real.any(1)
        allowed = real[:, None, None, :].expand(-1, 1, width, -1) if real.ndim == 2 else real.unsqueeze(1)
        allowed = allowed | ~allowed.any(-1, keepdim=True)
        dtype = self.inner.get_input_embeddings().weight.dtype
        additive = torch.zeros(allowed.shape, dtype=dtype, device=x_t.device)
        additive = additive.masked_fill(~allowed, torch.finfo(dtype).min)
        place = count_positions(keys) if positions is None else positions
        return {"input_ids": x_t, "attention_mask": additive, "position_ids": place, "use_cache": False}


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
    name = type(inner).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return BidirectionalCausalLM(model)
    return MaskedLMBackbone(model)


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
    if segment_ids is not None and not isinstance(inner, RotaryTransformerMLMModel):
        same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids > 0)[:, None, :]
        attention_mask, segment_ids = same.long(), None
    extra = {} if segment_ids is None else {"segment_ids": segment_ids}
    if logits_hook is None and getattr(inner, "takes_where", False):
        if padded and attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, :].expand(-1, ids.shape[1], -1)
        logits: Tensor = model(ids, attention_mask, positions, where=where, **extra)
        return logits
    whole: Tensor = model(ids, attention_mask, positions, **extra)
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
    causal = any("CausalLM" in name or "LMHead" in name for name in config.architectures or [])
    loader: Any = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    return as_mlm_model(loader.from_pretrained(str(source)).eval())
