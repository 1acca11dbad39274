"""Toy tokenizers over bytes, and alignments of what they make, small enough to enumerate."""

from __future__ import annotations

import torch

from spanwise.xtoken.alignment import AlignmentBatch


def greedy(vocabulary: list[bytes], text: bytes) -> list[int]:
    """Longest match first."""
    ids, at = [], 0
    while at < len(text):
        fitting = [i for i, token in enumerate(vocabulary) if token and text.startswith(token, at)]
        best = max(fitting, key=lambda i: (len(vocabulary[i]), -i))
        ids.append(best)
        at += len(vocabulary[best])
    return ids


def ends(vocabulary: list[bytes], ids: list[int]) -> list[int]:
    """Where each token ends; tokens without bytes end where the one before does."""
    out, at = [], 0
    for token in ids:
        at += len(vocabulary[token])
        out.append(at)
    return out


def chunk_ids(student_ends: list[int], teacher_ends: list[int]) -> tuple[list[int], list[int], int]:
    """Chunks between common boundaries; both sides must end at the same byte."""
    common = sorted(set(student_ends) & set(teacher_ends))
    assert student_ends[-1] == teacher_ends[-1]
    place = {end: next(c for c, b in enumerate(common) if end <= b) for end in [*student_ends, *teacher_ends]}
    return [place[e] for e in student_ends], [place[e] for e in teacher_ends], len(common)


def pad(rows: list[list[int]], value: int) -> torch.Tensor:
    width = max([len(row) for row in rows] + [1])
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def align(
    student: list[bytes], teacher: list[bytes], student_rows: list[list[int]], teacher_rows: list[list[int]],
    *, bos: int = 1, eos: bool = False,
) -> AlignmentBatch:  # fmt: skip
    """Align rows that start with ``bos`` tokens without bytes and may end with one."""
    chunks_s, chunks_t, end_s, end_t, counts = [], [], [], [], []
    for ids_s, ids_t in zip(student_rows, teacher_rows, strict=True):
        last = 1 if eos else 0
        body_s, body_t = ids_s[bos : len(ids_s) - last], ids_t[bos : len(ids_t) - last]
        e_s, e_t = ends(student, body_s), ends(teacher, body_t)
        c_s, c_t, n = chunk_ids(e_s, e_t)
        chunks_s.append([-1] * bos + c_s + [n] * last)
        chunks_t.append([-1] * bos + c_t + [n] * last)
        end_s.append([0] * bos + e_s + [e_s[-1]] * last)
        end_t.append([0] * bos + e_t + [e_t[-1]] * last)
        counts.append(n + last)
    pairs = max(counts)
    valid = torch.arange(pairs)[None] < torch.tensor(counts)[:, None]
    s, t = pad(chunks_s, -1), pad(chunks_t, -1)
    return AlignmentBatch(
        valid, valid.clone(), torch.zeros_like(s, dtype=torch.bool), torch.zeros_like(t, dtype=torch.bool), s, t,
        torch.tensor(counts), None, pad(end_s, -1).int(), pad(end_t, -1).int(),
    )  # fmt: skip
