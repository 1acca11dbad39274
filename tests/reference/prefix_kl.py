"""Prefix KL, one position at a time, in Python and float64: the twin of spanwise.xtoken.losses.prefix."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def longest_prefix(vocabulary: list[bytes], text: bytes) -> int:
    """The longest token that ``text`` begins with (lowest id of equals), or -1."""
    fitting = [i for i, token in enumerate(vocabulary) if token and text.startswith(token)]
    return min(fitting, key=lambda i: (-len(vocabulary[i]), i), default=-1)


def distribution(
    student: list[bytes],
    teacher: list[bytes],
    student_ids: list[int],
    teacher_ids: list[int],
    teacher_logp: Tensor,
    position: int,
    special_pairs: dict[int, int],
    listed: list[set[int]] | None = None,
    missing: str = "tail_bucket",
) -> tuple[dict[int, float], float, float] | None:
    """(mass per student token, tail, kept mass) for the token at ``position``, from dense teacher log-probabilities
    [T, Vt].

    ``listed`` names the tokens whose probabilities are known at each teacher position, None for all. What is not known
    goes to the tail at common boundaries, or nowhere (``missing="renormalise"``); inside a teacher token nowhere.
    """

    def spans(vocabulary: list[bytes], ids: list[int]) -> list[tuple[int, int]]:
        out, at = [], 0
        for token in ids:
            out.append((at, at + len(vocabulary[token])))
            at += len(vocabulary[token])
        return out

    begin, end = spans(student, student_ids)[position]
    covering = spans(teacher, teacher_ids)
    target = student_ids[position]
    if not student[target]:
        j = len(teacher_ids) - 1
        if special_pairs.get(teacher_ids[j]) != target:
            return None
        passed = b""
    else:
        found = [k for k, (b, e) in enumerate(covering) if b <= begin < e]
        if not found or found[0] == 0:
            return None
        j = found[0]
        passed = teacher[teacher_ids[j]][: begin - covering[j][0]]

    def known(row: int) -> list[int]:
        return [i for i in range(len(teacher)) if listed is None or i in listed[row]]

    p = teacher_logp[j - 1].double().exp().tolist()
    extends = [
        i for i in known(j - 1) if not passed or (teacher[i].startswith(passed) and len(teacher[i]) > len(passed))
    ]
    unknown = 1 - sum(p[i] for i in known(j - 1)) if listed and not passed and missing == "tail_bucket" else 0.0
    kept = sum(p[i] for i in extends) + unknown
    mass: dict[int, float] = {}
    tail = unknown / kept if kept else 0.0
    chain_needed = bool(student[target]) and covering[j][1] < end
    for i in extends:
        share = p[i] / kept if kept else 0.0
        if chain_needed and i == teacher_ids[j]:
            chain, k = share, j + 1
            while covering[k][1] < end:
                chain *= math.exp(float(teacher_logp[k - 1, teacher_ids[k]].double()))
                k += 1
            remains = student[target][covering[k][0] - begin :]
            chain *= sum(
                math.exp(float(teacher_logp[k - 1, v].double())) for v in known(k - 1) if teacher[v].startswith(remains)
            )
            mass[target] = mass.get(target, 0.0) + chain
            tail += share - chain
            continue
        if not teacher[i]:
            receiver = special_pairs.get(i, -1)
        else:
            receiver = longest_prefix(student, teacher[i][len(passed) :])
        if receiver < 0:
            tail += share
        else:
            mass[receiver] = mass.get(receiver, 0.0) + share
    return mass, tail, kept


def divergence(
    logits: Tensor, mass: dict[int, float], tail: float, keep: int, temperature: float, reverse: bool
) -> Tensor:
    """KL of the ``keep`` heaviest ids and one tail bucket; differentiable in ``logits`` [V]."""
    logp = torch.log_softmax(logits.double() / temperature, -1)
    heavy = sorted(((m, i) for i, m in mass.items() if m > 0), key=lambda pair: (-pair[0], pair[1]))
    kept = [i for _, i in heavy[:keep]]
    rest = tail + sum(m for m, _ in heavy[keep:])
    others = sorted(set(range(len(logits))) - set(kept))
    student_tail = torch.logsumexp(logp[others], -1) if others else torch.tensor(-1e4, dtype=torch.float64)
    pairs = [(torch.tensor(mass[i], dtype=torch.float64), logp[i]) for i in kept]
    pairs.append((torch.tensor(max(rest, 0.0), dtype=torch.float64), student_tail))
    total = torch.zeros((), dtype=torch.float64)
    for q, s in pairs:
        if reverse:
            total = total + s.exp() * (s - q.clamp(min=1e-10).log())
        else:
            total = total + torch.xlogy(q, q) - q * s
    return total
