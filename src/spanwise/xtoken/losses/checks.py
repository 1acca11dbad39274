"""What every loss checks about its arguments. O(1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxtyping import Int, Int64
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


def check_scores(scores: Any, batch: int, length: int) -> None:
    """Refuse what are no teacher scores, and scores of another shape than the alignment's teacher side."""
    if not isinstance(scores, TeacherScores):
        raise ValueError(
            f"a {type(scores).__name__} was given as the teacher's scores; expected TeacherScores. Its logits were "
            "probably passed as they are. Fix: TeacherScores(logits=teacher_logits)."
        )
    if scores.shape != (batch, length):
        raise ValueError(
            f"the teacher scores are {scores.shape[0]} × {scores.shape[1]} and the alignment's teacher side is "
            f"{batch} × {length}; expected equal shapes. The scores probably belong to another batch or teacher, or "
            "the batch was sliced after scoring. Fix: slice scores and batch alike (TeacherScores.slice)."
        )


def check_ids(ids: Int[Tensor, " n"], width: int, side: str) -> None:
    """Refuse token ids that a side does not score; on an accelerator they would end the process."""
    if not len(ids):
        return
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < 0:
        raise ValueError(
            f"the {side}'s tokens hold {smallest}; expected ids from 0. Labels in which -100 marks what is not trained "
            "on were probably passed. Fix: pass the ids of the batch, and mask=… for what is trained on."
        )
    if largest >= width:
        raise ValueError(
            f"the text holds token {largest:,} and the {side} scores {width:,} tokens; expected ids below that. The "
            f"tokens were probably made by another tokenizer. Fix: tokenize with the {side}'s, or resize its "
            "embeddings."
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


def token_map_of(
    projection: Projection | Mapping[str, Int64[Tensor, " n"]], *, relaxed: bool
) -> Mapping[str, Int64[Tensor, " n"]]:
    """The exact map of a projection; the four tensors of ``build_exact_token_map`` as they are."""
    if isinstance(projection, Projection):
        return projection.token_map(relaxed=relaxed)
    parts = ("common_student", "common_teacher", "uncommon_student", "uncommon_teacher")
    if isinstance(projection, Mapping) and all(isinstance(projection.get(name), Tensor) for name in parts):
        return projection
    raise ValueError(
        f"a {type(projection).__name__} was given to pair the vocabularies; expected a Projection, or the mapping of "
        f"{', '.join(parts)} that build_exact_token_map returns. A matrix carries no exact map, and a teacher with the "
        "student's tokenizer needs none. Fix: Projection.load(FILE), or same_vocab_kl for one tokenizer."
    )


def projection_of(projection: Projection | Tensor) -> Projection:
    """A Projection as it is; a sparse [Vs, Vt] tensor as one."""
    if isinstance(projection, Projection):
        return projection
    if not isinstance(projection, Tensor):
        raise ValueError(
            f"a {type(projection).__name__} was given as a projection; expected a Projection or a sparse COO tensor. "
            "Teacher and student probably share a tokenizer, or a path was passed. Fix: same_vocab_kl needs no "
            "projection; else Projection.load(FILE)."
        )
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
