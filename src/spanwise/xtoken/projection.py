"""Projection: how much of every student token is which teacher token.

A top-k matrix, [Vs, K] ids (-1 = empty slot) and weights; rows are not renormalised on load and duplicate ids in a row
add. It is built once per pair of tokenizers (``projection_build.py``) and kept in a file (``projection_file.py``)
together with the fingerprints of both, so that one made for other tokenizers can be refused. O(Vs·K) memory.

Shapes: Vs student vocabulary, Vt teacher vocabulary, K entries per row, E non-empty entries.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from spanwise.xtoken.exact_map import exact_token_map


@dataclass(frozen=True)
class Entries:
    """The non-empty entries, sorted by student then teacher, duplicates added."""

    student: Int64[Tensor, " E"]
    teacher: Int64[Tensor, " E"]
    weight: Float32[Tensor, " E"]


@dataclass(frozen=True)
class Projection:
    """A projection from student tokens to teacher tokens.

    Attributes:
        indices: teacher ids, -1 = no entry.
        likelihoods: their weights; ignored where the id is -1.
        teacher_vocab_size: Vt, at least the largest id plus one.
        metadata: fingerprints, names and options of a built projection; empty for a foreign file.

    >>> p = Projection(torch.tensor([[1, -1], [0, 0]]), torch.tensor([[1.0, 0.0], [0.25, 0.75]]), 2)
    >>> p.entries().weight.tolist(), p.exact_rows().tolist()
    ([1.0, 1.0], [0])
    """

    indices: Int64[Tensor, "Vs K"]
    likelihoods: Float32[Tensor, "Vs K"]
    teacher_vocab_size: int
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        largest = int(self.indices.max()) if self.indices.numel() else -1
        if largest >= self.teacher_vocab_size:
            raise ValueError(
                f"the projection maps to teacher token {largest:,} and the teacher has {self.teacher_vocab_size:,} "
                "tokens; expected ids below that. It was probably built with another tokenizer. Rebuild it: spanwise "
                "project build STUDENT TEACHER -o FILE."
            )
        weight = self.likelihoods.masked_fill(self.indices < 0, 0.0)
        if bool(((weight < 0) | ~weight.isfinite()).any()):
            raise ValueError(
                "the projection holds weights that are negative, infinite or NaN; expected shares of a token. It was "
                "probably trained or damaged. Rebuild it: spanwise project build STUDENT TEACHER -o FILE."
            )

    @property
    def student_vocab_size(self) -> int:
        """Vs."""
        return len(self.indices)

    def to(self, device: torch.device | str) -> Projection:
        """The same projection on another device."""
        return Projection(
            self.indices.to(device), self.likelihoods.to(device), self.teacher_vocab_size, dict(self.metadata)
        )

    def entries(self) -> Entries:
        """COO form: empty slots dropped, duplicates added. Made once."""
        return self._entries

    def token_map(self, *, relaxed: bool = False) -> dict[str, Int64[Tensor, " n"]]:
        """Which student token is which teacher token (``exact_map.py``), strict or relaxed. Made once."""
        return self._relaxed_map if relaxed else self._strict_map

    @cached_property
    def _strict_map(self) -> dict[str, Tensor]:
        return exact_token_map(
            self.indices, self.likelihoods, xtoken_loss=False, teacher_vocab_size=self.teacher_vocab_size
        )

    @cached_property
    def _relaxed_map(self) -> dict[str, Tensor]:
        return exact_token_map(
            self.indices, self.likelihoods, xtoken_loss=True, teacher_vocab_size=self.teacher_vocab_size
        )

    @cached_property
    def _entries(self) -> Entries:
        row, slot = (self.indices >= 0).nonzero(as_tuple=True)
        return coalesce(row, self.indices[row, slot], self.likelihoods[row, slot], self.teacher_vocab_size)

    def exact_rows(self) -> Int64[Tensor, " n"]:
        """Student ids with one entry of weight 1 and nothing else."""
        filled = (self.indices >= 0).sum(-1) == 1
        weight = self.likelihoods.masked_fill(self.indices < 0, 0.0).sum(-1) if self.indices.shape[1] else filled
        return (filled & (weight == 1.0)).nonzero().squeeze(1)

    @classmethod
    def of_entries(cls, entries: Entries, student_vocab_size: int, teacher_vocab_size: int) -> Projection:
        """The dense top-k form of COO entries; K is the largest number of entries in a row, at least 1."""
        sizes = torch.bincount(entries.student, minlength=student_vocab_size)
        width = max(1, int(sizes.max()) if len(sizes) else 1)
        start = sizes.cumsum(0) - sizes
        slot = torch.arange(len(entries.student), device=sizes.device) - start[entries.student]
        indices = torch.full((student_vocab_size, width), -1, dtype=torch.long, device=sizes.device)
        likelihoods = torch.zeros(student_vocab_size, width, device=sizes.device)
        indices[entries.student, slot] = entries.teacher
        likelihoods[entries.student, slot] = entries.weight
        return cls(indices, likelihoods, teacher_vocab_size)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, student: Any | None = None, teacher: Any | None = None
    ) -> Projection:
        """Read a projection file in any of the supported formats.

        Args:
            path: our safetensors, or a dense or sparse ``.pt`` (never unpickled beyond tensors and plain containers).
            student: a tokenizer; the projection is refused if it was built for another one.
            teacher: likewise.
        """
        from spanwise.xtoken.projection_file import load_projection

        return load_projection(path, student=student, teacher=teacher)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as safetensors, or in the dense ``.pt`` form where the path ends with ``.pt``; complete or not at
        all."""
        from spanwise.xtoken.projection_file import save_projection

        save_projection(self, path)


def coalesce(
    student: Int64[Tensor, " n"], teacher: Int64[Tensor, " n"], weight: Float32[Tensor, " n"], teacher_vocab_size: int
) -> Entries:
    """Sort entries by student then teacher and add duplicates."""
    key, place = torch.unique(student * max(1, teacher_vocab_size) + teacher, return_inverse=True)
    summed = torch.zeros(len(key), dtype=weight.dtype, device=weight.device).index_add_(0, place, weight)
    return Entries(key // max(1, teacher_vocab_size), key % max(1, teacher_vocab_size), summed)
