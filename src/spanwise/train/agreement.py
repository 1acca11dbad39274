"""How often a student and a teacher with another tokenizer hold the same token likeliest.

Compared where it can be compared exactly: at tokens that stand one-to-one in both tokenizations and cover the same
bytes. Agreement means that both models' likeliest tokens have the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch

from spanwise.spans.table import token_table
from spanwise.train.data import text_windows


@torch.no_grad()
def teacher_agreement(
    student: Any,
    student_tokenizer: Any,
    teacher: Any,
    teacher_tokenizer: Any,
    documents: Iterable[str],
    *,
    window_bytes: int = 2_048,
    batch_size: int = 8,
) -> float:
    """Share of comparable tokens at which both models' likeliest tokens have the same bytes; 0.0 where none are."""
    from spanwise.xtoken.aligner import TokenAligner

    aligner = TokenAligner(student_tokenizer, teacher_tokenizer)
    tables = token_table(student_tokenizer), token_table(teacher_tokenizer)
    windows = (window for text in documents for window in text_windows(text, window_bytes) if window.strip())
    same = compared = 0
    while texts := list(islice(windows, batch_size)):
        sides = [_tokenize(texts, tokenizer) for tokenizer in (student_tokenizer, teacher_tokenizer)]
        alignment = aligner.align(
            sides[0][0],
            sides[1][0],
            student_attention_mask=sides[0][1],
            teacher_attention_mask=sides[1][1],
            texts=texts,
        )
        guesses = [
            _likeliest(model, *side, len(tokenizer))
            for model, side, tokenizer in zip(
                (student, teacher), sides, (student_tokenizer, teacher_tokenizer), strict=True
            )
        ]
        for row in range(len(texts)):
            left = alignment.student_exact_partition_mask[row].nonzero().squeeze(1)
            right = alignment.teacher_exact_partition_mask[row].nonzero().squeeze(1)
            for i, j in zip(left.tolist(), right.tolist(), strict=True):
                if i and j:
                    compared += 1
                    ours = tables[0].bytes_of(int(guesses[0][row, i - 1]))
                    same += ours == tables[1].bytes_of(int(guesses[1][row, j - 1]))
    return same / compared if compared else 0.0


def _tokenize(texts: list[str], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
        mask[place, : len(row)] = 1
    return ids, mask


def _likeliest(model: Any, ids: torch.Tensor, mask: torch.Tensor, size: int) -> torch.Tensor:
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        logits = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
    finally:
        model.train(was_training)
    return logits[..., :size].argmax(-1).cpu()
