"""Judge an alignment by the oracle: wrong claims, coverage, and how many common boundaries it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from spanwise.xtoken import AlignmentBatch, TokenAligner
from tests.conftest import real_tokenizer
from tests.reference.alignment import boundaries, is_nfc, spans

_ALIGNERS: dict[tuple[str, str], TokenAligner] = {}


def aligner(student: str, teacher: str) -> TokenAligner:
    """An aligner of two real tokenizers, made once."""
    key = (student, teacher)
    if key not in _ALIGNERS:
        _ALIGNERS[key] = TokenAligner(real_tokenizer(student), real_tokenizer(teacher), byte_offsets=True)
    return _ALIGNERS[key]


@dataclass(frozen=True)
class Verdict:
    """wrong: pairs claimed correct that are not; coverage: student tokens in a correct pair; finest: share of the
    oracle's common boundaries; quality: of the row; missed: how many of these boundaries ours lacks."""

    wrong: int
    coverage: float
    finest: float
    quality: int
    missed: int


def ids_of(name: str, text: str) -> list[int]:
    return real_tokenizer(name)(text, add_special_tokens=False)["input_ids"]


def judge(student: str, teacher: str, text: str, cut: tuple[int | None, int | None] = (None, None)) -> Verdict:
    """Align ``text`` (sides cut to so many tokens) and compare with the oracle."""
    student_ids, teacher_ids = ids_of(student, text)[: cut[0]], ids_of(teacher, text)[: cut[1]]
    if not student_ids or not teacher_ids:
        return Verdict(0, 1.0, 1.0, 0, 0)
    found = aligner(student, teacher).align(torch.tensor([student_ids]), torch.tensor([teacher_ids]))
    check_form(found)
    return judged(found, real_tokenizer(student), real_tokenizer(teacher), text, student_ids, teacher_ids)


def judged(
    found: AlignmentBatch, student: Any, teacher: Any, text: str, student_ids: list[int], teacher_ids: list[int]
) -> Verdict:
    composed = is_nfc(student) or is_nfc(teacher)
    mine = boundaries(student, text, spans(student, text, student_ids), composed)
    theirs = boundaries(teacher, text, spans(teacher, text, teacher_ids), composed)
    my_chunks, their_chunks = found.student_chunk_id[0].tolist(), found.teacher_chunk_id[0].tolist()
    wrong, ours = 0, set()
    for pair in found.pair_is_correct[0].nonzero().flatten().tolist():
        left = [place for place, chunk in enumerate(my_chunks) if chunk == pair]
        right = [place for place, chunk in enumerate(their_chunks) if chunk == pair]
        here = (mine[left[0]][0], mine[left[-1]][1])
        there = (theirs[right[0]][0], theirs[right[-1]][1])
        wrong += here != there or None in here
        ours |= set(here)
    common = {p for span in mine for p in span} & {p for span in theirs for p in span} - {None}
    covered = sum(chunk >= 0 and bool(found.pair_is_correct[0, chunk]) for chunk in my_chunks)
    missed = len(common - ours)
    quality = int(found.quality[0])
    return Verdict(wrong, covered / len(my_chunks), 1 - missed / len(common), quality, missed)


def check_form(found: AlignmentBatch) -> None:
    """What holds for every alignment: contiguous increasing chunks, masks that agree with the pairs."""
    for row in range(len(found.num_chunks)):
        pairs = int(found.num_chunks[row])
        assert found.pair_valid[row].tolist() == [place < pairs for place in range(found.pair_valid.shape[1])]
        sizes = []
        for chunks in (found.student_chunk_id[row], found.teacher_chunk_id[row]):
            held = chunks[chunks >= 0]
            assert bool((held.diff() >= 0).all())
            assert bool((held < pairs).all())
            sizes.append(torch.bincount(held, minlength=pairs + 1))
            for chunk in held.unique().tolist():
                places = (chunks == chunk).nonzero().flatten()
                assert int(places[-1] - places[0]) + 1 == len(places)
        for pair in range(pairs):
            both = sizes[0][pair] > 0 and sizes[1][pair] > 0
            assert both == bool(found.pair_is_correct[row, pair])
            assert sizes[0][pair] + sizes[1][pair] > 0
        for chunks, exact in (
            (found.student_chunk_id[row], found.student_exact_partition_mask[row]),
            (found.teacher_chunk_id[row], found.teacher_exact_partition_mask[row]),
        ):
            single = (
                (sizes[0] == 1)
                & (sizes[1] == 1)
                & torch.cat([found.pair_is_correct[row, :pairs], torch.tensor([False])])
            )
            assert exact.tolist() == [chunk >= 0 and bool(single[chunk]) for chunk in chunks.tolist()]
