"""Random batches for the losses: chunk ids with gaps, one-sided pairs, invalid pairs, padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.projection import Projection


def random_chunk_ids(length: int, chunks: int, g: torch.Generator, start: int) -> list[int]:
    """Non-decreasing ids, some missing, some positions -1."""
    steps = torch.randint(0, 3, (length,), generator=g).tolist()
    out, at = [], 0
    for place, step in enumerate(steps):
        at = min(at + (step if place else 0), chunks - 1)
        out.append(at if place >= start and step != 2 else -1)
    return out


def random_alignment(batch: int, s: int, t: int, chunks: int, g: torch.Generator, start: int = 1) -> AlignmentBatch:
    student = torch.tensor([random_chunk_ids(s, chunks, g, start) for _ in range(batch)]).view(batch, s)
    teacher = torch.tensor([random_chunk_ids(t, chunks, g, start) for _ in range(batch)]).view(batch, t)
    valid = torch.rand(batch, chunks, generator=g) < 0.85
    correct = valid & (torch.rand(batch, chunks, generator=g) < 0.7)
    nothing_s, nothing_t = torch.zeros(batch, s, dtype=torch.bool), torch.zeros(batch, t, dtype=torch.bool)
    return AlignmentBatch(valid, correct, nothing_s, nothing_t, student, teacher, torch.full((batch,), chunks))


def random_projection(students: int, teachers: int, k: int, g: torch.Generator) -> Projection:
    """Sentinels anywhere, whole rows -1, duplicate ids, weights 0.6, 1.0 and just below, unsorted rows."""
    indices = torch.randint(-1, teachers, (students, k), generator=g)
    weights = torch.rand(students, k, generator=g)
    pick = torch.randint(0, 8, (students,), generator=g)
    for row, kind in enumerate(pick.tolist()):
        if kind == 0:
            indices[row] = -1
        elif kind <= 3:
            indices[row, 1:] = -1
            indices[row, 0] = int(torch.randint(teachers, (), generator=g))
            weights[row] = 0.0
            weights[row, 0] = (1.0, 1.0, 0.99999994)[kind - 1]
        elif kind == 4:
            weights[row, 0] = 0.6
        elif kind == 5 and k > 1:
            indices[row, 1] = indices[row, 0]
    return Projection(indices, weights, teachers)


def dense_matrix(projection: Projection, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    matrix = torch.zeros(projection.student_vocab_size, projection.teacher_vocab_size, dtype=dtype)
    for row in range(projection.student_vocab_size):
        for slot in range(projection.indices.shape[1]):
            if projection.indices[row, slot] >= 0:
                matrix[row, projection.indices[row, slot]] += projection.likelihoods[row, slot]
    return matrix


@dataclass
class Case:
    z: torch.Tensor
    y: torch.Tensor
    alignment: AlignmentBatch
    projection: Projection
    sample_mask: torch.Tensor


def random_case(
    seed: int, batch: int = 2, s: int = 7, t: int = 8, chunks: int = 5, students: int = 9, teachers: int = 11,
    k: int = 3, dtype: torch.dtype = torch.float64, extra: int = 0, start: int = 1,
) -> Case:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(batch, s, students + extra, generator=g, dtype=torch.float64)
    y = 2 * torch.randn(batch, t, teachers + extra, generator=g, dtype=torch.float64)
    alignment = random_alignment(batch, s, t, chunks, g, start)
    projection = random_projection(students, teachers, k, g)
    mask = torch.tensor([1.0, 0.5, 0.0, 2.0])[torch.randint(0, 4, (batch,), generator=g)]
    return Case(z.to(dtype).requires_grad_(), y.to(dtype), alignment, projection, mask)


# Shapes for random_case: nothing beside much, on either side. Compared at SHAPES_RTOL: with no more than one shared id
# the gradient is what cancellation leaves of larger numbers, and equal ids of a projection add up in float32.
SHAPES = st.fixed_dictionaries(
    {
        "batch": st.sampled_from([1, 2, 3]), "s": st.sampled_from([1, 2, 9, 15]), "t": st.sampled_from([1, 2, 5, 14]),
        "chunks": st.sampled_from([1, 2, 7]), "students": st.sampled_from([2, 5, 30]),
        "teachers": st.sampled_from([2, 4, 40]), "k": st.sampled_from([1, 2, 5]), "extra": st.sampled_from([0, 3]),
        "start": st.sampled_from([0, 1]),
    }
)  # fmt: skip
SHAPES_RTOL = 1e-6


def take(alignment: AlignmentBatch, rows: slice) -> AlignmentBatch:
    from dataclasses import fields

    picked = {f.name: getattr(alignment, f.name) for f in fields(alignment)}
    return AlignmentBatch(**{name: None if value is None else value[rows] for name, value in picked.items()})


def assert_same(parts, expected: tuple[torch.Tensor, torch.Tensor], z: torch.Tensor, rtol: float = 1e-8) -> None:
    """Value, count and gradient."""
    total, count = expected
    torch.testing.assert_close(parts.count.double(), count.detach().double(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(parts.total.double(), total.double(), rtol=rtol, atol=rtol)
    (got,) = torch.autograd.grad(parts.total, z)
    wanted = torch.autograd.grad(total, z, allow_unused=True)[0] if total.requires_grad else None
    wanted = torch.zeros_like(z) if wanted is None else wanted
    assert got.dtype == z.dtype
    assert got.shape == z.shape
    # A gradient below the floor is what rounding leaves of a sum that is zero.
    scale = max(float(wanted.abs().max()), 1e-9) if wanted.numel() else 1.0
    torch.testing.assert_close(got / scale, wanted / scale, rtol=0, atol=10 * rtol)
