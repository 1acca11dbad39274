"""TokenAligner: which tokens of a student and a teacher cover the same bytes.

Both sides' ids become bytes; where a row's bytes are equal, or one row is the beginning of the other, token boundaries
are intersected for the whole batch at once. Rows where they differ (a normalising tokenizer, a literal ▁, control
tokens that are text) go down a ladder, one row at a time, still without a loop over tokens
(:mod:`spanwise.spans.reconcile`). Nothing is claimed that the bytes do not prove.

Time and memory O(B·(S+T) tokens + bytes); a few percent of what tokenizing the same texts takes.

Shapes: B rows, S student length, T teacher length, P largest number of pairs (at least 1).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from spanwise.spans.fold import Flags, Positions
from spanwise.spans.intersect import Chunks, intersect
from spanwise.spans.offsets import placed_by_offsets
from spanwise.spans.placing import FAILED, RESYNC, BatchPlaces, Reconciled, Tokens, place_batch
from spanwise.spans.profile import Profile, profile_of
from spanwise.spans.reconcile import UNKNOWN_MARKS, RowSide, reconcile
from spanwise.spans.table import TableCache, token_table
from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.texts import refuse_other_texts


class TokenAligner:
    """Align the tokens of two tokenizers by the bytes they stand for.

    Args:
        student_tokenizer: any tokenizer; ``convert_ids_to_tokens`` is enough.
        teacher_tokenizer: likewise.
        projection_matrix_path: kept as an attribute for the loss; alignment does not read it.
        max_comb_len: accepted and without meaning here: bytes need no bound on how many tokens make a chunk.
        byte_offsets: also fill ``quality``, ``student_byte_end`` and ``teacher_byte_end``.
        cache: where to look for token tables first.

    The object is picklable; worker processes share its tables.
    """

    def __init__(
        self,
        student_tokenizer: Any,
        teacher_tokenizer: Any,
        projection_matrix_path: str | os.PathLike[str] | None = None,
        max_comb_len: int = 4,
        *,
        byte_offsets: bool = False,
        cache: TableCache | None = None,
    ) -> None:
        self.student_tokenizer = student_tokenizer
        self.teacher_tokenizer = teacher_tokenizer
        self.projection_matrix_path = projection_matrix_path
        self.max_comb_len = max_comb_len
        self.byte_offsets = byte_offsets
        self.student_table = token_table(student_tokenizer, cache)
        same = teacher_tokenizer is student_tokenizer
        self.teacher_table = self.student_table if same else token_table(teacher_tokenizer, cache)
        self._profiles = self._make_profiles()

    def _make_profiles(self) -> tuple[Profile, Profile]:
        return (
            profile_of(self.student_tokenizer, self.student_table),
            profile_of(self.teacher_tokenizer, self.teacher_table),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without the profiles, which are soon made again; the tables are tensors, which worker processes share."""
        return {key: value for key, value in self.__dict__.items() if key != "_profiles"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._profiles = self._make_profiles()

    def align(
        self,
        student_ids: Int[Tensor, "..."],
        teacher_ids: Int[Tensor, "..."],
        *,
        student_attention_mask: Int[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
        teacher_attention_mask: Int[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
        texts: Sequence[str] | None = None,
        check_texts: bool = True,
    ) -> AlignmentBatch:
        """Align a batch.

        Args:
            student_ids: [B, S] integers. Both sides come from the same texts, each possibly cut.
            teacher_ids: [B, T] integers.
            student_attention_mask: [B, S], nonzero where a token is real; padding is dropped before aligning, wherever
                it stands and whatever its id. None means that every token is real.
            teacher_attention_mask: [B, T], likewise.
            texts: the B texts, if known; tokenizers whose pieces do not spell their text (WordPiece) need them.
            check_texts: refuse texts that have next to nothing in common with their ids; False for a caller that made
                the ids from these very texts, and so knows better than any comparison.

        Returns:
            AlignmentBatch. A row without tokens has no pairs.

        >>> class Pieces:
        ...     def __init__(self, *pieces):
        ...         self.pieces = pieces
        ...     def __len__(self):
        ...         return len(self.pieces)
        ...     def convert_ids_to_tokens(self, ids):
        ...         return [self.pieces[i] for i in ids]
        >>> aligner = TokenAligner(Pieces("span", "wise", "!"), Pieces("spa", "nwise", "!"))
        >>> found = aligner.align(torch.tensor([[0, 1, 2]]), torch.tensor([[0, 1, 2]]))
        >>> found.student_chunk_id.tolist(), found.pair_is_correct.tolist()
        ([[0, 0, 1]], [[True, True]])
        """
        student = _Side("student", student_ids, student_attention_mask, self._profiles[0])
        teacher = _Side("teacher", teacher_ids, teacher_attention_mask, self._profiles[1])
        if student.shape[0] != teacher.shape[0]:
            raise ValueError(
                f"the student has {student.shape[0]} rows and the teacher {teacher.shape[0]}; expected equal batch "
                "sizes. The two sides were probably collated apart. Fix: pass the same rows, in the same order."
            )
        if texts is not None and check_texts:
            refuse_other_texts(texts, (student.tokens, teacher.tokens))
        return self.align_sides(student, teacher, texts)

    def align_sides(self, student: _Side, teacher: _Side, texts: Sequence[str] | None) -> AlignmentBatch:
        """:meth:`align` for checked input."""
        sides = (student.tokens, teacher.tokens)
        places = place_batch(sides)
        spelled = texts if self.needs_texts else None
        for row in range(len(places.lengths)) if spelled is not None else places.slow:
            places.fill(row, self._place_row(sides, row, None if spelled is None else spelled[row]), sides)
        chunks = intersect(places.student, places.teacher, places.lengths, places.gaps, _same_meaning(sides))
        return self._batch(student, teacher, places, chunks)

    @property
    def needs_texts(self) -> bool:
        """Whether ``texts`` make a difference: one side's pieces do not spell what was tokenized."""
        return (self.student_table.kind == "wordpiece") != (self.teacher_table.kind == "wordpiece")

    def _place_row(self, sides: tuple[Tokens, Tokens], row: int, text: str | None) -> Reconciled:
        ids = [side.ids[side.bounds[row] : side.bounds[row + 1]] for side in sides]
        if text is not None:
            tokenizers = (self.student_tokenizer, self.teacher_tokenizer)
            return placed_by_offsets(text, (ids[0], ids[1]), self._profiles, tokenizers)
        student, teacher = (
            RowSide(mine, profile, mark) for mine, profile, mark in zip(ids, self._profiles, UNKNOWN_MARKS, strict=True)
        )
        return reconcile(student, teacher)

    def _batch(self, student: _Side, teacher: _Side, places: BatchPlaces, chunks: Chunks) -> AlignmentBatch:
        rows = len(chunks.count)
        pairs = max(1, int(chunks.count.max()))
        correct = np.zeros((rows, pairs), dtype=bool)
        correct[chunks.correct_row, chunks.correct_chunk] = True
        # Every token's pair on one axis; tokens without one share the place after the last.
        keys = [
            np.where(numbers >= 0, placed.row * pairs + numbers, rows * pairs)
            for placed, numbers in ((places.student, chunks.student), (places.teacher, chunks.teacher))
        ]
        single = np.append(correct.reshape(-1), False)
        for key in keys:
            single &= np.bincount(key, minlength=len(single)) == 1
        exact = [single[key] for key in keys]
        offsets = self.byte_offsets
        return AlignmentBatch(
            pair_valid=torch.from_numpy(np.arange(pairs) < chunks.count[:, None]),
            pair_is_correct=torch.from_numpy(correct),
            student_exact_partition_mask=student.spread(exact[0], False),
            teacher_exact_partition_mask=teacher.spread(exact[1], False),
            student_chunk_id=student.spread(chunks.student, -1),
            teacher_chunk_id=teacher.spread(chunks.teacher, -1),
            num_chunks=torch.from_numpy(chunks.count),
            quality=torch.from_numpy(places.quality.astype(np.int8)) if offsets else None,
            student_byte_end=student.spread(_agreed_ends(places, 0, chunks, correct), -1) if offsets else None,
            teacher_byte_end=teacher.spread(_agreed_ends(places, 1, chunks, correct), -1) if offsets else None,
        )


class _Side:
    """The real tokens of one side's rectangle [B, S], checked; and the way back into it."""

    def __init__(self, name: str, ids: Tensor, mask: Tensor | None, profile: Profile) -> None:
        _check_shapes(name, ids, mask)
        table = ids.detach().cpu().numpy().astype(np.int64, copy=False)
        self.shape: tuple[int, int] = (table.shape[0], table.shape[1])
        real: Flags = np.ones(table.shape, dtype=bool) if mask is None else mask.detach().cpu().numpy() != 0
        self.place: Positions = np.flatnonzero(real)
        flat = table.reshape(-1)[self.place]
        size = profile.table.size
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < size:
            strange = sorted({int(i) for i in flat[(flat < 0) | (flat >= size)]})[:5]
            raise ValueError(
                f"the {name}'s ids hold {strange}; expected 0 to {size - 1}, the ids of its tokenizer. The sides were "
                f"probably swapped, or padding is not masked. Fix: pass {name}_attention_mask, and ids of the "
                "tokenizer that the aligner was made with."
            )
        bounds = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(real.sum(axis=1))])
        self.tokens = Tokens(flat, bounds, profile)

    def spread(self, values: npt.NDArray[Any], fill: int | bool) -> Tensor:
        """Values of the real tokens in the rectangle, ``fill`` elsewhere."""
        whole = np.full(self.shape[0] * self.shape[1], fill, dtype=values.dtype)
        whole[self.place] = values
        return torch.from_numpy(whole.reshape(self.shape))


def _check_shapes(name: str, ids: Any, mask: Any) -> None:
    for what, given in (("ids", ids), *((("attention mask", mask),) if mask is not None else ())):
        if not isinstance(given, Tensor):
            raise ValueError(
                f"the {name}'s {what} came as {type(given).__name__}; expected a torch.Tensor [rows, length]. What "
                "a tokenizer returns was probably passed as it is. Fix: torch.tensor(…), or return_tensors='pt'."
            )
    if ids.ndim != 2 or ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise ValueError(
            f"the {name}'s ids have shape {tuple(ids.shape)} and dtype {ids.dtype}; expected integers [rows, length]. "
            "A single row was probably passed. Fix: ids[None] for one row."
        )
    if not len(ids):
        raise ValueError(
            f"the {name}'s batch has no rows; expected at least one. The data set is probably exhausted or filtered to "
            "nothing. Fix: skip empty batches."
        )
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(
            f"the {name}'s attention mask has shape {tuple(mask.shape)} and its ids {tuple(ids.shape)}; expected equal "
            "shapes. The mask probably belongs to the other side. Fix: pass the mask that came with these ids."
        )


def _same_meaning(sides: tuple[Tokens, Tokens]) -> Callable[[int, int], bool]:
    """Whether two control tokens play a common role, or are spelled alike."""
    student, teacher = sides

    def same(mine: int, theirs: int) -> bool:
        my_id, their_id = int(student.ids[mine]), int(teacher.ids[theirs])
        if student.profile.roles[my_id] & teacher.profile.roles[their_id]:
            return True
        if not (student.profile.known[my_id] and teacher.profile.known[their_id]):
            return False
        content = student.profile.table.bytes_of(my_id)
        return bool(content) and content == teacher.profile.table.bytes_of(their_id)

    return same


def _agreed_ends(places: BatchPlaces, side: int, chunks: Chunks, correct: Flags) -> npt.NDArray[np.int32]:
    """Where tokens end in the agreed bytes, -1 where the sides do not agree."""
    placed, numbers = ((places.student, chunks.student), (places.teacher, chunks.teacher))[side]
    ends = placed.end.astype(np.int32)
    ends[places.changed[side]] = -1
    if (places.quality >= RESYNC).any():
        quality = places.quality[placed.row]
        claimed = (numbers >= 0) & correct[placed.row, numbers]
        ends[((quality >= RESYNC) & ~claimed) | (quality == FAILED)] = -1
    return ends
