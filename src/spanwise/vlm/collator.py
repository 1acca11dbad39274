"""VLMCollator: conversations with images, videos or audio in, one right batch out.

It finds the processor's family by itself and takes the one path of ``pipeline.py``. Beyond the processor it costs
O(characters + tokens) per row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from spanwise.batch import BatchedDataDict
from spanwise.spans.chat import AssistantSpans
from spanwise.vlm.called import collate_called, takes_common_call
from spanwise.vlm.checks import refuse_no_rows
from spanwise.vlm.families import family_of
from spanwise.vlm.packing import check_family, pack_rows
from spanwise.vlm.pipeline import Settings, can_prove, collate_proven, is_own_class, template_source
from spanwise.vlm.pretokenized import as_document
from spanwise.vlm.search import searched_labels, template_labels

PACKINGS = ("neat", "flash", "thd")
LABELS = ("proven", "template", "search")


class VLMCollator:
    """Rows of conversations → one batch for a vision-language model. Picklable, without global state.

    Args:
        processor: a transformers processor (or tokenizer) with a chat template; other objects work with
            ``labels="template"`` or ``"search"``.
        labels: "proven" takes what the assistant said from the rendering itself and refuses what it cannot prove;
            "template" scans ids for role markers and "search" for answers, as older collators do.
        max_length: width before the shift. Rows that do not fit are cut behind their media, or an error.
        packing: lay documents end to end in rows of ``max_length`` tokens: "neat" with a 4-D block-causal mask, "flash"
            with an indexed mask, "thd" as one row with ``cu_seqlens``.
        drop_overlong: leave out rows that do not fit; ``left_out`` in the batch counts them.
        sanitize: break up special tokens that users typed, so that they stay text.
        allow_unlabelled: accept rows without an assistant turn and batches without labels.
        get_rope_index: the model's, for mRoPE positions in packs.
        hook: ``(batch, processor) -> batch`` on the tokenized batch, before the shift.

    The batch holds the processor's tensors, ``labels`` int64 already shifted (-100 outside what the assistant said),
    ``labels_shifted``, and ``n_images_per_sample`` / ``n_videos_per_sample`` where there are any. For a plain
    ``transformers.Trainer`` wrap it in ``spanwise.batch.for_trainer``.
    """

    def __init__(
        self,
        processor: Any,
        *,
        labels: Literal["proven", "template", "search"] = "proven",
        max_length: int | None = None,
        packing: Literal["neat", "flash", "thd"] | None = None,
        drop_overlong: bool = False,
        sanitize: bool = False,
        allow_unlabelled: bool = False,
        get_rope_index: Callable[..., Any] | None = None,
        hook: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        if labels not in LABELS:
            raise ValueError(
                f"labels={labels!r} was given; expected one of {LABELS}. It is probably misspelt. "
                "Fix: labels='proven' unless the processor has no chat template."
            )
        if packing not in (None, *PACKINGS):
            raise ValueError(
                f"packing={packing!r} was given; expected one of {PACKINGS}, or None. It is probably misspelt. "
                "Fix: packing='neat' for a model whose attention is sdpa."
            )
        if max_length is not None and max_length < 2:
            raise ValueError(
                f"max_length={max_length} was given; expected at least 2, since the shift takes one column. It was "
                "probably computed from an empty setting. Fix: pass the width of a row, or None for no limit."
            )
        if packing is not None and max_length is None:
            raise ValueError(
                f"packing={packing!r} was given without max_length; expected the width of a packed row. "
                "It was probably left out. Fix: pass max_length."
            )
        self.processor = processor
        self.family = family_of(processor)
        if packing is not None:
            check_family(self.family, get_rope_index)
        self.packing = packing
        self.get_rope_index = get_rope_index
        builder = {
            "proven": None,
            "template": partial(template_labels, fallback=searched_labels),
            "search": searched_labels,
        }[labels]
        self.settings = Settings(
            self.family, labels=labels, builder=builder, max_length=max_length, drop_overlong=drop_overlong,
            sanitize=sanitize, allow_unlabelled=allow_unlabelled, hook=hook,
        )  # fmt: skip
        if labels == "proven" and not can_prove(processor):
            raise ValueError(
                f"labels of a {type(processor).__name__} cannot be proven; expected a transformers processor or "
                "tokenizer with a chat template. The template is missing, or the object is not transformers' own. "
                "Fix: set processor.chat_template, or pass labels='template' or 'search'."
            )
        if self.family.call == "per_sample" and not is_own_class(processor):
            raise ValueError(
                f"a {type(processor).__name__} of remote code was given; expected a processor that takes a batch, and "
                f"{self.family.name}'s takes one sample at a time. Fix: use its function in "
                "spanwise.vlm.collate_fns.COLLATE_FNS, or transformers' own class."
            )
        self._find = AssistantSpans(template_source(processor)) if can_prove(processor) else None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> BatchedDataDict:
        """Collate rows; at least one."""
        refuse_no_rows(rows)
        if self.packing is not None:
            return pack_rows(rows, self)
        return self._collated(rows, self.settings)

    def document(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One row as 1-D tensors with labels in place, and its media: what packs are made of."""
        alone = replace(self.settings, shifted=False, max_length=None, drop_overlong=False)
        return as_document(self._collated([row], alone))

    def _collated(self, rows: Sequence[Mapping[str, Any]], settings: Settings) -> BatchedDataDict:
        if takes_common_call(self.processor, settings.family):
            return collate_proven(rows, self.processor, settings, self._find)
        return collate_called(rows, self.processor, settings, find=self._find)
