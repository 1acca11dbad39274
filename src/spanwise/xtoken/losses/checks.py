"""What every loss checks about its arguments. O(1)."""

from __future__ import annotations

import math

from torch import Tensor

from spanwise.teachers.scores import TeacherScores
from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.losses.plan import ChunkPlan, plan_chunks
from spanwise.xtoken.projection import Entries, Projection


def check_temperature(temperature: float) -> None:
    """Refuse what is not a positive finite number."""
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"the temperature is {temperature}; expected a positive finite number. It was probably set to 0 to switch "
            "it off. Fix: 1.0 leaves the distributions as they are."
        )


def check_scores(scores: TeacherScores, batch: int, length: int) -> None:
    """Refuse teacher scores of another shape than the alignment's teacher side."""
    if scores.shape != (batch, length):
        raise ValueError(
            f"the teacher scores are {scores.shape[0]} × {scores.shape[1]} and the alignment's teacher side is "
            f"{batch} × {length}; expected equal shapes. The scores probably belong to another batch or teacher, or "
            "the batch was sliced after scoring. Fix: slice scores and batch alike (TeacherScores.slice)."
        )


def chosen_plan(
    plan: ChunkPlan | None,
    alignment: AlignmentBatch | None,
    sample_mask: Tensor | None,
    exact_token_match_only: bool,
) -> ChunkPlan:
    """The plan a chunk loss was given, or one made from its alignment."""
    if plan is None:
        if alignment is None:
            raise ValueError(
                "a chunk loss was given neither an alignment nor a plan; expected one. The batch was probably not "
                "unpacked. Fix: pass alignment=alignment_from_flat_batch(batch), or plan=chunk_plan_of_batch(batch)."
            )
        return plan_chunks(alignment, sample_mask=sample_mask, exact_token_match_only=exact_token_match_only)
    if sample_mask is not None:
        raise ValueError(
            "a chunk loss was given a plan and a sample_mask; expected the mask inside the plan. The mask would "
            "otherwise be ignored. Fix: plan_chunks(alignment, sample_mask=…), and pass the plan alone."
        )
    return plan.correct_only() if exact_token_match_only else plan


def projection_of(projection: Projection | Tensor) -> Projection:
    """A Projection as it is; a sparse [Vs, Vt] tensor as one."""
    if isinstance(projection, Projection):
        return projection
    if not projection.is_sparse:
        raise ValueError(
            f"a {projection.layout} tensor was given as a projection; expected a Projection or a sparse COO tensor. A "
            "dense matrix of two vocabularies takes tens of gigabytes. Fix: Projection.load(FILE) or "
            "get_sparse_projection_matrix(FILE, …)."
        )
    matrix = projection.coalesce()
    student, teacher = matrix.indices()
    entries = Entries(student, teacher, matrix.values().float())
    return Projection.of_entries(entries, matrix.shape[0], matrix.shape[1])
