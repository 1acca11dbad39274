"""Rows tokenized one by one where they are read (in DataLoader workers), and the collator that only pads them.

Each row is tokenized exactly, media included, so its length is known before it is padded or packed. Labels are not
shifted here: :func:`pad` and the packs do it once. O(one row) memory.

Shapes: S tokens, B rows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spanwise.batch import BatchedDataDict
from spanwise.spans.chat import IGNORE_INDEX, AssistantSpans
from spanwise.vlm.called import collate_called, takes_common_call
from spanwise.vlm.checks import conversations_of, refuse_no_rows, refuse_uneven, renumbered
from spanwise.vlm.families import TOKEN_KEYS, family_of
from spanwise.vlm.joining import joined_media, media_counts
from spanwise.vlm.labels import shift
from spanwise.vlm.media import has_media, with_fake_image
from spanwise.vlm.pipeline import Settings, can_prove, cast_pixels, collate_proven, template_source
from spanwise.vlm.search import searched_labels, template_labels
from spanwise.vlm.tokens import is_media_token, truncate

logger = logging.getLogger(__name__)

# Token-axis tensors of a row, and what pads them.
ROW_PADDING = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE_INDEX, "mm_token_type_ids": 0, "token_type_ids": 0}


class PreTokenizedDatasetWrapper(torch.utils.data.Dataset[dict[str, Any]]):
    """Tokenizes a row when it is asked for.

    Args:
        dataset: map-style, of rows with "conversation".
        processor: a transformers processor (labels are proven), or another object (labels by role markers).
        max_length: longer rows are replaced by another row (drawn from ``idx``, counted in ``replaced``), or cut.
        max_retries: how many other rows are tried.
        truncate: cut longer rows behind their media instead of replacing them.
        post_tokenize_hook: ``(batch, processor) -> batch`` on the row as a batch of one, labels included.
        inject_fake_images: put a white image, hidden from attention, into rows without media, so that every rank of a
            sharded model runs its vision tower.

    ``wrapper[i]`` is a dict of 1-D ``input_ids``, ``attention_mask``, ``labels`` (int64, not shifted, -100 outside what
    the assistant said), the row's media tensors, and ``n_images`` and ``n_videos`` where it has some.
    """

    def __init__(
        self,
        dataset: Any,
        processor: Any,
        max_length: int | None = None,
        max_retries: int = 10,
        truncate: bool = False,
        post_tokenize_hook: Callable[[Any, Any], Any] | None = None,
        inject_fake_images: bool = True,
    ) -> None:
        self.dataset = dataset
        self.processor = processor
        self.max_length = max_length
        self.max_retries = max_retries
        self.truncate = truncate
        self.post_tokenize_hook = post_tokenize_hook
        self.inject_fake_images = inject_fake_images
        self.replaced: Counter[str] = Counter()
        self._find = AssistantSpans(template_source(processor)) if can_prove(processor) else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        idx = index
        draws = torch.Generator().manual_seed(index)
        for _ in range(self.max_retries):
            row = self.tokenized(idx)
            size = len(row["input_ids"])
            if self.max_length is None or size <= self.max_length:
                return row
            self.replaced["overlong"] += 1
            logger.warning("row %d has %d tokens, max_length is %d: replaced by another.", idx, size, self.max_length)
            idx = int(torch.randint(len(self.dataset), (), generator=draws))
        raise ValueError(
            f"{self.max_retries} rows in turn are longer than max_length={self.max_length}; expected most rows to fit. "
            "Images become many tokens, or max_length is too small. Fix: raise max_length, pass truncate=True, or "
            "limit the image size in the processor."
        )

    def tokenized(self, idx: int) -> dict[str, Any]:
        """Row ``idx`` itself, however long; cut only with ``truncate``. Errors name it by ``idx``."""
        with renumbered(idx):
            return self._tokenized(self.dataset[idx])

    def _tokenized(self, example: Mapping[str, Any]) -> dict[str, Any]:
        conversations_of([example], need_assistant=True)
        if self.inject_fake_images and not has_media(example["conversation"]):
            example = {
                **example, "conversation": with_fake_image(example["conversation"]), "_injected_fake": True
            }  # fmt: skip
        settings = Settings(
            family_of(self.processor), allow_unlabelled=True, shifted=False, hook=self.post_tokenize_hook
        )
        if takes_common_call(self.processor, settings.family):
            tensors = dict(collate_proven([example], self.processor, settings, self._find))
        else:
            settings = replace(settings, builder=partial(template_labels, fallback=searched_labels))
            tensors = dict(collate_called([example], self.processor, settings, find=self._find))
        if self.truncate and self.max_length is not None:
            truncate(tensors, self.max_length, is_media_token(tensors["input_ids"], self.processor))
        return as_document(tensors)


def as_document(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of one row, not shifted, as that row: 1-D on the token axis, media as they are, counts as numbers."""
    document = {key: value[0] if key in ROW_PADDING else value for key, value in batch.items()}
    for name in ("n_images", "n_videos"):
        counted = document.pop(f"{name}_per_sample", None)
        if counted is not None:
            document[name] = int(counted[0])
    document.pop("labels_shifted", None)
    return document


def pad(examples: Sequence[Mapping[str, Any]], processor: Any, max_length: int | None = None) -> BatchedDataDict:
    """Pad pre-tokenized rows on the right, shift once, lay their media end to end.

    Args:
        examples: at least one row; see :class:`PreTokenizedDatasetWrapper`.
        processor: for its padding id (0 where it has none).
        max_length: the width before the shift; None is the longest row.

    Returns:
        The batch, in the rows' order; but where positions have three axes, rows with hidden media come last. Such
        models take the next image's size for each run of image tokens that attention *sees*: a hidden image in front
        would hand its size to the next row's.

    Raises:
        ValueError: a row would lose media tokens to ``max_length`` or the shift, or media cannot be joined.
    """
    refuse_no_rows(examples)
    refuse_uneven(examples, "input_ids", "attention_mask", "labels")
    if family_of(processor).three_axes:
        examples = sorted(examples, key=lambda example: _hides_media(example, processor))
    tokenizer = getattr(processor, "tokenizer", processor)
    fills = ROW_PADDING | {"input_ids": getattr(tokenizer, "pad_token_id", 0) or 0}
    width = max_length or max(len(example["input_ids"]) for example in examples)
    unknown = sorted({key for example in examples for key in example} & TOKEN_KEYS - fills.keys() - {"position_ids"})
    if unknown:
        raise ValueError(
            f"rows carry {unknown}; expected of the tensors with a token axis only {sorted(fills)}, since others are "
            "padded along more than tokens. Their processor makes them for a whole batch. Fix: collate the "
            "conversations with spanwise.vlm.VLMCollator, which lets it."
        )
    batch: dict[str, Any] = {}
    for key, fill in fills.items():
        if any(example.get(key) is not None for example in examples):
            batch[key] = torch.stack([_padded(example, key, fill, width) for example in examples])
    _refuse_cut_media(examples, width, processor)
    shift(batch)
    batch |= joined_media(examples)
    cast_pixels(batch, torch.bfloat16)
    for name, counted in media_counts(examples).items():
        if any(counted):
            batch[name] = torch.tensor(counted, dtype=torch.int64)
    return BatchedDataDict(batch)


def _hides_media(example: Mapping[str, Any], processor: Any) -> bool:
    media = is_media_token(torch.as_tensor(example["input_ids"]), processor)
    return bool((media & (torch.as_tensor(example["attention_mask"]) == 0)).any())


def _padded(example: Mapping[str, Any], key: str, fill: int, width: int) -> Tensor:
    value = example.get(key)
    if value is None:
        value = torch.zeros(len(example["input_ids"]), dtype=torch.int64)
    row = torch.as_tensor(value).reshape(-1)[:width]
    return nn.functional.pad(row, (0, width - len(row)), value=fill)


def _refuse_cut_media(examples: Sequence[Mapping[str, Any]], width: int, processor: Any) -> None:
    """The last of ``width`` columns counts as cut, too: the shift takes it from the inputs."""
    rows = [
        row
        for row, example in enumerate(examples)
        if bool(is_media_token(torch.as_tensor(example["input_ids"])[max(width - 1, 0) :], processor).any())
    ]
    if rows:
        raise ValueError(
            f"a width of {width} tokens cuts into the media of rows {rows}; expected every media token before the last "
            "of them, which has nothing to predict, since features without tokens break the model. The rows were "
            "tokenized for another length, or end in a medium. Fix: give PreTokenizedDatasetWrapper the same "
            "max_length, raise it here, or let text follow the last medium."
        )
