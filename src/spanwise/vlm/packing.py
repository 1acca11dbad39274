"""Packs: documents laid end to end, each keeping its own positions, its own media and its own attention.

Lengths are exact (every document is tokenized, media included), rows are filled best-fit, and what fits nowhere is
counted, never dropped in silence. A document is shifted before it is laid down, so nothing predicts across a seam.
Memory: O(tokens), and O(B·S²) bools for the 4-D mask of sdpa and eager; the indexed and THD forms stay linear.

Shapes: S row width, B rows, T tokens of all documents, n documents, M position axes (3 for mRoPE).
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from spanwise.batch import BatchedDataDict
from spanwise.spans.chat import IGNORE_INDEX
from spanwise.spans.pack import block_causal_mask, pack_documents
from spanwise.vlm.checks import refuse_uneven, renumbered
from spanwise.vlm.families import TOKEN_KEYS, FamilySpec, family_of
from spanwise.vlm.joining import joined_media, media_counts
from spanwise.vlm.pipeline import cast_pixels
from spanwise.vlm.tokens import NothingFitsError, is_media_token

logger = logging.getLogger(__name__)
_TYPE_ROWS = ("mm_token_type_ids", "token_type_ids")
_TOKEN_ROWS = {"labels": IGNORE_INDEX, "attention_mask": 0} | dict.fromkeys(_TYPE_ROWS, 0)
_PLACES = ("input_ids", "position_ids")
# What models count positions from; each takes some of them.
_ROPE_ARGUMENTS = {
    "input_ids", "attention_mask", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts",
    "audio_seqlens", "second_per_grids",
}  # fmt: skip
FLASH = ("flash_attention_2", "flash_attention_3")


class PackedDatasetWrapper(torch.utils.data.Dataset[dict[str, Any]]):
    """Packs made when they are asked for; lazy and picklable.

    Args:
        inner_dataset: rows as :class:`~spanwise.vlm.PreTokenizedDatasetWrapper` gives them.
        bins: row indices of each pack, as :meth:`from_lengths` or ``pack_documents`` give them.
        pack_size: tokens per pack at most, after the shift.
        padding_idx: kept for the collater.
        get_rope_index: the model's ``get_rope_index``, where positions have three axes.
    """

    def __init__(
        self,
        inner_dataset: Any,
        bins: Sequence[Sequence[int]],
        pack_size: int,
        padding_idx: int = 0,
        get_rope_index: Callable[..., Any] | None = None,
    ) -> None:
        processor = getattr(inner_dataset, "processor", None)
        if processor is not None:
            check_family(family_of(processor), get_rope_index)
        self.inner = inner_dataset
        self.bins = [list(rows) for rows in bins]
        self.pack_size = pack_size
        self.padding_idx = padding_idx
        self.get_rope_index = get_rope_index
        self.left_out: Counter[str] = Counter()

    @classmethod
    def from_lengths(
        cls,
        inner_dataset: Any,
        lengths: Sequence[int],
        pack_size: int,
        padding_idx: int = 0,
        get_rope_index: Callable[..., Any] | None = None,
    ) -> PackedDatasetWrapper:
        """Plan packs from exact lengths (:func:`exact_lengths`); what fits nowhere is counted in ``left_out``."""
        if len(lengths) != len(inner_dataset):
            raise ValueError(
                f"{len(lengths)} lengths were given for {len(inner_dataset)} rows; expected one per row. They were "
                "probably taken from another data set. Fix: pass exact_lengths(inner_dataset)."
            )
        plan = pack_documents([max(length - 1, 0) for length in lengths], pack_size)
        packed = cls(inner_dataset, plan.rows, pack_size, padding_idx, get_rope_index)
        if plan.too_long:
            packed.left_out["overlong"] = len(plan.too_long)
        return packed

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> dict[str, Any]:
        documents = [self.inner[row] for row in self.bins[index]]
        processor = getattr(self.inner, "processor", None)
        if processor is not None:
            refuse_last_medium(documents, self.bins[index], processor)
        return pack(documents, self.pack_size, self.get_rope_index)


def exact_lengths(dataset: Any) -> list[int]:
    """Tokens of every row of a pre-tokenized data set, media included. O(rows) processor calls, O(1) memory beyond."""
    tokenized = getattr(dataset, "tokenized", dataset.__getitem__)
    return [len(tokenized(row)["input_ids"]) for row in range(len(dataset))]


def check_family(family: FamilySpec, get_rope_index: Callable[..., Any] | None) -> None:
    """Packs promise that a document is in them what it is alone.

    Raises:
        ValueError: media of this family attend both ways, which the masks of a pack do not say.
    """
    if family.three_axes and get_rope_index is None:
        logger.warning(
            "%s counts the positions of images on three axes, and packs were asked for without the model's "
            "get_rope_index: they count on one, and documents with images are not what they are alone. Pass "
            "get_rope_index=model.model.get_rope_index.", family.name,
        )  # fmt: skip
    if family.two_way:
        raise ValueError(
            f"packing was asked for {family.name}; expected a family whose tokens attend backwards only. Its image "
            "tokens see each other both ways and some of its layers see a window, which the masks of a pack do not "
            "say: a packed document would not be what it is alone. Fix: leave packing out and pad, with rows of like "
            "length in one batch."
        )


def refuse_last_medium(documents: Sequence[Mapping[str, Any]], names: Sequence[int], processor: Any) -> None:
    """The shift takes each document's last token; a medium there would keep its features and lose a token."""
    ends = [
        name
        for name, document in zip(names, documents, strict=True)
        if len(document["input_ids"]) and bool(is_media_token(document["input_ids"][-1:], processor).any())
    ]
    if ends:
        raise ValueError(
            f"rows {ends} end in a medium; expected text behind it, since the last token of a document is only "
            "predicted and features without tokens break the model. The rows were cut there, or the template closes no "
            "turn. Fix: let text follow the last medium, or tokenize the rows for another length."
        )


def pack(
    documents: Sequence[Mapping[str, Any]], pack_size: int, get_rope_index: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Shift each document and lay them end to end.

    Args:
        documents: rows with 1-D ``input_ids``, ``attention_mask``, ``labels`` (not shifted) and media.
        pack_size: tokens at most.
        get_rope_index: for positions with three axes.

    Returns:
        ``input_ids``, ``labels`` [S]; ``attention_mask`` [S] with 1…n per document and 0 where a document hides a
        token; ``position_ids`` [S] or [M, S]; the documents' media; ``n_images``, ``n_videos``.
    """
    refuse_uneven(documents, "input_ids", "attention_mask", "labels")
    sizes = [len(document["input_ids"]) - 1 for document in documents]
    if sum(sizes) > pack_size:
        raise ValueError(
            f"a pack of {len(documents)} documents has {sum(sizes)} tokens; expected at most {pack_size}. The plan was "
            "made from lengths that are not this data set's. Fix: plan with exact_lengths of the same data set."
        )
    unknown = sorted({key for document in documents for key in document} & TOKEN_KEYS - {*_TOKEN_ROWS, *_PLACES})
    if unknown:
        raise ValueError(
            f"documents carry {unknown}; expected of the tensors with a token axis only {sorted(_TOKEN_ROWS)}, since "
            "what others mean across documents is their model's own. The processor makes them for one row at a time. "
            "Fix: pad this family instead of packing it, or leave these keys out of the rows."
        )
    packed: dict[str, Any] = {
        "input_ids": torch.cat([document["input_ids"][:-1] for document in documents]),
        "labels": torch.cat([document["labels"][1:] for document in documents]),
        "attention_mask": torch.cat(
            [document["attention_mask"][:-1].long() * (place + 1) for place, document in enumerate(documents)]
        ),
        "position_ids": torch.cat([_positions(document, get_rope_index) for document in documents], dim=-1),
    }
    for key in _TYPE_ROWS:
        if any(key in document for document in documents):
            packed[key] = torch.cat(
                [
                    document.get(key, torch.zeros(size + 1).long())[:-1]
                    for document, size in zip(documents, sizes, strict=True)
                ]
            )
    packed |= joined_media(documents)
    packed |= {name.removesuffix("_per_sample"): sum(counted) for name, counted in media_counts(documents).items()}
    return packed


def _positions(document: Mapping[str, Any], get_rope_index: Callable[..., Any] | None) -> Tensor:
    size = len(document["input_ids"]) - 1
    if get_rope_index is None:
        return torch.arange(size)
    named = dict(document)
    if (heard := document.get("feature_attention_mask")) is not None:
        named["audio_seqlens"] = heard.sum(dim=-1)
    if (seconds := document.get("video_second_per_grid")) is not None:
        named["second_per_grids"] = torch.as_tensor(seconds)
    for key in ("input_ids", "mm_token_type_ids"):
        named[key] = document[key][None] if document.get(key) is not None else None
    named["attention_mask"] = torch.ones_like(named["input_ids"])  # what a document hides still has its place
    known = inspect.signature(get_rope_index).parameters.keys() & _ROPE_ARGUMENTS
    positions = get_rope_index(**{key: named[key] for key in known if named.get(key) is not None})[0]
    return positions[:, 0, :-1]


def neat_packed(
    batch: Sequence[Mapping[str, Any]],
    padding_idx: int = 0,
    max_length: int | None = None,
    attn_implementation: str = "sdpa",
) -> BatchedDataDict:
    """Pad packs to one width and give the mask the form that the attention needs. No shift: packs are shifted.

    With ``flash_attention_2`` the mask stays [B, S] with 1…n per document: the kernel must cut at changes of that
    number (a patched ``_get_unpad_data``), since a plain one would let documents see each other. With ``sdpa`` and
    ``eager`` it becomes bool [B, 1, S, S]: same document, not later, not padding; transformers' eager attention needs
    it through :func:`additive_mask`.
    """
    if not batch:
        return BatchedDataDict()
    if attn_implementation not in ("sdpa", "eager", *FLASH):
        raise ValueError(
            f"attn_implementation={attn_implementation!r} was given; expected 'sdpa', 'eager' or one of {FLASH}. The "
            "model's attention knows no packed documents. Fix: load the model with attn_implementation='sdpa'."
        )
    refuse_uneven(batch, "input_ids", "attention_mask", "position_ids")
    longest = max(len(pack["input_ids"]) for pack in batch)
    width = longest if max_length is None else max_length
    if longest > width:
        raise ValueError(
            f"a pack has {longest} tokens; expected at most max_length={width}. The packs were planned for another "
            "width. Fix: pass the pack_size of the packs as max_length."
        )
    result: dict[str, Any] = {"input_ids": _stacked(batch, "input_ids", padding_idx, width)}
    for key, fill in _TOKEN_ROWS.items():
        if any(key in pack for pack in batch):
            result[key] = _stacked(batch, key, fill, width)
    positions = [
        nn.functional.pad(p := torch.as_tensor(pack["position_ids"]), (0, width - p.shape[-1])) for pack in batch
    ]
    result["position_ids"] = torch.stack(positions, dim=positions[0].ndim - 1)
    result |= joined_media(batch)
    cast_pixels(result, torch.bfloat16)
    for name, counted in media_counts(batch).items():
        if any(counted):
            result[name] = torch.tensor(counted, dtype=torch.int64)
    if attn_implementation not in FLASH:
        result["attention_mask"] = block_causal_mask(result["attention_mask"])
    result["labels_shifted"] = True
    return BatchedDataDict(result)


def additive_mask(allowed: Bool[Tensor, "B 1 S S"], dtype: torch.dtype) -> Float[Tensor, "B 1 S S"]:
    """The mask in the form that transformers' eager attention adds to its scores: 0 where allowed, else the minimum.

    Eager attention adds whatever 4-D mask it gets; a bool mask would be added as 0 and 1 and hide nothing.

    >>> additive_mask(torch.tensor([[[[True, False], [True, True]]]]), torch.float16).tolist()
    [[[[0.0, -65504.0], [0.0, 0.0]]]]
    """
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


def thd_packed(batch: Sequence[Mapping[str, Any]]) -> BatchedDataDict:
    """All documents of all packs as one row, for kernels that take ``cu_seqlens``.

    Returns:
        ``input_ids``, ``labels`` int64 [1, T]; ``position_ids`` [1, T] or [M, 1, T]; ``cu_seqlens`` int32 [n + 1];
        ``max_seqlen`` int; token types [1, T]; media end to end, their numbers int64 [1]. Tokens that a document hides
        from attention cannot be expressed in this form and are an error.
    """
    if not batch:
        return BatchedDataDict()
    refuse_uneven(batch, "input_ids", "attention_mask", "position_ids", "labels")
    sizes: list[int] = []
    for place, pack in enumerate(batch):
        index = torch.as_tensor(pack["attention_mask"])
        numbers, counts = torch.unique_consecutive(index, return_counts=True)
        if (numbers == 0).any():
            raise ValueError(
                f"pack {place} hides tokens from attention (mask 0); expected none, since cu_seqlens can only cut. "
                "Fake images were injected, or the pack is padded. Fix: inject_fake_images=False, and pass packs "
                "unpadded."
            )
        sizes += counts.tolist()
    ends = torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)
    positions = torch.cat([torch.as_tensor(pack["position_ids"]) for pack in batch], dim=-1)
    result: dict[str, Any] = {
        "input_ids": torch.cat([torch.as_tensor(pack["input_ids"]) for pack in batch])[None],
        "labels": torch.cat([torch.as_tensor(pack["labels"]) for pack in batch])[None],
        "position_ids": positions[None] if positions.ndim == 1 else positions[:, None],
        "cu_seqlens": ends.to(torch.int32),
        "max_seqlen": max(sizes),
    }
    for key in _TYPE_ROWS:
        if any(key in pack for pack in batch):
            result[key] = torch.cat([pack.get(key, torch.zeros_like(pack["input_ids"])) for pack in batch])[None]
    for name, counted in media_counts(batch).items():
        if any(counted):
            result[name] = torch.tensor([sum(counted)], dtype=torch.int64)
    return BatchedDataDict(result | joined_media(batch) | {"labels_shifted": True})


def _stacked(batch: Sequence[Mapping[str, Any]], key: str, fill: int, width: int) -> Tensor:
    rows = [
        torch.as_tensor(pack[key]) if key in pack else torch.full((len(pack["input_ids"]),), fill) for pack in batch
    ]
    return torch.stack([nn.functional.pad(row, (0, width - len(row)), value=fill) for row in rows])


def pack_rows(rows: Sequence[Mapping[str, Any]], collator: Any) -> BatchedDataDict:
    """Tokenize rows one by one and pack them within this batch, for ``VLMCollator(packing=…)``."""
    width = collator.settings.max_length
    documents = []
    for place, row in enumerate(rows):
        with renumbered(place):
            documents.append(collator.document(row))
    plan = pack_documents([max(len(document["input_ids"]) - 1, 0) for document in documents], width)
    if plan.too_long and (not collator.settings.drop_overlong or not plan.rows):
        longest = max(len(documents[row]["input_ids"]) for row in plan.too_long)
        raise (ValueError if plan.rows else NothingFitsError)(
            f"rows {plan.too_long} have up to {longest} tokens; expected at most max_length={width} + 1. Their images "
            "or texts are too long for a pack. Fix: raise max_length, or pass drop_overlong=True to leave them out "
            "(of several: a batch without rows is none)."
        )
    kept = [row for row in range(len(rows)) if row not in set(plan.too_long)]
    refuse_last_medium([documents[row] for row in kept], kept, collator.processor)
    packs = [pack([documents[row] for row in bin_rows], width, collator.get_rope_index) for bin_rows in plan.rows]
    tokenizer = getattr(collator.processor, "tokenizer", collator.processor)
    if collator.packing == "thd":
        batch = thd_packed(packs)
    else:
        attention = "sdpa" if collator.packing == "neat" else FLASH[0]
        batch = neat_packed(packs, getattr(tokenizer, "pad_token_id", None) or 0, width, attention)
    if plan.too_long:
        batch["left_out"] = {"overlong": len(plan.too_long)}
    return batch
