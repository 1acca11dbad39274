"""The integer plan of prefix KL: for every student boundary, the teacher tokens that cover what comes next.

A student token that covers the bytes [o, e) is supervised when both sides agree on these bytes, its pair is valid, it
has a predictor, and an unbroken run of teacher tokens with predictors covers [o, e). Special tokens are supervised
where their pair holds the teacher's special token of the same role. O(B·(S + T)) integers, one sorted search per side.

Shapes: B rows, S student length, T teacher length, P pairs, N supervised positions, U teacher rows read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int, Int64
from torch import Tensor

from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.chunks import alignment_from_flat_batch
from spanwise.xtoken.losses.plan import document_of_position, plan_tokens, without_predictor
from spanwise.xtoken.losses.trie import PrefixTrie

# Byte positions stay below this; row and segment go above it in the search key.
BYTE_ROOM = 1 << 36


@dataclass(frozen=True)
class PrefixPlan:
    """Where prefix KL compares, and what of the teacher it reads.

    Attributes:
        rows: student predictor positions (row · S + position).
        targets: the student token that follows.
        document: document of each.
        weight: its document's ``sample_mask``.
        teacher_rows: teacher predictor positions that are read, ascending, each once.
        following: the teacher token that follows each of them.
        first: index into ``teacher_rows`` of the token that covers the first byte.
        passed: bytes of that token before the boundary.
        links: further teacher tokens needed to cover the student token; their rows follow ``first`` directly.
        needed: bytes of the last of them that the student token covers; 0 without links.
        documents: D.
        lengths: (B, S, T).
        counted: the count, where it is not the summed weight.
    """

    rows: Int64[Tensor, " N"]
    targets: Int64[Tensor, " N"]
    document: Int64[Tensor, " N"]
    weight: Float32[Tensor, " N"]
    teacher_rows: Int64[Tensor, " U"]
    following: Int64[Tensor, " U"]
    first: Int64[Tensor, " N"]
    passed: Int64[Tensor, " N"]
    links: Int64[Tensor, " N"]
    needed: Int64[Tensor, " N"]
    documents: int
    lengths: tuple[int, int, int]
    counted: Float32[Tensor, ""] | None = None

    @property
    def count(self) -> Float32[Tensor, ""]:
        """What the loss counts: the summed weight of the supervised positions."""
        return self.weight.sum() if self.counted is None else self.counted

    def of_document(self, weights: Float[Tensor, " D"]) -> PrefixPlan:
        """The same positions and count, with every document's part of the total multiplied by ``weights``."""
        return replace(self, weight=self.weight * weights.float()[self.document], counted=self.count)

    def to(self, device: torch.device | str) -> PrefixPlan:
        """The same plan on another device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: t.to(device) for name, t in tensors.items() if isinstance(t, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True)
class _Spans:
    """Tokens of one side with known bytes, in order. ``run`` is equal for neighbours without a gap between them."""

    position: Tensor
    begin: Tensor
    end: Tensor
    key: Tensor
    run: Tensor


def plan_prefix(
    alignment: AlignmentBatch,
    trie: PrefixTrie,
    student_input_ids: Int[Tensor, "B S"],
    teacher_input_ids: Int[Tensor, "B T"],
    *,
    sample_mask: Float32[Tensor, " D"] | None = None,
    token_mask: Int[Tensor, "B S"] | Bool[Tensor, "B S"] | None = None,
    teacher_token_mask: Int[Tensor, "B T"] | Bool[Tensor, "B T"] | None = None,
    segment_ids: Int[Tensor, "B S"] | None = None,
    teacher_segment_ids: Int[Tensor, "B T"] | None = None,
) -> PrefixPlan:
    """Which positions prefix KL supervises. Arguments as in :func:`~spanwise.xtoken.losses.plan.plan_chunks`.

    ``alignment`` must carry byte offsets (``byte_offsets=True`` on aligner and collator).
    """
    student_end, teacher_end = alignment.student_byte_end, alignment.teacher_byte_end
    if student_end is None or teacher_end is None:
        raise ValueError(
            "prefix KL was given an alignment without byte offsets; expected student_byte_end and teacher_byte_end. "
            "They are only made on request. Fix: pass byte_offsets=True to the aligner and the collator."
        )
    _check_ids(student_input_ids, trie.student_vocab_size, "student")
    _check_ids(teacher_input_ids, trie.teacher_vocab_size, "teacher")
    batch, length = student_input_ids.shape
    student_group = _group(student_input_ids, segment_ids)
    teacher_group = _group(teacher_input_ids, teacher_segment_ids)
    teacher = _spans(teacher_input_ids, teacher_end, trie.teacher_length, teacher_group)
    student = _spans(student_input_ids, student_end, trie.student_length, student_group)
    teacher_orphan = without_predictor(teacher_input_ids, teacher_segment_ids, teacher_token_mask).reshape(-1)
    partner = _special_partners(alignment, trie, student_input_ids, teacher_input_ids)

    # Teacher position and bytes for every student position; -1 where nothing covers it.
    size = batch * length
    first, passed, links, needed = (torch.full((size,), fill, device=student_end.device) for fill in (-1, 0, 0, 0))
    if len(teacher.key) and len(student.key):
        group_key = student_group.reshape(-1)[student.position] * BYTE_ROOM
        head = torch.searchsorted(teacher.key, group_key + student.begin, right=True).clamp(max=len(teacher.key) - 1)
        last = torch.searchsorted(teacher.key, group_key + student.end).clamp(max=len(teacher.key) - 1)
        same_group = teacher_group.reshape(-1)[teacher.position[head]] == student_group.reshape(-1)[student.position]
        covered = same_group & (teacher.begin[head] <= student.begin) & (teacher.end[head] > student.begin)
        covered &= (teacher.end[last] >= student.end) & (teacher.run[head] == teacher.run[last])
        covered &= ~teacher_orphan[teacher.position[head]]
        at, head, last = student.position[covered], head[covered], last[covered]
        first[at] = teacher.position[head]
        passed[at] = student.begin[covered] - teacher.begin[head]
        links[at] = last - head
        needed[at] = torch.where(last > head, student.end[covered] - teacher.begin[last], 0)
    partnered = (partner >= 0) & ~teacher_orphan[partner.clamp(min=0)] if len(teacher_orphan) else partner >= 0
    first = torch.where(partnered, partner, first)

    paired = alignment.student_chunk_id >= 0
    paired &= torch.gather(alignment.pair_valid, 1, alignment.student_chunk_id.clamp(min=0))
    supervised = paired & (first >= 0).view(batch, length)
    if token_mask is not None:
        supervised &= ~without_predictor(student_input_ids, None, token_mask)
    tokens = plan_tokens(student_input_ids, supervised, sample_mask=sample_mask, segment_ids=segment_ids)
    at = tokens.rows + 1
    first, passed, links, needed = first[at], passed[at], links[at], needed[at]
    read = torch.zeros(teacher_input_ids.numel() + 1, dtype=torch.long, device=first.device)
    read.index_add_(0, first, torch.ones_like(first))
    read.index_add_(0, first + links + 1, -torch.ones_like(first))
    teacher_positions = (read.cumsum(0)[:-1] > 0).nonzero().squeeze(1)
    place = torch.zeros(teacher_input_ids.numel(), dtype=torch.long, device=first.device)
    place[teacher_positions] = torch.arange(len(teacher_positions), device=first.device)
    return PrefixPlan(
        tokens.rows,
        tokens.targets,
        tokens.document,
        tokens.weight,
        teacher_positions - 1,
        teacher_input_ids.reshape(-1)[teacher_positions].long(),
        place[first],
        passed,
        links,
        needed,
        tokens.documents,
        (batch, length, teacher_input_ids.shape[1]),
    )


def count_prefix_positions(
    alignment: AlignmentBatch,
    trie: PrefixTrie,
    student_input_ids: Int[Tensor, "B S"],
    teacher_input_ids: Int[Tensor, "B T"],
    **options: Any,
) -> Float32[Tensor, ""]:
    """The count of prefix_kl; arguments as in :func:`plan_prefix`."""
    return plan_prefix(alignment, trie, student_input_ids, teacher_input_ids, **options).count


def prefix_plan_of_batch(batch: Mapping[str, Any], trie: PrefixTrie, *, teacher_index: int | None = None) -> PrefixPlan:
    """:func:`plan_prefix` with everything read from a collator's batch."""
    infix = "" if teacher_index is None else f"{teacher_index}_"
    return plan_prefix(
        alignment_from_flat_batch(batch, teacher_index=teacher_index),
        trie,
        batch["input_ids"],
        batch[f"teacher_{infix}input_ids"],
        sample_mask=batch.get("sample_mask"),
        token_mask=batch.get("token_mask"),
        teacher_token_mask=batch.get(f"teacher_{infix}token_mask"),
        segment_ids=batch.get("segment_ids"),
        teacher_segment_ids=batch.get(f"teacher_{infix}segment_ids"),
    )


def _group(ids: Tensor, segment_ids: Tensor | None) -> Tensor:
    """One number per document, equal on both sides; bytes are only compared inside it."""
    if segment_ids is not None:
        return document_of_position(segment_ids)
    return torch.arange(len(ids), device=ids.device)[:, None].expand(ids.shape)


def _spans(ids: Tensor, byte_end: Tensor, length: Tensor, group: Tensor) -> _Spans:
    """The tokens whose bytes are known and as many as the tokenizer says; others (dummy prefixes, specials) are left
    out."""
    end = byte_end.long()
    size = length[ids.clamp(0, len(length) - 1)]
    begin = end - size
    usable = (end >= 0) & (size > 0) & (begin >= 0) & (group >= 0)
    previous = torch.full_like(end, -1)
    previous[:, 1:] = torch.where(group[:, 1:] == group[:, :-1], end[:, :-1], -1)
    usable &= (previous < 0) | (previous == begin)
    position = usable.reshape(-1).nonzero().squeeze(1)
    begin, end = begin.reshape(-1)[position], end.reshape(-1)[position]
    owner = group.reshape(-1)[position]
    breaks = torch.ones_like(position)
    breaks[1:] = ((position[1:] != position[:-1] + 1) | (begin[1:] != end[:-1]) | (owner[1:] != owner[:-1])).long()
    return _Spans(position, begin, end, owner * BYTE_ROOM + end, breaks.cumsum(0))


def _special_partners(alignment: AlignmentBatch, trie: PrefixTrie, student_ids: Tensor, teacher_ids: Tensor) -> Tensor:
    """For each student position, the teacher position of its partner by role in the same pair, else -1."""
    batch, pairs = alignment.pair_valid.shape
    row = torch.arange(batch, device=student_ids.device)[:, None]
    holder = torch.full((batch * pairs,), -1, dtype=torch.long, device=student_ids.device)
    chunk = alignment.teacher_chunk_id
    by_role = (chunk >= 0) & (trie.teacher_length[teacher_ids] == 0) & (trie.whole[teacher_ids] >= 0)
    key = (row * pairs + chunk)[by_role]
    holder[key] = by_role.reshape(-1).nonzero().squeeze(1)
    chunk = alignment.student_chunk_id
    partner = holder[(row * pairs + chunk.clamp(min=0)).reshape(-1)] if batch else holder
    if not len(partner) or not teacher_ids.numel():
        return torch.full((student_ids.numel(),), -1, dtype=torch.long, device=student_ids.device)
    role = trie.whole[teacher_ids.reshape(-1)[partner.clamp(min=0)]] == student_ids.reshape(-1)
    special = trie.student_length[student_ids.reshape(-1)] == 0
    return torch.where((chunk.reshape(-1) >= 0) & special & role, partner, -1)


def _check_ids(ids: Tensor, width: int, side: str) -> None:
    largest = int(ids.max()) if ids.numel() else -1
    if largest >= width:
        raise ValueError(
            f"the {side}'s text holds token {largest:,} and the trie knows {width:,} {side} tokens; expected ids below "
            f"that. The trie was probably built for another {side}. Fix: build it from the tokenizers in use."
        )
