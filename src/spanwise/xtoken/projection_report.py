"""What a projection holds, and how well it fits two tokenizers, as plain data for the command line. O(Vs·K)."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from spanwise.spans.table import TokenTable, token_table
from spanwise.xtoken.projection import Projection
from spanwise.xtoken.projection_build import build_projection
from spanwise.xtoken.projection_file import load_projection

SHOWN = 10


def describe(projection: Projection, path: str | os.PathLike[str]) -> dict[str, Any]:
    """``rows``, ``exact`` rows, ``entries``, ``path``, and the metadata of a built projection."""
    return {
        "rows": projection.student_vocab_size,
        "exact": len(projection.exact_rows()),
        "entries": int((projection.indices >= 0).sum()),
        "path": str(path),
        "metadata": dict(projection.metadata),
    }


def build_and_save(student: Any, teacher: Any, path: str | os.PathLike[str], *, top_k: int = 8) -> dict[str, Any]:
    """Build a projection from two tokenizers, write it, say on standard error what is going on, describe it."""

    def progress(words: str) -> None:
        sys.stderr.write(f"{words}\n")

    projection = build_projection(student, teacher, top_k=top_k, progress=progress)
    projection.save(path)
    return describe(projection, path)


def check_projection(path: str | os.PathLike[str], student: Any, teacher: Any) -> dict[str, Any]:
    """How a projection file fits two tokenizers; refused if it was built for others.

    Returns:
        ``ok`` (every pair of byte-equal tokens is an exact row), ``coverage`` (share of the student's ordinary tokens
        with an entry), ``exact_share`` (share with an exact row), ``worst`` (the rows that resemble their token least,
        with examples) and ``missed`` (byte-equal tokens without an exact row).
    """
    projection = load_projection(path, student=student, teacher=teacher)
    near, far = token_table(student), token_table(teacher)
    if projection.student_vocab_size < near.size or projection.teacher_vocab_size > far.size:
        raise ValueError(
            f"the projection '{path}' is {projection.student_vocab_size:,} × {projection.teacher_vocab_size:,} and "
            f"the tokenizers have {near.size:,} and {far.size:,} tokens; expected all student rows and no teacher id "
            f"beyond. It was built for other tokenizers. Rebuild it: spanwise project build STUDENT TEACHER -o {path}"
        )
    ordinary = near.known & ~near.special & (near.lengths > 0)
    filled = (projection.indices[: near.size] >= 0).any(-1)
    exact = torch.zeros(projection.student_vocab_size, dtype=torch.bool)
    exact[projection.exact_rows()] = True
    usable = (far.known & ~far.special).tolist()
    by_bytes = {far.bytes_of(j) for j in range(far.size) if usable[j]}
    missed = [i for i in (ordinary & ~exact[: near.size]).nonzero().squeeze(1).tolist() if near.bytes_of(i) in by_bytes]
    total = max(1, int(ordinary.sum()))
    return {
        "ok": not missed,
        "coverage": int((ordinary & filled).sum()) / total,
        "exact_share": int((ordinary & exact[: near.size]).sum()) / total,
        "worst": _worst(projection, near, far, ordinary & ~exact[: near.size]),
        "missed": len(missed),
    }


def _worst(projection: Projection, near: TokenTable, far: TokenTable, candidates: torch.Tensor) -> list[dict[str, Any]]:
    """Rows whose heaviest teacher token shares the shortest beginning with the student's token."""
    scored: list[tuple[float, int]] = []
    for i in candidates.nonzero().squeeze(1).tolist():
        token = near.bytes_of(i)
        best = int(projection.indices[i, int(projection.likelihoods[i].argmax())])
        target = far.bytes_of(best) if best >= 0 else b""
        scored.append((_common_beginning(token, target) / max(1, len(token)), i))
    scored.sort()
    return [
        {
            "token": i,
            "text": near.bytes_of(i).decode("utf-8", "replace"),
            "share": round(share, 3),
            "teacher": [
                {"token": j, "text": far.bytes_of(j).decode("utf-8", "replace"), "weight": round(weight, 4)}
                for j, weight in zip(projection.indices[i].tolist(), projection.likelihoods[i].tolist(), strict=True)
                if j >= 0
            ],
        }
        for share, i in scored[:SHOWN]
    ]


def _common_beginning(one: bytes, other: bytes) -> int:
    """How many first bytes are equal."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
