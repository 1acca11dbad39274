"""What a model says about text, in units that compare: nats per token, bits per byte, and the judgement of another.

The bound averages the weighted loss over draws of noise; with exact counts and stratified times its spread is about a
third of independent masking. Generative perplexity alone rewards repetition, so it never comes without the entropy of
the sampled tokens. O(draws · one forward over the rows).

Shapes: rows are plain dictionaries; ids [B, S].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spanwise.mlm.collators import DefaultMLMCollator
from spanwise.mlm.evaluating import evaluating
from spanwise.mlm.layout import Layout
from spanwise.mlm.loss import MLMLoss


@dataclass(frozen=True)
class LikelihoodBound:
    """An estimate of the negative evidence lower bound.

    Attributes:
        nats: summed over the rows, averaged over the draws.
        tokens: how many tokens the nats are for.
    """

    nats: float
    tokens: float | int

    @property
    def nats_per_token(self) -> float:
        """0.0 where there are no tokens."""
        return self.nats / self.tokens if self.tokens else 0.0

    def bits_per_byte(self, texts: Sequence[str]) -> float:
        """Over the UTF-8 bytes of the texts that the rows were made from.

        >>> LikelihoodBound(nats=math.log(2) * 6, tokens=2).bits_per_byte(["äöü"])
        1.0
        """
        size = sum(len(text.encode()) for text in texts)
        return self.nats / math.log(2) / size if size else 0.0


class LikelihoodCollator(DefaultMLMCollator):
    """Rows for :func:`nelbo`: exact counts, stratified times, BOS and EOS given and not scored."""

    def __init__(self, tokenizer: Any, *, add_bos: bool, add_eos: bool, seed: int = 0) -> None:
        super().__init__(
            tokenizer,
            None,
            loss_on_padding=False,
            truncate=None,
            add_bos=add_bos,
            add_eos=add_eos,
            masking="exact",
            t_sampling="stratified",
            seed=seed,
        )

    def lay(self, sequences: list[list[int]]) -> Layout:
        """The rows as they are, their ends fixed."""
        layout = super().lay(sequences)
        layout.fixed = torch.zeros_like(layout.attended)
        for row, tokens in enumerate(sequences):
            if self.special.bos is not None:
                layout.fixed[row, 0] = True
            if self.special.eos is not None:
                layout.fixed[row, len(tokens) - 1] = True
        layout.eligible &= ~layout.fixed
        return layout


def nelbo(
    model: Any,
    tokenizer: Any,
    collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    *,
    draws: int = 8,
    batch_size: int = 32,
) -> LikelihoodBound:
    """Estimate -log p(rows) from above.

    Args:
        model: anything :class:`MLMLoss` takes; evaluated without dropout.
        collator: a training collator; best with ``masking="exact", t_sampling="stratified"``.
        rows: what the collator takes. ``epoch`` and ``position`` are set here, so the estimate is deterministic and
            does not depend on ``batch_size``.
        draws: how often every row is hidden anew, at least once.
    """
    if draws < 1 or batch_size < 1:
        raise ValueError(
            f"draws={draws} and batch_size={batch_size} were given; expected at least 1 of each, since the bound is a "
            "mean over draws. 0 was probably meant as the default. Fix: leave them out."
        )
    loss = MLMLoss(model=model, tokenizer=tokenizer, weighting="nelbo")
    nats, tokens = 0.0, 0.0
    with evaluating(model):
        for start in range(0, len(rows) * draws, batch_size):
            places = range(start, min(start + batch_size, len(rows) * draws))
            # One row's draws follow one another, so that stratified times spread over its own noise levels.
            drawn = [{**rows[place // draws], "epoch": 0, "position": place} for place in places]
            parts = loss.parts(_on_device(collator(drawn), model))
            nats, tokens = nats + float(parts.total), tokens + float(parts.count)
    return LikelihoodBound(nats / draws, tokens / draws)


@dataclass(frozen=True)
class GenerativePerplexity:
    """How likely another model finds samples, and how varied they are.

    Attributes:
        perplexity: exp of the mean negative log-likelihood per token of the judge.
        token_entropy: mean over samples of the entropy of their token frequencies, in nats; low means repetition.
        tokens: how many tokens were judged.
    """

    perplexity: float
    token_entropy: float
    tokens: int


def generative_perplexity(
    texts: Sequence[str], judge: Any, judge_tokenizer: Any, *, batch_size: int = 8
) -> GenerativePerplexity:
    """Let a causal transformers model judge ``texts``; every token after a start token (BOS, else EOS) is scored.

    The perplexity is infinite where it is beyond what a float holds, and 1.0 where there is no token to judge.
    """
    start = judge_tokenizer.bos_token_id
    start = judge_tokenizer.eos_token_id if start is None else start
    if start is None:
        raise ValueError(
            "the judge's tokenizer has neither BOS nor EOS; expected one to begin a text with. It is probably not the "
            "tokenizer of a causal model. Fix: set judge_tokenizer.bos_token."
        )
    rows = [[start, *judge_tokenizer(text, add_special_tokens=False)["input_ids"]] for text in texts]
    total, count = 0.0, 0
    device = next(judge.parameters()).device
    with evaluating(judge):
        for begin in range(0, len(rows), batch_size):
            batch = rows[begin : begin + batch_size]
            ids = torch.full((len(batch), max(map(len, batch))), start, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, tokens in enumerate(batch):
                ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
            ids, mask = ids.to(device), mask.to(device)
            logits = judge(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
            scores = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            total -= float((scores * mask[:, 1:]).sum())
            count += int(mask[:, 1:].sum())
    entropies = [_entropy(tokens[1:]) for tokens in rows]
    mean_entropy = sum(entropies) / len(entropies) if entropies else 0.0
    perplexity = float(torch.tensor(total / max(1, count), dtype=torch.float64).exp())
    return GenerativePerplexity(perplexity, mean_entropy, count)


def _entropy(tokens: Sequence[int]) -> float:
    return sum((n / len(tokens) * math.log(len(tokens) / n) for n in Counter(tokens).values()), 0.0)


def _on_device(batch: Mapping[str, Any], model: Any) -> dict[str, Any]:
    parameter = next(iter(model.parameters()), None) if hasattr(model, "parameters") else None
    if parameter is None:
        return dict(batch)
    return {key: value.to(parameter.device) if isinstance(value, Tensor) else value for key, value in batch.items()}
