"""CrossTokenizerCollator: raw rows in, one training batch for a student and any number of teachers out.

The text is tokenized once per side and aligned by bytes; nothing of the loss is computed here. The collator is
picklable, keeps no state between batches and leaves the caller's tokenizers as they were, so it runs in DataLoader
workers. Time and memory O(tokens) beyond tokenizing.

Shapes: B rows, S student length, T teacher length, P pairs, D documents (B of them unless rows are packed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from spanwise.batch import BatchedDataDict
from spanwise.spans.encode import same_ids
from spanwise.spans.pack import segment_positions
from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.documents import Reader
from spanwise.xtoken.layout import Layout, one_per_row, packed
from spanwise.xtoken.segments import align_segments
from spanwise.xtoken.tokenizing import encode_texts, padding_id, rectangle

_OFFSET_FIELDS = frozenset({"quality", "student_byte_end", "teacher_byte_end"})


class CrossTokenizerCollator:
    """Tokenize for every side, align once, return a flat batch of tensors.

    One teacher: ``teacher_tokenizer``, ``aligner``, ``ctx_length_teacher``, ``make_seq_div_by_teacher`` give the keys
    ``teacher_*`` and ``alignment_*``. Several: the same names in the plural, lists of equal length, give
    ``teacher_{i}_*`` and ``alignment_{i}_*``, also for a list of one. An aligner that is None means a teacher with the
    student's tokenizer: nothing is emitted for it.

    Args:
        student_tokenizer: the student's.
        ctx_length_student: most tokens of a row, and its padded length.
        make_seq_div_by_student: the padded length is rounded up to a multiple of this.
        padding: ``"context"`` pads to the context length, ``"longest"`` to the longest row of the batch.
        packing: lay documents end to end; a document joins a row only if it fits on every side, whole. What fits
            nowhere is left out and counted in ``left_out``.
        append_eos: end every text with the side's EOS where its tokenizer does not and where it still fits.
        byte_offsets: emit the three optional fields of the alignment.

    A batch holds ``input_ids``, ``input_lengths``, ``token_mask`` (int64), ``sample_mask`` (float32), ``idx``,
    ``labels_shifted`` (False), ``left_out`` (reason → count; chats and completions of which nothing was found again in
    their tokens stay in their rows and are not trained on); ``teacher_input_ids``, ``teacher_input_lengths``,
    ``teacher_token_mask``; ``alignment_<field>``. Batches with chats or completions add ``loss_mask`` (int64). Packed
    ones add ``segment_ids``, ``position_ids`` and their ``teacher_`` twins, ``alignment_pair_document`` (-1 = no pair);
    ``sample_mask`` and ``idx`` then have one entry per document, row by row.
    """

    def __init__(
        self,
        *,
        student_tokenizer: Any,
        ctx_length_student: int,
        teacher_tokenizer: Any = None,
        aligner: Any = None,
        ctx_length_teacher: int | None = None,
        make_seq_div_by_student: int = 1,
        make_seq_div_by_teacher: int = 1,
        teacher_tokenizers: Sequence[Any] | None = None,
        aligners: Sequence[Any] | None = None,
        ctx_length_teachers: Sequence[int] | None = None,
        make_seq_div_by_teachers: Sequence[int] | None = None,
        padding: str = "context",
        packing: bool = False,
        append_eos: bool = False,
        byte_offsets: bool = False,
    ) -> None:
        if padding not in ("context", "longest"):
            raise ValueError(
                f"padding is {padding!r}; expected 'context' or 'longest'. Another library's name was probably meant. "
                "Fix: 'context' for tensors of fixed width, 'longest' for the least padding."
            )
        if (teacher_tokenizer is not None) == (teacher_tokenizers is not None):
            raise ValueError(
                f"{'both' if teacher_tokenizer is not None else 'neither'} of teacher_tokenizer and teacher_tokenizers "
                "were given; expected one of them. The arguments for one teacher and for several were probably mixed. "
                "Fix: teacher_tokenizer=… for one, teacher_tokenizers=[…] for several."
            )
        self.indexed = teacher_tokenizers is not None
        if teacher_tokenizers is None:
            teacher_tokenizers, aligners = [teacher_tokenizer], [aligner]
            ctx_length_teachers = [ctx_length_student if ctx_length_teacher is None else ctx_length_teacher]
            make_seq_div_by_teachers = [make_seq_div_by_teacher]
        count = len(teacher_tokenizers)
        self.student_tokenizer = student_tokenizer
        self.teacher_tokenizers = list(teacher_tokenizers)
        self.aligners = _one_each("aligners", aligners, count, None)
        self.ctx_lengths = [
            ctx_length_student,
            *_one_each("ctx_length_teachers", ctx_length_teachers, count, ctx_length_student),
        ]
        self.divisors = [
            make_seq_div_by_student,
            *_one_each("make_seq_div_by_teachers", make_seq_div_by_teachers, count, 1),
        ]
        self.padding = padding
        self.packing = packing
        self.append_eos = append_eos
        self.byte_offsets = byte_offsets
        # A teacher with the student's tokenizer has no tensors of its own: it reads the student's.
        self.active = [teacher for teacher in range(count) if self.aligners[teacher] is not None]
        _check_positive("context length", self.ctx_lengths)
        _check_positive("sequence divisor", self.divisors)
        for tokenizer in (student_tokenizer, *self.teacher_tokenizers):
            _check_tokenizer(tokenizer)
        self._check_aligners()
        mine = getattr(self.aligners[self.active[0]], "student_table", None) if self.active else None
        self._capacities = [self.ctx_lengths[0], *(self.ctx_lengths[i + 1] for i in self.active)]
        self._reader = Reader(
            [student_tokenizer, *(self.teacher_tokenizers[i] for i in self.active)],
            [mine, *(getattr(self.aligners[i], "teacher_table", None) for i in self.active)],
            self._capacities,
            tokenize=self._tokenize_batch,
            append_eos=append_eos,
            whole=packing,
        )

    def _check_aligners(self) -> None:
        for teacher, (aligner, tokenizer) in enumerate(zip(self.aligners, self.teacher_tokenizers, strict=True)):
            if aligner is None:
                if not same_ids(self.student_tokenizer, tokenizer):
                    raise ValueError(
                        f"teacher {teacher} has no aligner and its tokenizer makes other ids than the student's; "
                        "expected an aligner for every teacher with a tokenizer of its own. None, which means the "
                        "student's tokenizer, was probably left standing. "
                        "Fix: TokenAligner(student_tokenizer, teacher_tokenizer)."
                    )
                continue
            if not callable(getattr(aligner, "align", None)):
                raise ValueError(
                    f"aligner {teacher} is a {type(aligner).__name__}; expected a TokenAligner. A name was probably "
                    "passed. Fix: TokenAligner(student_tokenizer, teacher_tokenizer)."
                )
            for side, mine in (("student", self.student_tokenizer), ("teacher", tokenizer)):
                if not same_ids(getattr(aligner, f"{side}_tokenizer", mine), mine):
                    raise ValueError(
                        f"aligner {teacher} was made for another {side}: its tokenizer makes other ids than the "
                        "collator's; expected the same tokenizers in both. The two sides were probably swapped. "
                        "Fix: TokenAligner(student_tokenizer, teacher_tokenizer), in this order."
                    )
            if self.byte_offsets and not getattr(aligner, "byte_offsets", False):
                raise ValueError(
                    f"byte_offsets=True was asked of the collator and aligner {teacher} does not make them; expected "
                    "both alike. The aligner was probably made without the argument. "
                    "Fix: TokenAligner(…, byte_offsets=True)."
                )

    def __call__(self, batch: Sequence[Any]) -> BatchedDataDict:
        """Collate rows (see :func:`spanwise.xtoken.rows.read_row` for their kinds)."""
        if not batch:
            raise ValueError(
                "the batch has no rows; expected at least one. The sampler or a filter probably yields empty batches. "
                "Fix: skip them, or drop_last=True."
            )
        documents = self._reader.read(batch)
        layout = packed(documents, self._capacities) if self.packing else one_per_row(documents)
        result: dict[str, Any] = {}
        student_shape = self._emit_side(result, "", layout, 0, self.student_tokenizer, 0)
        loss_mask: Tensor | None = None
        if any(document.trained is not None for document in documents):
            loss_mask = rectangle(layout.trained(), 0, student_shape[1], 1)[0]
            result["loss_mask"] = loss_mask
        kept = [documents[number] for number in layout.order]
        result["sample_mask"] = torch.tensor([document.loss_multiplier for document in kept], dtype=torch.float32)
        result["idx"] = _indices([document.index for document in kept])
        for side, teacher in enumerate(self.active, start=1):
            infix = f"{teacher}_" if self.indexed else ""
            tokenizer = self.teacher_tokenizers[teacher]
            shape = self._emit_side(result, f"teacher_{infix}", layout, side, tokenizer, teacher + 1)
            found, pair_document = align_segments(self.aligners[teacher], layout.placements(side), student_shape, shape)
            if loss_mask is not None:
                found = _only_trained(found, loss_mask)
            for field in fields(found):
                value = getattr(found, field.name)
                if value is not None and (self.byte_offsets or field.name not in _OFFSET_FIELDS):
                    result[f"alignment_{infix}{field.name}"] = value
            if self.packing:
                result[f"alignment_{infix}pair_document"] = pair_document
        return BatchedDataDict(result | {"labels_shifted": False, "left_out": layout.left_out})

    def _emit_side(
        self, result: dict[str, Any], prefix: str, layout: Layout, side: int, tokenizer: Any, number: int
    ) -> tuple[int, int]:
        rows = layout.rows(side)
        width = self.ctx_lengths[number] if self.padding == "context" else max(1, *map(len, rows))
        ids, mask = rectangle(rows, padding_id(tokenizer), width, self.divisors[number])
        result[f"{prefix}input_ids"] = ids
        result[f"{prefix}input_lengths"] = mask.sum(dim=1)
        result[f"{prefix}token_mask"] = mask
        if self.packing:
            segments, _ = rectangle(layout.segments(side), 0, ids.shape[1], 1)
            result[f"{prefix}segment_ids"] = segments
            result[f"{prefix}position_ids"] = segment_positions(segments)
        return ids.shape[0], ids.shape[1]

    @staticmethod
    def _tokenize_batch(
        texts: list[str], tokenizer: Any, ctx_length: int, make_seq_div_by: int
    ) -> tuple[Int64[Tensor, "B S"], Int64[Tensor, "B S"]]:
        """Ids and mask of texts, padded on the right to the context length and on to a multiple.

        The tokenizer's defaults apply (no chat template, no special handling), and it is left as it was.
        """
        return rectangle(encode_texts(texts, tokenizer, ctx_length), padding_id(tokenizer), ctx_length, make_seq_div_by)


def _only_trained(found: AlignmentBatch, loss_mask: Int64[Tensor, "B S"]) -> AlignmentBatch:
    """Pairs with a student token that is not trained on are no longer valid: KD and CE see the same positions."""
    ids = found.student_chunk_id
    outside = (ids >= 0) & (loss_mask == 0)
    spoiled = torch.zeros_like(found.pair_valid)
    rows, columns = outside.nonzero(as_tuple=True)
    spoiled[rows, ids[rows, columns]] = True
    return replace(found, pair_valid=found.pair_valid & ~spoiled)


def _indices(values: list[Any]) -> Tensor | list[Any]:
    """Row indices as int64 where they are whole numbers, else as they are."""
    if all(isinstance(value, int) or (isinstance(value, Tensor) and value.ndim == 0) for value in values):
        return torch.tensor([int(value) for value in values], dtype=torch.long)
    return values


def _one_each(name: str, values: Sequence[Any] | None, count: int, default: Any) -> list[Any]:
    """One value per teacher."""
    if values is None:
        return [default] * count
    if len(values) != count:
        raise ValueError(
            f"{name} has {len(values)} entries for {count} teachers; expected one each. A teacher was probably "
            f"added in one list only. Fix: pass {count} {name}."
        )
    return list(values)


def _check_tokenizer(tokenizer: Any) -> None:
    if not callable(tokenizer):
        raise ValueError(
            f"a {type(tokenizer).__name__} was given as a tokenizer; expected one that can be called with texts. A "
            "name or a folder was probably passed. Fix: load it first, spanwise.load_tokenizer(name)."
        )


def _check_positive(what: str, values: Sequence[int]) -> None:
    wrong = [value for value in values if not isinstance(value, Integral) or value < 1]
    if wrong:
        raise ValueError(
            f"a {what} is {wrong[0]!r} (student first: {list(values)}); expected a whole number of at least 1. It was "
            f"probably read from a configuration that leaves it empty or at 0. Fix: pass the {what} of each side."
        )
