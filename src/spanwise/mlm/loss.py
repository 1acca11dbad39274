"""The loss on hidden tokens, as a mean over what was hidden or as a bound on the likelihood.

Only hidden positions go through the head, and padding is not computed. The count comes from integers alone, so that a
trainer may reduce it over micro-batches before the first forward. O(M·V) memory, once, for M scored positions.

Shapes: B rows, S width, M scored positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.batch import IGNORE_INDEX
from spanwise.loss_parts import LossParts, Ratio
from spanwise.mlm.backbones import as_mlm_model, score
from spanwise.mlm.checks import token_ids
from spanwise.mlm.cross_entropy import weighted_cross_entropy
from spanwise.mlm.layout import one_of
from spanwise.mlm.model import check_ids
from spanwise.mlm.special_tokens import mask_token_id
from spanwise.mlm.types import MLMLossDict


class MLMLoss:
    """Cross-entropy where the input is MASK and the target is not -100.

    Args:
        loss_on_padding: targets may lie where attention_mask is 0, so padding is computed; else such targets are
            refused.
        loss_on_visible_tokens: score every attended token with a target, hidden or not.
        model: anything :func:`spanwise.mlm.as_mlm_model` takes.
        tokenizer: says which id is MASK.
        use_num_masked_factor: divide each row's loss by 1 + the number of its MASK tokens.
        weighting: ``"mlm"`` counts every scored token alike; ``"nelbo"`` weights rows by ``noise_weight``, so that the
            loss is an unbiased estimate of the negative evidence bound in nats per token.
        norm: what the sum is divided by: scored tokens (``"masked"``), real tokens that may be hidden (``"token"``), or
            row by row first (``"sequence"``). None is ``"masked"`` for mlm and ``"token"`` for nelbo, which allows no
            other: dividing by hidden tokens would not be the bound.

    The mean is 0 with a graph where nothing is scored. The batch is not changed.
    """

    def __init__(
        self,
        loss_on_padding: bool = False,
        loss_on_visible_tokens: bool = False,
        model: Any = None,
        tokenizer: Any = None,
        use_num_masked_factor: bool = False,
        *,
        weighting: str = "mlm",
        norm: str | None = None,
    ) -> None:
        one_of("weighting", weighting, ("mlm", "nelbo"))
        one_of("norm", norm, ("masked", "token", "sequence", None))
        if weighting == "nelbo" and (norm not in (None, "token") or loss_on_visible_tokens or use_num_masked_factor):
            raise ValueError(
                f"weighting='nelbo' was given with norm={norm!r}, loss_on_visible_tokens={loss_on_visible_tokens}, "
                f"use_num_masked_factor={use_num_masked_factor}; expected norm='token' and neither of the others. Any "
                "of them would make the value something else than the bound. Fix: leave them out, or weighting='mlm'."
            )
        self.loss_on_padding = loss_on_padding
        self.loss_on_visible_tokens = loss_on_visible_tokens
        self.model = model
        self.tokenizer = tokenizer
        self.use_num_masked_factor = use_num_masked_factor
        self.weighting = weighting
        self.norm = norm or ("token" if weighting == "nelbo" else "masked")

    def __call__(
        self,
        batch: Mapping[str, Any],
        batch_idx: int | None = None,
        dataloader_idx: int | None = None,
        dataloader_name: str | None = None,
    ) -> MLMLossDict:
        """The mean over this batch, as ``{"loss": scalar}``."""
        return {"loss": self.parts(batch).mean()}

    def parts(self, batch: Mapping[str, Any], scale: float | None = None) -> LossParts:
        """Sum and count of this batch; with ``scale`` the sum is multiplied by it before its gradient is taken."""
        model = self._model()
        targets = _targets(batch)
        ids = token_ids(batch, ("target_ids", "attention_mask", "positions", "segment_ids"))
        scored = self.scored(batch)
        logits = score(
            model,
            ids,
            batch.get("attention_mask"),
            batch.get("positions"),
            scored,
            segment_ids=batch.get("segment_ids"),
            padded=self.loss_on_padding,
        )
        weights = self._row_weights(batch, scored)[:, None].expand_as(ids)[scored]
        if scale is not None:
            weights = weights * scale
        check_ids(targets[scored], logits.shape[1])
        total = weighted_cross_entropy(logits, targets[scored], weights)
        count = self.count(batch)
        hidden = Ratio(float(scored.sum()), float(max(1, int(_real(batch).sum()))))
        return LossParts(total, count, {"hidden_share": hidden}, scale)

    def count(self, batch: Mapping[str, Any]) -> Float[Tensor, ""]:
        """What the sum is divided by, from integers alone: no forward is needed."""
        gate = _sample_mask(batch)
        scored = self.scored(batch)
        if self.norm == "masked":
            per_row = scored.sum(1)
        elif self.norm == "token":
            per_row = _modelled(batch).sum(1)
        else:
            per_row = scored.any(1)
        return (per_row.float() * gate).sum()

    def scored(self, batch: Mapping[str, Any]) -> Bool[Tensor, "B S"]:
        """Which positions are scored. Rows with ``sample_mask`` 0 are not."""
        chosen = _targets(batch) != IGNORE_INDEX
        if self.loss_on_visible_tokens:
            chosen = chosen & (_real(batch) | self.loss_on_padding)
        else:
            chosen = chosen & (batch["input_ids"] == mask_token_id(self.tokenizer))
        return chosen & (_sample_mask(batch) > 0)[:, None]

    def _row_weights(self, batch: Mapping[str, Any], scored: Tensor) -> Tensor:
        weights = _sample_mask(batch)
        if self.weighting == "nelbo":
            if "noise_weight" not in batch:
                raise ValueError(
                    "weighting='nelbo' met a batch without noise_weight; expected one weight per row. The batch was "
                    "probably made by a prediction collator or by hand. Fix: use a training collator of spanwise.mlm."
                )
            weights = weights * batch["noise_weight"]
        if self.use_num_masked_factor:
            masked = (batch["input_ids"] == mask_token_id(self.tokenizer)).sum(1)
            weights = weights / (masked + 1)
        if self.norm == "sequence":
            weights = weights / scored.sum(1).clamp(min=1)
        return weights.float()

    def _model(self) -> Any:
        if self.model is None or self.tokenizer is None:
            raise ValueError(
                f"the loss was called without a {'model' if self.model is None else 'tokenizer'}; expected both. They "
                "are probably set after construction and were not. Fix: MLMLoss(model=model, tokenizer=tokenizer)."
            )
        model = as_mlm_model(self.model)
        check_vocabulary(model, self.tokenizer)
        return model


def check_vocabulary(model: Any, tokenizer: Any) -> None:
    """Refuse a model with fewer embeddings than the tokenizer has tokens, or with another MASK."""
    known = getattr(getattr(model, "module", model), "num_embeddings", None)
    if known is None or not hasattr(tokenizer, "__len__"):
        return
    if len(tokenizer) > known or mask_token_id(tokenizer) >= known:
        raise ValueError(
            f"the model has {known} embeddings and the tokenizer {len(tokenizer)} tokens (MASK is "
            f"{mask_token_id(tokenizer)}); expected at least as many embeddings. The checkpoint is probably of another "
            "vocabulary, or tokens were added. Fix: load the tokenizer saved with the model, or build the model with "
            f"num_embeddings={len(tokenizer)}."
        )


def _targets(batch: Mapping[str, Any]) -> Tensor:
    targets = batch.get("target_ids")
    if targets is None:
        raise ValueError(
            f"the batch has no target_ids (it has {sorted(batch)}); expected the ids before hiding. It was probably "
            "made for prediction. Fix: use a training collator of spanwise.mlm."
        )
    found: Tensor = targets
    return found


def _real(batch: Mapping[str, Any]) -> Tensor:
    mask = batch.get("attention_mask")
    if mask is None or mask.ndim != 2:
        segments = batch.get("segment_ids")
        return torch.ones_like(batch["input_ids"], dtype=torch.bool) if segments is None else segments > 0
    real: Tensor = mask != 0
    return real


def _modelled(batch: Mapping[str, Any]) -> Tensor:
    """Real tokens that may be hidden: those that the bound is a likelihood of."""
    modelled = _real(batch) & (_targets(batch) != IGNORE_INDEX)
    fixed = batch.get("fixed_positions_mask")
    return modelled if fixed is None else modelled & ~fixed


def _sample_mask(batch: Mapping[str, Any]) -> Tensor:
    given = batch.get("sample_mask")
    rows = batch["input_ids"]
    return torch.ones(len(rows), device=rows.device) if given is None else given.to(rows.device).float()
