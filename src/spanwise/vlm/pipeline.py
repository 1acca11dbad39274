"""The one path that every family takes: copy → RGB → drop overlong → processor → hook → labels → shift → fake → counts.

Labels are proven wherever the processor is transformers' own and a chat template is at hand: the chat is rendered, the
rendering's spans are found, and the rendered text goes through the processor with character offsets (other objects:
``called.py``). Beyond the processor itself the cost is O(characters + tokens).

Shapes: B rows, S tokens.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from spanwise.batch import BatchedDataDict
from spanwise.spans.chat import IGNORE_INDEX, AssistantSpans, Span
from spanwise.spans.chat_template import ChatTemplate
from spanwise.vlm.audio import clips_of_rows, sampling_rate
from spanwise.vlm.checks import conversations_of, refuse_unmatched, renumbered, said_by_row
from spanwise.vlm.families import DEFAULT, TOKEN_AXES, TOKEN_KEYS, FamilySpec, family_of
from spanwise.vlm.labels import labels_of_row, refuse_unlabelled, shift
from spanwise.vlm.media import Conversation, Media, copied_in_rgb, count_media, gather
from spanwise.vlm.reading import as_template_reads
from spanwise.vlm.tokens import NothingFitsError, drop_overlong, hide_fake_media, is_media_token, truncate

Example = Mapping[str, Any]
LabelBuilder = Callable[[Tensor, Sequence[Any], Any], Tensor]
_PADDING = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE_INDEX}


@dataclass(frozen=True)
class Settings:
    """How a batch is made.

    Attributes:
        family: the processor's family.
        labels: "proven", or by a builder that looks at ids.
        builder: the label builder for "template" and "search", and for objects without a template.
        max_length: width of the batch before the shift; rows that do not fit are left out or cut behind their media.
        pad_to_max: pad to ``max_length`` instead of the longest row.
        drop_overlong: leave out what does not fit; else cut text and refuse to cut media.
        sanitize: break up special tokens that users typed.
        allow_unlabelled: accept a batch without labels.
        hook: changes the tokenized batch before the shift.
        shifted: shift labels; False leaves them in place for a collator that shifts later.
    """

    family: FamilySpec
    labels: Literal["proven", "template", "search"] = "proven"
    builder: LabelBuilder | None = None
    max_length: int | None = None
    pad_to_max: bool = False
    drop_overlong: bool = False
    sanitize: bool = False
    allow_unlabelled: bool = False
    hook: Callable[[Any, Any], Any] | None = None
    shifted: bool = True


def is_transformers(processor: Any) -> bool:
    """A processor or tokenizer of transformers; asked without importing it."""
    utils = sys.modules.get("transformers.processing_utils")
    base = sys.modules.get("transformers.tokenization_utils_base")
    return (utils is not None and isinstance(processor, utils.ProcessorMixin)) or (
        base is not None and isinstance(processor, base.PreTrainedTokenizerBase)
    )


def is_own_class(processor: Any) -> bool:
    """A class that ships with transformers, or one derived from it; remote code only derives from its base classes."""
    return any(base.__module__.startswith("transformers.models.") for base in type(processor).__mro__)


def template_source(processor: Any) -> Any | None:
    """The object whose chat template renders: the processor, else its tokenizer; None where neither has one."""
    for source in (processor, getattr(processor, "tokenizer", None)):
        if source is not None and getattr(source, "chat_template", None):
            return source
    return None


def can_prove(processor: Any) -> bool:
    """Whether labels can be proven for this processor."""
    return is_transformers(processor) and template_source(processor) is not None


def collate_proven(
    examples: Sequence[Example], processor: Any, settings: Settings, find: AssistantSpans | None = None
) -> BatchedDataDict:
    """Collate rows of conversations with a processor or tokenizer of transformers.

    Args:
        examples: rows with "conversation" and optional "audio"; not changed.
        processor: a transformers processor or tokenizer with a chat template.
        settings: see :class:`Settings`.
        find: the span finder of an earlier call, which remembers the template.

    Returns:
        The processor's tensors with labels [B, S - 1] already shifted; ``left_out`` counts rows by reason.
    """
    proven = settings.labels == "proven"
    conversations = conversations_of(examples, need_assistant=not settings.allow_unlabelled)
    conversations = copied_in_rgb(conversations, open_files=True)
    conversations = as_template_reads(conversations, template_source(processor))
    conversations = sanitized(conversations, processor, change=settings.sanitize)
    if proven:
        rendered = rendered_rows(find or AssistantSpans(template_source(processor)), conversations)
    else:
        template = ChatTemplate(template_source(processor))

        def render(rows: Sequence[int]) -> list[str]:
            return [template.render(conversations[row]) for row in rows]

        rendered = [(text, []) for text in said_by_row(render, range(len(conversations)), processor)]
    media = gather(conversations)
    media = replace(media, audio=clips_of_rows(media.audio, examples, sampling_rate(processor)))
    refuse_unmatched([text for text, _ in rendered], conversations, media, processor)
    rows = list(range(len(examples)))
    # Of an unknown family nothing is guessed before it is processed: a row that fits must stay.
    if settings.drop_overlong and settings.max_length is not None and family_of(processor) is not DEFAULT:
        _, rows = drop_overlong(conversations, processor, settings.max_length)
    while True:
        batch = _processed(rendered, media, rows, processor, settings)
        if settings.hook is not None:
            batch = hooked(batch, processor, settings.hook)
        fits = _rows_that_fit(batch, settings)
        if fits is None:
            break
        rows = [rows[place] for place in fits]
    kept = [conversations[row] for row in rows]
    if not proven and settings.builder is not None:
        batch["labels"] = settings.builder(batch["input_ids"], kept, processor)
    batch = finished(batch, kept, [examples[row] for row in rows], processor, settings)
    if len(rows) < len(examples):
        batch["left_out"] = dict(Counter(overlong=len(examples) - len(rows)))
    return batch


def finished(
    batch: Mapping[str, Any],
    conversations: Sequence[Conversation],
    examples: Sequence[Example],
    processor: Any,
    settings: Settings,
) -> BatchedDataDict:
    """Everything behind the labels: cut, pad, shift, fake media, counts, dtype."""
    batch = dict(batch)
    size = batch["input_ids"].shape[1]
    width = settings.max_length or size
    if settings.shifted and (settings.labels == "proven" or size > width):
        truncate(batch, width, is_media_token(batch["input_ids"], processor))
    if settings.pad_to_max:
        pad_columns(batch, width, processor)
    refuse_unlabelled(batch["labels"], allowed=settings.allow_unlabelled)
    blank = [row for row, example in enumerate(examples) if example.get("loss_multiplier", 1.0) == 0]
    if blank:
        batch["labels"] = batch["labels"].index_fill(0, torch.tensor(blank), IGNORE_INDEX)
    if settings.shifted:
        shift(batch)
    hide_fake_media(batch, processor, [row for row, example in enumerate(examples) if example.get("_injected_fake")])
    add_counts(batch, conversations)
    if settings.family.cast is not None:
        cast_pixels(batch, settings.family.cast)
    if not is_own_class(processor):
        for key in settings.family.drop:
            batch.pop(key, None)
    return BatchedDataDict(batch)


def rendered_rows(finder: AssistantSpans, conversations: Sequence[Conversation]) -> list[tuple[str, list[Span]]]:
    """Each row's text and what the assistant said in it; an error names the row."""
    rendered = []
    for row, conversation in enumerate(conversations):
        with renumbered(row):
            rendered.append(finder(conversation))
    return rendered


def _processed(
    rendered: Sequence[tuple[str, list[Span]]], media: Media, rows: Sequence[int], processor: Any, settings: Settings
) -> dict[str, Any]:
    """The processor's output for these of the rendered rows, with proven labels [B, S] where these are asked for."""

    def call(some: Sequence[int]) -> dict[str, Any]:
        return _call_processor([rendered[row][0] for row in some], media.of_rows(some), processor, settings)

    output = said_by_row(call, rows, processor)
    offsets, replacements = output.pop("offset_mapping", None), output.pop("text_replacement_offsets", None)
    if settings.labels == "proven":
        labels = []
        for place, row in enumerate(rows):
            brings_media = bool(media.images[row] or media.videos[row] or media.audio[row])
            with renumbered(row):
                labels.append(
                    labels_of_row(
                        output["input_ids"][place],
                        output["attention_mask"][place] if "attention_mask" in output else None,
                        *rendered[row],
                        offsets=None if offsets is None else torch.as_tensor(offsets[place]),
                        replacements=_replacements_of(replacements, place, brings_media),
                        processor=processor,
                    )
                )
        output["labels"] = torch.stack(labels)
    return output


def _call_processor(texts: list[str], media: Media, processor: Any, settings: Settings) -> dict[str, Any]:
    """Rendered texts and media through the processor, right-padded, with character offsets.

    Tensors are asked for media alone: transformers turns lists of offsets into tensors number by number, which would
    cost more than tokenizing.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    arguments: dict[str, Any] = {
        "padding": True, "padding_side": "right", "return_offsets_mapping": bool(tokenizer.is_fast),
    } | dict(settings.family.options)  # fmt: skip
    begins = getattr(tokenizer, "bos_token", None)
    if processor is tokenizer or (begins and texts[0].startswith(begins)):
        arguments["add_special_tokens"] = False
    if not any(media.videos):
        arguments.pop("do_sample_frames", None)
    if processor is tokenizer:
        return _as_tensors(processor(texts, **arguments))
    for kind, given in (("images", media.images), ("videos", media.videos)):
        if any(given):
            arguments |= {kind: given, f"{kind}_kwargs": {"return_tensors": "pt"}}
    clips = [clip for row in media.audio for clip in row]
    if clips:
        rate = sampling_rate(processor)
        arguments |= {
            "audio": clips,
            "audio_kwargs": {"return_tensors": "pt"} | ({} if rate is None else {"sampling_rate": rate}),
        }
    return _as_tensors(processor(text=texts, return_text_replacement_offsets=True, **arguments))


def _as_tensors(output: Mapping[str, Any]) -> dict[str, Any]:
    """Every rectangular list of numbers as a tensor; anything else as it is."""
    tensors: dict[str, Any] = dict(output)
    for key, value in output.items():
        if isinstance(value, (list, np.ndarray)) and key not in ("text_replacement_offsets", "video_metadata"):
            with contextlib.suppress(ValueError, TypeError):  # ragged, or not numbers
                tensors[key] = torch.from_numpy(np.asarray(value))
    return tensors


def _replacements_of(reported: Any, row: int, brings_media: bool) -> Any:
    """What the processor says it replaced in a row; () with nothing to replace; None where it says nothing."""
    if reported is not None and len(reported) > row:
        return () if isinstance(reported[row], Tensor) else reported[row]  # an empty list may come as an empty tensor
    return None if brings_media else ()


def sanitized(conversations: Sequence[Conversation], processor: Any, *, change: bool) -> list[Any]:
    """User text with special tokens typed in it: reported in the log, or (``change``) broken by a zero-width space."""
    from spanwise.vlm.sanitize import break_up_specials

    return break_up_specials(conversations, processor, change=change)


def _rows_that_fit(batch: Mapping[str, Any], settings: Settings) -> list[int] | None:
    """Rows within ``max_length`` when overlong ones are to be left out and some are; None when nothing is to do."""
    if not settings.drop_overlong or settings.max_length is None or batch["input_ids"].shape[1] <= settings.max_length:
        return None
    lengths = batch["attention_mask"].sum(dim=1)
    fits = (lengths <= settings.max_length).nonzero().flatten().tolist()
    if not fits:
        raise NothingFitsError(
            f"All {len(lengths)} samples in batch exceed max_length={settings.max_length} (they have "
            f"{int(lengths.min())} to {int(lengths.max())} tokens); expected at least one that fits. Images become "
            "many tokens, or max_length is too small. Fix: raise max_length, limit the image size in the processor, or "
            "filter the data set."
        )
    return fits if len(fits) < len(lengths) else None


def hooked(batch: dict[str, Any], processor: Any, hook: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Run a hook; labels that are there must have stayed in step with the ids it returns."""
    returned: Any = hook(batch, processor)
    if not isinstance(returned, Mapping):
        raise ValueError(
            f"the hook returned a {type(returned).__name__}; expected the batch. It probably changes the batch in "
            "place. Fix: let it return the batch."
        )
    changed = dict(returned)
    if "labels" in changed and changed["labels"].shape != changed["input_ids"].shape:
        raise ValueError(
            f"the hook returned input_ids {tuple(changed['input_ids'].shape)} beside labels "
            f"{tuple(changed['labels'].shape)}; expected equal shapes. The hook inserts tokens and forgets the labels. "
            "Fix: let it extend batch['labels'] by -100 where it extends batch['input_ids']."
        )
    return changed


def pad_columns(batch: dict[str, Any], width: int, processor: Any) -> None:
    """Pad every token-axis tensor of our batch on the right to ``width`` columns."""
    tokenizer = getattr(processor, "tokenizer", processor)
    fill = _PADDING | {"input_ids": getattr(tokenizer, "pad_token_id", None) or 0}
    for key in TOKEN_KEYS & set(batch):
        value, axis = batch[key], TOKEN_AXES[key]
        missing = width - value.shape[axis]
        if missing > 0:
            behind = [0, 0] * (value.ndim - 1 - axis % value.ndim)
            batch[key] = torch.nn.functional.pad(value, (*behind, 0, missing), value=fill.get(key, 0))


def add_counts(batch: dict[str, Any], conversations: Sequence[Conversation]) -> None:
    """``n_images_per_sample`` and ``n_videos_per_sample``, int64 [B], absent where all are 0."""
    for name, counts in zip(("n_images_per_sample", "n_videos_per_sample"), count_media(conversations), strict=True):
        if any(counts):
            batch[name] = torch.tensor(counts, dtype=torch.int64)


def cast_pixels(batch: dict[str, Any], dtype: torch.dtype) -> None:
    """Cast pixel values, whether they are one tensor or a list of tensors."""
    for key in ("pixel_values", "pixel_values_videos"):
        value = batch.get(key)
        if isinstance(value, Tensor):
            batch[key] = value.to(dtype)
        elif isinstance(value, list):
            batch[key] = [entry.to(dtype) if isinstance(entry, Tensor) else entry for entry in value]
