"""Where documents lie in a batch: one per row, or several laid end to end.

Both sides hold the same documents in the same order; a document joins a row only if it fits on every side. O(tokens).

Shapes: B rows, D documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spanwise.spans.pack import pack_documents
from spanwise.xtoken.documents import Encoded
from spanwise.xtoken.segments import Placement


@dataclass(frozen=True)
class Layout:
    """Rows of document numbers, and what was left out (reason → count)."""

    documents: Sequence[Encoded]
    places: list[list[int]]
    left_out: dict[str, int]

    @property
    def order(self) -> list[int]:
        """Document numbers, row by row."""
        return [number for row in self.places for number in row]

    def rows(self, side: int) -> list[list[int]]:
        """The token ids of every row."""
        return [[token for number in row for token in self.documents[number].ids[side]] for row in self.places]

    def segments(self, side: int) -> list[list[int]]:
        """1 for the tokens of a row's first document, 2 for those of its second, …"""
        return [
            [segment for segment, number in enumerate(row, start=1) for _ in self.documents[number].ids[side]]
            for row in self.places
        ]

    def trained(self) -> list[list[int]]:
        """1 where the student is trained, per row."""
        rows = []
        for row in self.places:
            flags: list[int] = []
            for number in row:
                document = self.documents[number]
                flags += (
                    [1] * len(document.ids[0]) if document.trained is None else document.trained.astype(int).tolist()
                )
            rows.append(flags)
        return rows

    def placements(self, side: int) -> list[Placement]:
        """Every document of the batch against one teacher side, row by row."""
        placements = []
        for row, numbers in enumerate(self.places):
            student_at = teacher_at = 0
            for number in numbers:
                document = self.documents[number]
                mine, theirs = document.ids[0], document.ids[side]
                placements.append(
                    Placement(row, student_at, teacher_at, mine, theirs, document.segments[side], len(placements))
                )
                student_at += len(mine)
                teacher_at += len(theirs)
        return placements


def one_per_row(documents: Sequence[Encoded]) -> Layout:
    """Every document in a row of its own."""
    return _layout(documents, [[number] for number in range(len(documents))], {})


def packed(documents: Sequence[Encoded], capacities: Sequence[int]) -> Layout:
    """Documents laid end to end, whole; those that fit nowhere or have no tokens are left out and counted."""
    sizes = [[len(ids) for ids in document.ids] for document in documents]
    filled = [number for number, size in enumerate(sizes) if min(size)]
    bins = pack_documents([sizes[number] for number in filled], list(capacities))
    left_out = {"longer_than_context": len(bins.too_long), "without_tokens": len(sizes) - len(filled)}
    if not bins.rows:
        raise ValueError(
            f"none of the {len(sizes)} documents could be packed ({left_out}); expected at least one that fits whole "
            f"into {list(capacities)} tokens per side. The documents are probably longer than the context. "
            "Fix: split them before collating, raise the context lengths, or packing=False, which cuts them."
        )
    return _layout(documents, [[filled[number] for number in row] for row in bins.rows], left_out)


def _layout(documents: Sequence[Encoded], places: list[list[int]], left_out: dict[str, int]) -> Layout:
    unfound = sum(documents[number].unfound for row in places for number in row)
    reasons = left_out | {"answers_not_found_in_tokens": unfound}
    return Layout(documents, places, {reason: count for reason, count in reasons.items() if count})
