"""An alignment of one text as plain data: what ``spanwise align`` prints, as JSON, in the terminal and on a page.

O(tokens).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from spanwise.xtoken.aligner import TokenAligner
from spanwise.xtoken.texts import checked_text
from spanwise.xtoken.tokenizing import encode_texts

QUALITIES = ("exact", "canonical", "resync", "failed")
_WHOLE_TEXT = 1 << 22


@dataclass(frozen=True)
class ShownChunk:
    """One chunk: half-open token ranges, their pieces as text, and whether it is correct."""

    student: tuple[int, int]
    teacher: tuple[int, int]
    student_pieces: list[str]
    teacher_pieces: list[str]
    correct: bool


@dataclass(frozen=True)
class ShownAlignment:
    """An alignment of one text.

    Attributes:
        chunks: in order; tokens without a chunk stand in one-sided entries that are not correct.
        coverage: share of student tokens in a correct chunk; 1.0 for a text without tokens.
        quality: exact, canonical, resync or failed.
    """

    chunks: list[ShownChunk]
    coverage: float
    quality: str

    def as_json(self) -> dict[str, Any]:
        """The object that ``spanwise align --json`` prints."""
        return {
            "chunks": [
                {"student": list(chunk.student), "teacher": list(chunk.teacher), "correct": chunk.correct}
                for chunk in self.chunks
            ],
            "coverage": self.coverage,
            "quality": self.quality,
        }

    def worst(self, most: int = 5) -> list[ShownChunk]:
        """The largest chunks that are not correct, then the largest correct ones of several tokens."""
        doubtful = [chunk for chunk in self.chunks if not chunk.correct or _size(chunk) > 2]
        return sorted(doubtful, key=lambda chunk: (chunk.correct, -_size(chunk)))[:most]


def align_text(student_tokenizer: Any, teacher_tokenizer: Any, text: str) -> ShownAlignment:
    """Tokenize a text with both tokenizers, as their defaults say, and align it."""
    whole = checked_text(text, 0)
    aligner = TokenAligner(student_tokenizer, teacher_tokenizer, byte_offsets=True)
    (student,) = encode_texts([whole], student_tokenizer, _WHOLE_TEXT)
    (teacher,) = encode_texts([whole], teacher_tokenizer, _WHOLE_TEXT)
    if not student and not teacher:
        return ShownAlignment([], 1.0, QUALITIES[0])
    found = aligner.align(
        torch.tensor([student], dtype=torch.long),
        torch.tensor([teacher], dtype=torch.long),
        texts=[whole] if aligner.needs_texts else None,
    )
    mine, theirs = found.student_chunk_id[0].tolist(), found.teacher_chunk_id[0].tolist()
    correct = found.pair_is_correct[0].tolist()
    tables = (aligner.student_table, aligner.teacher_table)
    chunks = []
    for pair, (i, end_i), (j, end_j) in chunk_runs(mine, theirs):
        pieces = [
            [table.bytes_of(token).decode("utf-8", "backslashreplace") for token in ids]
            for table, ids in zip(tables, (student[i:end_i], teacher[j:end_j]), strict=True)
        ]
        chunks.append(ShownChunk((i, end_i), (j, end_j), pieces[0], pieces[1], pair >= 0 and correct[pair]))
    covered = sum(chunk >= 0 and correct[chunk] for chunk in mine)
    quality = int(found.quality[0]) if found.quality is not None else 0
    return ShownAlignment(chunks, covered / len(mine) if mine else 1.0, QUALITIES[quality])


def chunk_runs(mine: list[int], theirs: list[int]) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
    """The chunks of two sides in order: the pair (-1 = none) and the half-open range of tokens on each side.

    >>> list(chunk_runs([0, 1, 1], [0, 0, 1]))
    [(0, (0, 1), (0, 2)), (1, (1, 3), (2, 3))]
    """
    i = j = 0
    while i < len(mine) or j < len(theirs):
        pair = _first_pair(mine, theirs, i, j)
        end_i = _next_run(mine, i) if i < len(mine) and mine[i] == pair else i
        end_j = _next_run(theirs, j) if j < len(theirs) and theirs[j] == pair else j
        yield pair, (i, end_i), (j, end_j)
        i, j = end_i, end_j


def _next_run(chunks: list[int], start: int) -> int:
    """Where the run of equal chunk ids that begins at ``start`` ends."""
    end = start
    while end < len(chunks) and chunks[end] == chunks[start]:
        end += 1
    return end


def _first_pair(mine: list[int], theirs: list[int], i: int, j: int) -> int:
    """The chunk that comes next: unpaired tokens at once, else the lower id of the two sides."""
    heads = [side[at] for side, at in ((mine, i), (theirs, j)) if at < len(side)]
    return min(heads)


def _size(chunk: ShownChunk) -> int:
    return chunk.student[1] - chunk.student[0] + chunk.teacher[1] - chunk.teacher[0]
