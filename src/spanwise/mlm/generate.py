"""Texts from a checkpoint: continue prompts, fill gaps, or begin from nothing.

What the command line calls. Prompts of any length share a batch; the default order is most-confident-first, which gave
twice the exact matches of random order in our measurements. Cost: see :mod:`spanwise.mlm.predictor`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from spanwise.loading import load_tokenizer
from spanwise.mlm.backbones import load_masked_lm
from spanwise.mlm.history import HistoryInMemory
from spanwise.mlm.layout import Layout
from spanwise.mlm.predictor import MLMPredictor
from spanwise.mlm.special_tokens import special_ids

SAMPLERS: dict[str, dict[str, Any]] = {
    "top_prob": {"confidence": "top_prob"},
    "uniform": {},
    "margin": {"confidence": "prob_diff"},
    "entropy": {"confidence": "entropy"},
    "threshold": {"confidence": "top_prob", "threshold": 0.5},
    "factor": {"factor": 1.0},
    "ddpm_cache": {"ddpm_cache": True},
    "remasking": {"remasking": 0.1},
}


def generate(
    checkpoint: str | os.PathLike[str],
    *,
    prompts: Sequence[str] = (),
    infills: Sequence[str] = (),
    unconditional: int = 0,
    sampler: str = "top_prob",
    max_new_tokens: int = 32,
    steps: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
    history: HistoryInMemory | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Load a checkpoint and fill what is asked for.

    Args:
        checkpoint: a folder with model and tokenizer, or a hub name.
        prompts: texts to continue by ``max_new_tokens``.
        infills: texts that hold the tokenizer's mask token where something is missing.
        unconditional: how many texts of ``max_new_tokens`` to begin from nothing.
        sampler: a name in SAMPLERS.
        steps: the most forwards per text; None allows one per token.
        temperature: None is 0 (greedy) for infills and 1 else.
        history: is told of every step.
        options: more of :class:`MLMPredictor` (``top_k``, ``top_p``, ``block_size``, ``cache``).

    Returns:
        texts, steps (per text), forwards (for all), in the order prompts, infills, unconditional.
    """
    if sampler not in SAMPLERS:
        raise ValueError(
            f"sampler={sampler!r} was given; expected one of {', '.join(SAMPLERS)}. It is probably misspelt. "
            "Fix: --sampler top_prob."
        )
    tokenizer = load_tokenizer(checkpoint)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_masked_lm(checkpoint).to(device)
    layout = lay_requests(tokenizer, prompts, infills, unconditional, max_new_tokens)
    predictor = MLMPredictor(
        layout.ids.shape[1] if steps is None else steps,
        tokenizer=tokenizer,
        model=model,
        temperature=temperature if temperature is not None else (0.0 if infills else 1.0),
        history=history,
        **SAMPLERS[sampler],
        **options,
    )
    batch = {"input_ids": layout.ids.to(device), "attention_mask": layout.attended.to(device)}
    filled = predictor.predict(batch, seed=seed)
    return {"texts": filled["text"], "steps": filled["steps_taken"], "forwards": filled["forwards"]}


def lay_requests(
    tokenizer: Any, prompts: Sequence[str], infills: Sequence[str], unconditional: int, max_new_tokens: int
) -> Layout:
    """BOS, text with its masks, EOS: one row per request, padded on the right."""
    ends = {"add_bos": has_token(tokenizer, "bos", "cls"), "add_eos": has_token(tokenizer, "eos", "sep")}
    special = special_ids(tokenizer, **ends)
    new = [special.mask] * max_new_tokens
    bodies = [[*_ids(tokenizer, text), *new] for text in prompts]
    for text in infills:
        body = _ids(tokenizer, text)
        if special.mask not in body:
            raise ValueError(
                f"the text {text!r} has no gap; expected {tokenizer.mask_token!r} where something is missing. Another "
                f"sign was probably used. Fix: write {tokenizer.mask_token} for every missing token."
            )
        bodies.append(body)
    bodies += [new] * unconditional
    if not bodies:
        raise ValueError(
            "nothing was asked for; expected a prompt, a text with gaps, or a number of texts to begin from nothing. "
            "The option was probably left out. Fix: --prompt TEXT, --infill TEXT or --unconditional 1."
        )
    begin = [] if special.bos is None else [special.bos]
    end = [] if special.eos is None else [special.eos]
    rows = [[*begin, *body, *end] for body in bodies]
    layout = Layout.empty(len(rows), max(len(row) for row in rows), special.pad)
    for place, row in enumerate(rows):
        layout.put(place, 0, row, eligible=False)
    return layout


def has_token(tokenizer: Any, *names: str) -> bool:
    """Whether the tokenizer has one of these special tokens."""
    return any(getattr(tokenizer, f"{name}_token_id", None) is not None for name in names)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long).tolist()
