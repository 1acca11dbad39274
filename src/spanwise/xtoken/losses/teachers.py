"""Several teachers: how much each of them says about each document.

Everything is decided per document, so that nothing depends on which documents share a micro-batch. Weights never touch
a count: a teacher's plan keeps its count and gets its documents' parts multiplied (``plan.of_document(weights)``).

- ``sum``: static weights, or softmax(α · score) over teachers, where the score is the teacher's negative cross
  entropy **per byte** (comparable across tokenizers), its negative entropy, or its largest probability, on its own
  tokens;
- ``select_teacher``: the lowest cross entropy per byte takes the document alone, ties to the first teacher;
- ``averaged_logits``: one teacher made of several with the same tokenizer.

O(B·T) beyond the scores.

Shapes: B rows, T teacher length, V vocabulary, D documents, n teachers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.loss_parts import LossParts, Ratio
from spanwise.teachers.scores import TeacherScores
from spanwise.xtoken.losses.checks import check_scores
from spanwise.xtoken.losses.plan import TokenPlan

Score = Literal["cross_entropy", "entropy", "max_probability"]


def document_scores(
    scores: TeacherScores,
    plan: TokenPlan,
    input_ids: Int[Tensor, "B T"],
    document_bytes: Float[Tensor, " D"] | Int[Tensor, " D"],
    *,
    score: Score = "cross_entropy",
) -> Float[Tensor, " D"]:
    """How sure one teacher is of each document, higher is better; -inf for a document without tokens.

    Args:
        scores: with the statistics that ``score`` needs (``TeacherScores.with_statistics``), or dense.
        plan: the teacher's own tokens: ``plan_tokens(teacher_input_ids, teacher_token_mask, …)``.
        input_ids: the teacher's tokens.
        document_bytes: UTF-8 bytes of every document, for the cross entropy.
        score: ``"cross_entropy"`` (negative, per byte), ``"entropy"`` (negative mean) or ``"max_probability"`` (mean).
    """
    if score not in ("cross_entropy", "entropy", "max_probability"):
        raise ValueError(
            f"score={score!r} says how teachers are weighed; expected 'cross_entropy', 'entropy' or "
            "'max_probability'. It is probably misspelt. Fix: pass one of the three."
        )
    check_scores(scores, *plan.shape)
    if len(document_bytes) != plan.documents:
        raise ValueError(
            f"document_bytes counts {len(document_bytes)} documents and the teacher's plan {plan.documents}; expected "
            "as many. They probably belong to another batch. Fix: pass the bytes of each document of this one."
        )
    if score == "cross_entropy":
        each, sign = scores.observed(input_ids), 1.0
    else:
        if scores.entropy is None or scores.max_probability is None:
            scores = scores.with_statistics(input_ids)
        statistic = scores.entropy if score == "entropy" else scores.max_probability
        each, sign = _known(statistic), -1.0 if score == "entropy" else 1.0
    picked = each.reshape(-1)[plan.rows].double()
    zero = torch.zeros(plan.documents, dtype=torch.float64, device=picked.device)
    sums = zero.index_add(0, plan.document, picked)
    tokens = zero.index_add(0, plan.document, torch.ones_like(picked))
    per = document_bytes.to(zero) if score == "cross_entropy" else tokens
    return torch.where(tokens > 0, sign * sums / per.clamp(min=1), -torch.inf).float()


def dynamic_weights(teacher_scores: Sequence[Float[Tensor, " D"]], *, alpha: float = 1.0) -> list[Float[Tensor, " D"]]:
    """softmax(α · score) over teachers, per document; equal weights where no teacher has a score.

    >>> [w.tolist() for w in dynamic_weights([torch.tensor([0.0]), torch.tensor([0.0])])]
    [[0.5], [0.5]]
    """
    stacked = _stacked(teacher_scores)
    without = stacked == -torch.inf
    # Multiplied first, -inf would be NaN at α = 0 and the best score at α < 0.
    scaled = (alpha * stacked.masked_fill(without, 0.0)).masked_fill(without & ~without.all(0), -torch.inf)
    return list(torch.softmax(scaled, 0).unbind(0))


def select_teacher(teacher_scores: Sequence[Float[Tensor, " D"]]) -> list[Float[Tensor, " D"]]:
    """Weight 1 for the teacher with the highest score of each document (ties: the first), 0 for the others.

    >>> [w.tolist() for w in select_teacher([torch.tensor([-2.0, -1.0]), torch.tensor([-1.0, -1.0])])]
    [[0.0, 1.0], [1.0, 0.0]]
    """
    stacked = _stacked(teacher_scores)
    best = (stacked == stacked.amax(0)).int().argmax(0)
    return [(best == teacher).float() for teacher in range(len(stacked))]


def vocabulary_factor(teacher_vocab_size: int) -> float:
    """1 / log Vt: what makes divergences over vocabularies of different sizes comparable. Multiply into the weight,
    once.
    """
    if teacher_vocab_size < 2:
        raise ValueError(
            f"the teacher's vocabulary has {teacher_vocab_size} tokens; expected at least 2, since log 1 = 0. The "
            "size was probably not known yet. Fix: pass len(teacher_tokenizer)."
        )
    return 1.0 / math.log(teacher_vocab_size)


def averaged_logits(
    teachers: Sequence[TeacherScores], weights: Sequence[float], fingerprints: Sequence[str]
) -> TeacherScores:
    """One teacher from several: the weighted mean of their logits.

    Args:
        teachers: dense scores of the same positions.
        weights: normalised to sum 1.
        fingerprints: of their tokenizers; all equal, or it is an error: ids of different vocabularies cannot be
            averaged.
    """
    if not teachers or len({len(teachers), len(weights), len(fingerprints)}) != 1 or not sum(weights) > 0:
        raise ValueError(
            f"averaged_logits was given {len(teachers)} teachers, {len(weights)} weights and {len(fingerprints)} "
            "fingerprints; expected as many of each, at least one, and weights with a positive sum. Fix: pass one of "
            "each per teacher."
        )
    if len(set(fingerprints)) > 1:
        raise ValueError(
            f"averaged_logits was given teachers of {len(set(fingerprints))} different tokenizers; expected one, "
            "since token 5 of one vocabulary is not token 5 of another. Fix: mode 'sum' gives each teacher its own "
            "loss."
        )
    logits = [_dense(teacher) for teacher in teachers]
    if len({tensor.shape[:2] for tensor in logits}) > 1:
        raise ValueError(
            f"averaged_logits was given logits of shapes {[tuple(tensor.shape) for tensor in logits]}; expected the "
            "same positions. The batches were probably padded differently. Fix: score one batch with all teachers."
        )
    width = min(tensor.shape[-1] for tensor in logits)
    compute = torch.promote_types(logits[0].dtype, torch.float32)
    mean = torch.zeros(*logits[0].shape[:2], width, dtype=compute, device=logits[0].device)
    for tensor, weight in zip(logits, weights, strict=True):
        mean.add_(tensor[..., :width].to(compute), alpha=weight / sum(weights))
    return TeacherScores(logits=mean)


def merge_teachers(parts: Mapping[str, LossParts]) -> tuple[Float[Tensor, ""], dict[str, Ratio]]:
    """Totals added, metrics named ``teacher/metric``: each stays a ratio of its own, none is summed over teachers.

    Args:
        parts: per teacher; each was already given its scale (weight / its global count).
    """
    unscaled = [name for name, part in parts.items() if part.scale is None]
    if unscaled or not parts:
        raise ValueError(
            f"the losses of {unscaled or 'no teacher'} were to be added as plain sums; expected totals with their "
            "scale, since each teacher has a count of its own. Fix: call every loss with scale=weight / global_count."
        )
    metrics = {f"{name}/{metric}": ratio for name, part in parts.items() for metric, ratio in part.metrics.items()}
    return torch.stack([part.total for part in parts.values()]).sum(), metrics


def _stacked(teacher_scores: Sequence[Tensor]) -> Tensor:
    if not teacher_scores or len({len(scores) for scores in teacher_scores}) > 1:
        raise ValueError(
            f"teachers were to be weighed by scores of {[len(scores) for scores in teacher_scores]} documents; "
            "expected at least one teacher and the same documents from each. Fix: document_scores(…) of every teacher "
            "on one batch."
        )
    return torch.stack(list(teacher_scores))


def _known(statistic: Tensor | None) -> Tensor:
    if statistic is None:
        raise ValueError(
            "the statistic is missing; expected scores.with_statistics(…) to fill it. Fix: pass dense scores."
        )
    return statistic


def _dense(scores: TeacherScores) -> Tensor:
    if scores.logits is None:
        raise ValueError(
            f"averaged_logits was given {scores.form} teacher scores; expected dense logits, since the means of "
            "truncated lists are not known. Fix: ask the teachers for logits, or use mode 'sum'."
        )
    return scores.logits
