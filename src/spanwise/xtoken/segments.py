"""Align parts of rows, and put the parts' alignments together.

A chat is aligned turn by turn, a packed row document by document. Each part is a range of tokens on either side; all
byte parts of a batch are aligned in one call, and then laid into their rows: chunk ids count on through the row, byte
ends count on through the document. Tokens outside all parts stay unpaired. O(tokens), with a loop over the parts.

Shapes: B rows, S student length, T teacher length, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.tokenizing import rectangle

FAILED = 3


@dataclass(frozen=True)
class Segment:
    """A part of a document: half-open token ranges on both sides that belong together.

    ``closing``: the closing text of a turn, which is one pair whatever its bytes. ``text``: what a byte part spells.
    """

    student: tuple[int, int]
    teacher: tuple[int, int]
    closing: bool = False
    text: str | None = None


@dataclass(frozen=True)
class Placement:
    """A document in the batch: its row, and where its tokens begin on both sides."""

    row: int
    student_at: int
    teacher_at: int
    student_ids: Sequence[int]
    teacher_ids: Sequence[int]
    segments: Sequence[Segment]
    number: int


def align_segments(
    aligner: Any, placements: Sequence[Placement], student_shape: tuple[int, int], teacher_shape: tuple[int, int]
) -> tuple[AlignmentBatch, Tensor]:
    """The alignment of a whole batch from its parts, and the document number of every pair (int64 [B, P], -1 none)."""
    parts = _align_parts(aligner, placements)
    build = _Build(student_shape, teacher_shape)
    for placement in placements:
        build.begin_document()
        for segment in placement.segments:
            if segment.closing:
                build.close(placement, segment)
            else:
                build.add(placement, segment, *next(parts))
        if not placement.segments:
            build.quality[placement.row] = FAILED
    return build.finish(next(iter(parts), None) is None and _has_offsets(aligner))


def _has_offsets(aligner: Any) -> bool:
    return bool(getattr(aligner, "byte_offsets", False))


def _align_parts(aligner: Any, placements: Sequence[Placement]) -> Any:
    """(alignment of all byte parts, index of the part) in order."""
    parts = [(p, s) for p in placements for s in p.segments if not s.closing]
    if not parts:
        return iter(())
    student = [p.student_ids[s.student[0] : s.student[1]] for p, s in parts]
    teacher = [p.teacher_ids[s.teacher[0] : s.teacher[1]] for p, s in parts]
    student_ids, student_mask = rectangle(student, 0, max(map(len, student)), 1)
    teacher_ids, teacher_mask = rectangle(teacher, 0, max(map(len, teacher)), 1)
    known: dict[str, Any] = {}
    if getattr(aligner, "needs_texts", False):
        known = {"texts": [s.text or "" for _, s in parts], "check_texts": False}
    found = aligner.align(
        student_ids,
        teacher_ids,
        student_attention_mask=student_mask,
        teacher_attention_mask=teacher_mask,
        **known,
    )
    return iter([(found, place) for place in range(len(parts))])


class _Build:
    """The alignment as it grows, row by row."""

    def __init__(self, student_shape: tuple[int, int], teacher_shape: tuple[int, int]) -> None:
        self.sides = {
            "student": torch.full(student_shape, -1, dtype=torch.long),
            "teacher": torch.full(teacher_shape, -1, dtype=torch.long),
        }
        self.exact = {name: torch.zeros(ids.shape, dtype=torch.bool) for name, ids in self.sides.items()}
        self.ends = {name: torch.full(ids.shape, -1, dtype=torch.int32) for name, ids in self.sides.items()}
        rows = student_shape[0]
        self.correct: list[list[bool]] = [[] for _ in range(rows)]
        self.documents: list[list[int]] = [[] for _ in range(rows)]
        self.quality = [0] * rows
        self.reached = 0

    def begin_document(self) -> None:
        self.reached = 0

    def add(self, placement: Placement, segment: Segment, found: AlignmentBatch, part: int) -> None:
        """Lay one aligned part into its row."""
        row, before = placement.row, len(self.correct[placement.row])
        reached = self.reached
        for name, at, (low, high) in (
            ("student", placement.student_at, segment.student),
            ("teacher", placement.teacher_at, segment.teacher),
        ):
            here, size = slice(at + low, at + high), high - low
            ids: Tensor = getattr(found, f"{name}_chunk_id")[part, :size]
            self.sides[name][row, here] = torch.where(ids >= 0, ids + before, ids)
            self.exact[name][row, here] = getattr(found, f"{name}_exact_partition_mask")[part, :size]
            ends: Tensor | None = getattr(found, f"{name}_byte_end")
            if ends is not None:
                mine = ends[part, :size]
                self.ends[name][row, here] = torch.where(mine >= 0, mine + reached, mine)
                self.reached = max(self.reached, reached + int(mine.max()) + 1) if size else self.reached
        pairs = int(found.num_chunks[part])
        self.correct[row] += found.pair_is_correct[part, :pairs].tolist()
        self.documents[row] += [placement.number] * pairs
        if found.quality is not None:
            self.quality[row] = max(self.quality[row], int(found.quality[part]))

    def close(self, placement: Placement, segment: Segment) -> None:
        """Pair the closing texts of a turn."""
        row, number = placement.row, len(self.correct[placement.row])
        single = segment.student[1] - segment.student[0] == segment.teacher[1] - segment.teacher[0] == 1
        for name, at, (low, high) in (
            ("student", placement.student_at, segment.student),
            ("teacher", placement.teacher_at, segment.teacher),
        ):
            self.sides[name][row, at + low : at + high] = number
            self.exact[name][row, at + low : at + high] = single
        self.correct[row].append(True)
        self.documents[row].append(placement.number)

    def finish(self, with_offsets: bool) -> tuple[AlignmentBatch, Tensor]:
        count = torch.tensor([len(row) for row in self.correct], dtype=torch.long)
        pairs = max(1, int(count.max()))
        correct = torch.zeros((len(count), pairs), dtype=torch.bool)
        documents = torch.full((len(count), pairs), -1, dtype=torch.long)
        for row, (flags, numbers) in enumerate(zip(self.correct, self.documents, strict=True)):
            correct[row, : len(flags)] = torch.tensor(flags, dtype=torch.bool)
            documents[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.long)
        batch = AlignmentBatch(
            pair_valid=torch.arange(pairs) < count[:, None],
            pair_is_correct=correct,
            student_exact_partition_mask=self.exact["student"],
            teacher_exact_partition_mask=self.exact["teacher"],
            student_chunk_id=self.sides["student"],
            teacher_chunk_id=self.sides["teacher"],
            num_chunks=count,
            quality=torch.tensor(self.quality, dtype=torch.int8) if with_offsets else None,
            student_byte_end=self.ends["student"] if with_offsets else None,
            teacher_byte_end=self.ends["teacher"] if with_offsets else None,
        )
        return batch, documents
