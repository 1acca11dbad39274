"""S, the teacher tokens that P-KL compares: the ``k`` that are most important anywhere in the document.

Importance is the largest log-probability, at the loss's temperature, over the teacher positions of the document's
valid chunks; ties go to the lowest id. Picking S where the teacher runs and sending only its columns
(:func:`share_scores`) cuts the payload by Vt/k with identical values. O(rows·Vt) time, O(tile·Vt) memory.

Shapes: B rows, T teacher length, N rows read, k size of S, D documents.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from spanwise.teachers.scores import Missing, TeacherScores
from spanwise.teachers.softmax import safe_log_softmax, tempered
from spanwise.teachers.teacher import SharedPick
from spanwise.xtoken.losses.plan import ChunkPlan
from spanwise.xtoken.losses.rows import tile_rows

TopkScope = Literal["document", "microbatch"]
TopkRows = Literal["all", "all_but_last"]


def most_important(importance: Float[Tensor, " V"], k: int) -> Int64[Tensor, " k"]:
    """Ids of the ``k`` largest values, sorted; ties at the cut go to the lowest id.

    >>> most_important(torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0]), 3).tolist()
    [0, 1, 3]
    """
    if k >= len(importance):
        return torch.arange(len(importance), device=importance.device)
    cut = importance.topk(k).values[-1]
    above = importance > cut
    tied = (importance == cut).nonzero().squeeze(1)[: k - int(above.sum())]
    above[tied] = True
    return above.nonzero().squeeze(1)


def check_shared(scores: TeacherScores, documents: int, width: int) -> None:
    """Refuse shared-set scores of another batch or teacher."""
    if scores.shared_ids is None:
        return
    largest = int(scores.shared_ids.max()) if scores.shared_ids.numel() else -1
    if len(scores.shared_ids) < documents or largest >= width:
        raise ValueError(
            f"the teacher scores share sets of {len(scores.shared_ids)} documents with ids up to {largest:,}, and the "
            f"batch has {documents} documents and a teacher's side of {width:,} tokens; expected a set per document "
            "and ids below the side's size. They were probably picked for another batch, teacher or projection. Fix: "
            "share_scores(scores, plan, teacher_vocab_size=projection.teacher_vocab_size)."
        )


def set_of_document(
    scores: TeacherScores,
    rows: Int64[Tensor, " N"],
    document: int,
    width: int,
    k: int,
    temperature: float,
    missing: Missing = "tail_bucket",
) -> Int64[Tensor, " k"]:
    """S of one document, from its teacher rows; the one that shared-set scores came with, if they did."""
    if scores.shared_ids is not None:
        return scores.shared_ids[document].long()
    if not len(rows):  # a document without a valid chunk
        return torch.arange(k, device=rows.device)
    importance = torch.full((width,), -torch.inf, device=rows.device)
    for piece in rows.split(tile_rows(width, rows.device)):
        # At the temperature, which truncated scores are at: every form of a teacher picks the same S.
        each = scores.log_probabilities(piece, width, temperature, missing)
        importance = torch.maximum(importance, each.amax(0))
    if bool(importance.isnan().any()):
        raise ValueError(
            f"the teacher's scores of document {document} hold NaN or +inf; expected numbers or -inf. Its forward pass "
            "probably overflowed (float16), or its weights are damaged. Fix: load the teacher in bfloat16 or float32."
        )
    return most_important(importance, k)


def set_of_batch(scores: TeacherScores, width: int, k: int, rows: TopkRows) -> Int64[Tensor, " k"]:
    """One S for the micro-batch from raw logits of all positions (or all but each row's last), padding included."""
    if rows not in ("all", "all_but_last"):
        raise ValueError(
            f"topk_rows={rows!r} says which positions vote for the shared set; expected 'all' or 'all_but_last'. It is "
            "probably misspelt. Fix: pass one of the two."
        )
    if scores.logits is None:
        raise ValueError(
            f"topk_scope='microbatch' was asked of {scores.form} teacher scores; expected dense logits, since it "
            "votes with raw logits. The teacher was probably cached or served. Fix: use topk_scope='document'."
        )
    voting = scores.logits[:, :-1, :width] if rows == "all_but_last" else scores.logits[..., :width]
    if not voting.shape[0] * voting.shape[1]:
        return torch.arange(k, device=voting.device)
    return most_important(voting.amax((0, 1)).float(), k)


def rows_in_set(
    scores: TeacherScores,
    rows: Int64[Tensor, " N"],
    ids: Int64[Tensor, " k"],
    width: int,
    temperature: float,
    missing: Missing,
) -> Float[Tensor, "N k"]:
    """Log-probabilities renormalised inside S at some teacher rows; a row without any mass in S is all -inf."""
    if scores.logits is not None:
        picked = scores.columns_at(rows, ids)
    elif scores.columns is not None:
        length = scores.shape[1]
        picked = scores.columns[rows // length, rows % length]
        picked = picked.to(torch.promote_types(picked.dtype, torch.float32))
    else:
        # Already at the temperature.
        return safe_log_softmax(scores.log_probabilities(rows, width, temperature, missing).index_select(1, ids))
    return safe_log_softmax(tempered(picked, temperature))


def share_scores(
    scores: TeacherScores,
    plan: ChunkPlan,
    *,
    teacher_vocab_size: int,
    vocab_topk: int = 8192,
    temperature: float = 1.0,
) -> TeacherScores:
    """What a teacher sends for P-KL: S per document and its columns; the loss on them equals the loss on ``scores``.

    Args:
        scores: dense.
        plan: the valid chunks, which came with the request.
        teacher_vocab_size: a wider head is cut.
        vocab_topk: size of S.
        temperature: the loss's.
    """
    pick = pick_of_plan(plan, vocab_topk)
    return share_picked(scores, pick, teacher_vocab_size=teacher_vocab_size, temperature=temperature)


def pick_of_plan(plan: ChunkPlan, vocab_topk: int = 8192) -> SharedPick:
    """What P-KL reads of a teacher, without what the student knows."""
    return SharedPick(plan.teacher.rows, plan.document[plan.teacher.chunk], plan.documents, vocab_topk)


def share_picked(
    scores: TeacherScores, pick: SharedPick, *, teacher_vocab_size: int, temperature: float = 1.0
) -> TeacherScores:
    """:func:`share_scores` where the plan is elsewhere: a teacher's process knows the pick alone."""
    k = min(pick.k, teacher_vocab_size)
    ids = [
        set_of_document(scores, pick.rows[pick.owner == document], document, teacher_vocab_size, k, temperature)
        for document in range(pick.documents)
    ]
    stacked = torch.stack(ids) if ids else torch.zeros(0, k, dtype=torch.long, device=scores.device)
    position: Int[Tensor, "B T"] = torch.full(scores.shape, -1, dtype=torch.long, device=scores.device)
    position.view(-1)[pick.rows] = pick.owner
    return scores.share(stacked, position, temperature=temperature)
