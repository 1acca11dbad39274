"""Labels of a batch from proven spans, and the shift that every collator applies once.

A rendered chat's spans are characters; the processor replaces each placeholder by a longer text and reports where
(``text_replacement_offsets``), so spans move exactly with it. Where a processor reports nothing, text tokens are
aligned around the runs of media tokens, or the row is refused. O(tokens) per row.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from spanwise.spans.chat import IGNORE_INDEX, Span, span_labels, tokens_inside
from spanwise.spans.chat_template import UnprovenSpanError
from spanwise.spans.table import gpt2_alphabet
from spanwise.vlm.families import TOKEN_AXES, TOKEN_KEYS
from spanwise.vlm.tokens import media_token_ids

logger = logging.getLogger(__name__)


def labels_of_row(
    input_ids: Int64[Tensor, " S"],
    attention_mask: Tensor | None,
    text: str,
    spans: Sequence[Span],
    *,
    offsets: Tensor | None,
    replacements: Sequence[Mapping[str, Any]] | None,
    processor: Any,
) -> Int64[Tensor, " S"]:
    """Labels of one row, not shifted; padding is -100.

    Args:
        input_ids: the row as the model sees it.
        attention_mask: 0 on padding; None if there is none.
        text: the rendered chat before placeholders were replaced.
        spans: what the assistant said, in characters of ``text``.
        offsets: characters of each token in the text after replacement; None where the processor gives none.
        replacements: ``span`` and ``new_span`` of each replacement; None where the processor does not report them.
        processor: for the ids of media tokens.
    """
    if offsets is not None and replacements is not None and _of_this_text(offsets, text, replacements):
        labels = span_labels(input_ids, offsets, moved_spans(spans, replacements))
        if replacements:  # an image in an answer is shown, not said
            labels = labels.masked_fill(tokens_inside(offsets, [r["new_span"] for r in replacements]), IGNORE_INDEX)
    else:
        labels = _aligned_labels(input_ids, attention_mask, text, spans, processor)
    return labels if attention_mask is None else labels.masked_fill(attention_mask == 0, IGNORE_INDEX)


def _of_this_text(offsets: Tensor, text: str, replacements: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the offsets end where the text does, blanks apart; some processors put words of their own in front."""
    grown = sum(
        entry["new_span"][1] - entry["new_span"][0] - entry["span"][1] + entry["span"][0] for entry in replacements
    )
    missing = len(text) + grown - (int(offsets.max()) if len(offsets) else 0)
    return missing >= 0 and not text[len(text) - missing :].strip()


def moved_spans(spans: Sequence[Span], replacements: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Spans in the text after replacement.

    >>> moved_spans([(0, 2), (6, 8)], [{"span": (3, 4), "new_span": (3, 9)}])
    [(0, 2), (11, 13)]
    """

    def moved(place: int) -> int:
        return place + sum(
            (new[1] - new[0]) - (old[1] - old[0])
            for old, new in ((entry["span"], entry["new_span"]) for entry in replacements)
            if old[1] <= place
        )

    return [(moved(start), moved(end)) for start, end in spans]


def _aligned_labels(
    input_ids: Int64[Tensor, " S"], attention_mask: Tensor | None, text: str, spans: Sequence[Span], processor: Any
) -> Int64[Tensor, " S"]:
    """Align the rendered text's own tokens with the row, both without media tokens."""
    tokenizer = getattr(processor, "tokenizer", processor)
    ids, offsets = _own_tokens(tokenizer, text)
    own = span_labels(ids, offsets, spans)
    own_ids = torch.tensor(ids, dtype=torch.int64)
    media = torch.tensor(sorted(media_token_ids(processor)), dtype=torch.int64)
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    places = (real & ~torch.isin(input_ids, media)).nonzero().flatten()
    kept = ~torch.isin(own_ids, media)
    begin = len(places) - int(kept.sum())
    if begin < 0 or not torch.equal(input_ids[places[begin:]], own_ids[kept]):
        raise UnprovenSpanError(
            f"the tokens of {type(processor).__name__} and those of its rendered text differ in more than media "
            "tokens; expected equal tokens around each medium, since it reports no offsets of what it replaces. It "
            "probably rewrites text around media. Fix: pass labels='template', or update transformers."
        )
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    labels[places[begin:]] = own[kept]
    return labels


def _own_tokens(tokenizer: Any, text: str) -> tuple[list[int], list[Span]]:
    """A text's ids and their characters, from the tokenizer's offsets or from the bytes that its tokens spell."""
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    offsets = _spelled_offsets(ids, tokenizer, text)
    if offsets is None:
        raise UnprovenSpanError(
            f"{type(tokenizer).__name__} gives no character offsets and its tokens do not spell the text byte by byte; "
            "expected one or the other, since labels are proven in characters. A slow tokenizer was probably loaded. "
            "Fix: load the fast one, or use spanwise.vlm.VLMCollator(labels='template')."
        )
    return ids, offsets


def _spelled_offsets(ids: Sequence[int], tokenizer: Any, text: str) -> list[Span] | None:
    """Characters of each token of a byte-level tokenizer; None where its tokens, end to end, are not the text."""
    letters = gpt2_alphabet()
    added = {token_id: word for word, token_id in tokenizer.get_added_vocab().items()}
    spelled = []
    for token_id, piece in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        if token_id not in added and not (isinstance(piece, str) and letters.keys() >= set(piece)):
            return None
        spelled.append(added[token_id].encode() if token_id in added else bytes(letters[sign] for sign in piece))
    if b"".join(spelled) != text.encode():
        return None
    begins = [place for place, sign in enumerate(text) for _ in sign.encode()] + [len(text)]
    ends = list(accumulate(map(len, spelled)))
    return [
        (begins[end - len(own)], begins[end - 1] + 1 if own else begins[end])
        for end, own in zip(ends, spelled, strict=True)
    ]


def shift(batch: dict[str, Any]) -> None:
    """Once for every batch: labels lose their first column, every other token-axis tensor its last."""
    for key in TOKEN_KEYS & set(batch):
        axis = TOKEN_AXES[key]
        batch[key] = batch[key].narrow(axis, int(key == "labels"), batch[key].shape[axis] - 1).contiguous()
    batch["labels_shifted"] = True


def refuse_unlabelled(labels: Int64[Tensor, "B S"], *, allowed: bool) -> None:
    """A batch without any label is an error unless allowed; rows without one are named in the log."""
    empty = (labels == IGNORE_INDEX).all(dim=1).nonzero().flatten().tolist()
    if empty and len(empty) == len(labels) and not allowed:
        raise ValueError(
            f"none of the {len(labels)} rows has a label; expected something said by an assistant in at least one. The "
            "answers are empty, or max_length cuts them all off. Fix: raise max_length, check the data's roles, or "
            "pass allow_unlabelled=True."
        )
    if empty and not allowed:
        logger.warning("rows %s of a batch of %d have no label.", empty, len(labels))
