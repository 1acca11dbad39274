"""How good a masked model is: the likelihood bound in nats per token and bits per byte, and gaps filled rightly.

Texts are cut into rows of context_length tokens, every token in exactly one; BOS and EOS around a row are given, not
scored. O(draws · forwards over the text).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spanwise.loading import load_tokenizer
from spanwise.loss_parts import Ratio
from spanwise.mlm import MLMInfillWithExactTargetPredCollator, MLMPredictor, exact_match, load_masked_lm, token_accuracy
from spanwise.mlm.generate import has_token
from spanwise.mlm.likelihood import LikelihoodCollator, nelbo
from spanwise.mlm.sudoku import SUDOKU, puzzle_rows, sudoku_puzzles
from spanwise.train.held_out import documents as held_out_documents

DEFAULT_CONTEXT = 256


def is_masked_checkpoint(source: str) -> bool:
    """Whether a folder holds a masked model: by its architecture, or by the recipe it was trained with."""
    config, recipe = Path(source) / "config.json", Path(source) / "recipe.yaml"
    if recipe.is_file() and "task: mlm" in recipe.read_text(encoding="utf-8").splitlines():
        return True
    if not config.is_file():
        return False
    return any(name.endswith("ForMaskedLM") for name in json.loads(config.read_text()).get("architectures") or [])


def evaluate_masked(
    checkpoint: str,
    *,
    data: str,
    columns: Mapping[str, str],
    tokenizer_source: str | None = None,
    documents: int | None = None,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Measure a masked checkpoint on held-out text, or on sudoku puzzles (``builtin:sudoku:eval``)."""
    tokenizer = load_tokenizer(tokenizer_source or checkpoint)
    model = load_masked_lm(checkpoint).to("cuda" if torch.cuda.is_available() else "cpu")
    if data == f"{SUDOKU}:eval":
        return measure_prompts(model, tokenizer, puzzle_rows(sudoku_puzzles(documents or 256)))
    texts = list(held_out_documents(data, columns=columns, most=documents))
    context = min(getattr(model, "max_length", None) or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    return measure_texts(model, tokenizer, texts, context_length=context, batch_size=batch_size)


def measure_texts(
    model: Any, tokenizer: Any, texts: Sequence[str], *, context_length: int, draws: int = 4, batch_size: int = 8
) -> dict[str, float]:
    """nelbo_nats_per_token, bits_per_byte, and how well hidden tokens are guessed in one greedy forward."""
    ends = {"add_bos": has_token(tokenizer, "bos", "cls"), "add_eos": has_token(tokenizer, "eos", "sep")}
    collator = LikelihoodCollator(tokenizer, **ends)
    room = context_length - sum(ends.values())
    rows = [
        {"input_ids": ids[start : start + room]}
        for ids in (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        for start in range(0, len(ids), room)
    ]
    if not rows:
        raise ValueError(
            f"the held-out text has {len(texts)} documents and no token; expected text to measure on. The file is "
            "probably empty or its text under another column. Fix: check data.eval and data.columns."
        )
    bound = nelbo(model, tokenizer, collator, rows, draws=draws, batch_size=batch_size)
    predictor = MLMPredictor(1, tokenizer=tokenizer, model=model, temperature=0)
    matched, right = Ratio(0.0, 0.0), Ratio(0.0, 0.0)
    for start in range(0, len(rows), batch_size):
        placed = enumerate(rows[start : start + batch_size], start)
        batch = collator([{**row, "epoch": 0, "position": place} for place, row in placed])
        one_matched, one_right = _filled(predictor, batch, model)
        matched, right = matched + one_matched, right + one_right
    return {
        "nelbo_nats_per_token": bound.nats_per_token,
        "bits_per_byte": bound.bits_per_byte(texts),
        "exact_match": matched.value,
        "token_accuracy": right.value,
    }


def measure_prompts(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    *,
    steps: int | None = None,
    confidence: str | None = "top_prob",
) -> dict[str, float]:
    """The bound of whole rows, and exact match and token accuracy of their gaps, filled greedily."""
    ends = {"add_bos": False, "add_eos": False}
    collator = MLMInfillWithExactTargetPredCollator(tokenizer, None, loss_on_padding=False, **ends)
    batch = collator(list(rows))
    width = batch["input_ids"].shape[1]
    predictor = MLMPredictor(steps or width, tokenizer=tokenizer, model=model, temperature=0, confidence=confidence)
    matched, right = _filled(predictor, batch, model)
    whole = LikelihoodCollator(tokenizer, **ends)
    bound = nelbo(model, tokenizer, whole, [{"input_ids": row["input_ids"]} for row in rows], draws=4, batch_size=256)
    return {
        "nelbo_nats_per_token": bound.nats_per_token,
        "exact_match": matched.value,
        "token_accuracy": right.value,
    }


def _filled(predictor: MLMPredictor, batch: Mapping[str, Any], model: Any) -> tuple[Ratio, Ratio]:
    device = next(model.parameters()).device
    moved = {name: value.to(device) for name, value in batch.items() if isinstance(value, Tensor)}
    targets, hidden = moved["target_ids"], torch.eq(moved["input_ids"], predictor.tokenizer.mask_token_id)
    ids = predictor.predict(moved)["ids"]
    return exact_match(ids, targets), token_accuracy(ids, targets, hidden)
