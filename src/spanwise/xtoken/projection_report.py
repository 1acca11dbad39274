"""What a projection holds, and how well it fits two tokenizers, as plain data for the command line. O(Vs·K)."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from spanwise.spans.table import TokenTable, token_table
from spanwise.xtoken.projection import Projection
from spanwise.xtoken.projection_build import build_projection
from spanwise.xtoken.projection_file import check_target, load_projection

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

    check_target(path)
    projection = build_projection(student, teacher, top_k=top_k, progress=progress)
    projection.save(path)
    return describe(projection, path)


def check_projection(path: str | os.PathLike[str], student: Any, teacher: Any) -> dict[str, Any]:
    """How a projection file fits two tokenizers; refused if it was built for others.

    Returns:
        ``ok`` (every pair of byte-equal tokens is an exact row), ``coverage`` (share of the student's ordinary tokens
        with an entry), ``exact_share`` (share with an exact row), ``missed`` (byte-equal tokens without an exact row),
        ``coverage_table`` (how many tokens of each kind are covered in which way) and ``worst`` (the rows that resemble
        their token least, with examples).
    """
    projection = load_projection(path, student=student, teacher=teacher)
    near, far = token_table(student), token_table(teacher)
    ordinary = near.known & ~near.special & (near.lengths > 0)
    filled = (projection.indices[: near.size] >= 0).any(-1)
    exact = torch.zeros(projection.student_vocab_size, dtype=torch.bool)
    exact[projection.exact_rows()] = True
    usable = (far.known & ~far.special).tolist()
    by_bytes = {far.bytes_of(j) for j in range(far.size) if usable[j]}
    missed = [i for i in (ordinary & ~exact[: near.size]).nonzero().squeeze(1).tolist() if near.bytes_of(i) in by_bytes]
    total = max(1, int(ordinary.sum()))
    exact = exact[: near.size]
    return {
        "ok": not missed,
        "coverage": int((ordinary & filled).sum()) / total,
        "exact_share": int((ordinary & exact).sum()) / total,
        "missed": len(missed),
        "coverage_table": _table(near, ordinary, exact, (projection.indices[: near.size] >= 0).sum(-1)),
        "worst": _worst(projection, near, far, ordinary & ~exact),
    }


def _table(
    near: TokenTable, ordinary: torch.Tensor, exact: torch.Tensor, entries: torch.Tensor
) -> list[dict[str, Any]]:
    """Tokens by how they are covered, each with its share of the kind (ordinary or special)."""
    out: list[dict[str, Any]] = []
    special = near.special
    for kind, among, words in (
        ("ordinary", ordinary, ("one teacher token of equal bytes", "one other teacher token")),
        ("special", special, ("one of equal role or name", "one other teacher token")),
    ):
        ways = {
            words[0]: exact,
            words[1]: ~exact & (entries == 1),
            "2 teacher tokens": entries == 2,
            "3 or more": entries >= 3,
            "none": entries == 0,
        }
        counted = {way: int((among & which).sum()) for way, which in ways.items()}
        total = sum(counted.values())
        out += [
            {"student tokens": kind, "covered by": way, "tokens": count, "share": count / total}
            for way, count in counted.items()
            if count
        ]
    return out


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
