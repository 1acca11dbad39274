"""The collate functions under the names that NeMo Automodel gave them; each is a thin call of the one pipeline.

They look up ``build_labels``, ``build_labels_from_template`` and the availability flags through this module's globals
when called, so both can be replaced here. With transformers' own processors labels are proven (see ``pipeline.py``);
the builders are used only if one was replaced, if there is no chat template, or for objects that are not transformers'.

Shapes: B rows, S tokens. Labels leave **already shifted**; ``labels_shifted`` in the batch says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spanwise.batch import BatchedDataDict
from spanwise.vlm import gemma4, media, nemotron, packing, pretokenized, remote, search, tokens
from spanwise.vlm.called import aligned_labels, collate_called, takes_common_call
from spanwise.vlm.checks import conversations_of, said_by_row
from spanwise.vlm.families import (
    DEFAULT,
    FamilySpec,
    kimi_k25,
    kimi_vl,
    llava_onevision,
    nemotron_omni,
    nemotron_parse,
    phi4_multimodal,
    qwen2_5_vl,
    qwen3_omni,
)
from spanwise.vlm.packing import PackedDatasetWrapper
from spanwise.vlm.pipeline import Settings, can_prove, collate_proven, finished, is_own_class
from spanwise.vlm.pretokenized import PreTokenizedDatasetWrapper
from spanwise.vlm.robust import make_robust_collate

logger = logging.getLogger(__name__)
Examples = Sequence[Mapping[str, Any]]

HAVE_QWEN_OMNI_UTILS = importlib.util.find_spec("qwen_omni_utils") is not None
process_mm_info: Callable[..., Any] | None = None  # None: imported from qwen_omni_utils when needed

_IMSTART_TEMPLATE_PROCESSORS = search.IMSTART_PROCESSORS
_GEMMA4_MODEL_TURN = gemma4.MODEL_TURN
_GEMMA4_THINKING_PREFIX = gemma4.THINKING_PREFIX

_find_pattern_indices = search.find_pattern
_extract_assistant_text = search.assistant_text
_decode_single_token = search.decode_single_token
_get_assistant_marker = search.assistant_marker
_get_stop_token_id = search.stop_token_id
_extract_media_from_conversations = media.flat_media
_count_media_per_sample = media.count_media
_ensure_rgb = media.ensure_rgb
_expand_image_tokens = tokens.expand_image_tokens
_extract_image_config = tokens.image_config
_estimate_media_tokens = tokens.estimate_media_tokens
_drop_overlong_samples = tokens.drop_overlong
_inject_thinking_prefix_tokens = gemma4.with_thinking_prefix


def build_labels(input_ids_batch: Tensor, conversations: Sequence[Any], processor: Any) -> Tensor:
    """Labels by searching each answer's tokens; not shifted. Kept for compatibility: see ``search.searched_labels``."""
    return search.searched_labels(input_ids_batch, conversations, processor)


def build_labels_from_template(input_ids_batch: Tensor, conversations: Sequence[Any], processor: Any) -> Tensor:
    """Labels between role markers; not shifted. Kept for compatibility: see ``search.template_labels``."""
    return search.template_labels(input_ids_batch, conversations, processor, build_labels)


_OWN_BUILDERS = (build_labels, build_labels_from_template)


def _builders_replaced() -> bool:
    return (build_labels, build_labels_from_template) != _OWN_BUILDERS


def _current_builder(ids: Tensor, conversations: Sequence[Any], processor: Any) -> Tensor:
    return build_labels_from_template(ids, conversations, processor)


def _settings(processor: Any, family: FamilySpec, **options: Any) -> Settings:
    """Proven where that is possible and no builder was replaced; whoever brings a builder answers for its labels."""
    proven = can_prove(processor) and not _builders_replaced()
    return Settings(
        family, labels="proven" if proven else "template", builder=_current_builder, allow_unlabelled=not proven,
        **options,
    )  # fmt: skip


def _collate(examples: Examples, processor: Any, family: FamilySpec, **options: Any) -> BatchedDataDict:
    """One batch, from the pipeline's own call where it suits the processor, else in the family's style."""
    settings = _settings(processor, family, **options)
    if takes_common_call(processor, family):
        return collate_proven(examples, processor, replace(settings, pad_to_max=settings.max_length is not None))
    return collate_called(examples, processor, settings)


def default_collate_fn(
    examples: Examples,
    processor: Any,
    max_length: int | None = None,
    _post_tokenize_hook: Callable[[Any, Any], Any] | None = None,
    *,
    drop_overlong: bool = True,
) -> BatchedDataDict:
    """Any processor: RGB, one batched call, hook, labels; pixel values in bfloat16.

    Args:
        examples: rows with "conversation"; not changed.
        processor: a transformers processor, or an object with ``apply_chat_template``.
        max_length: overlong rows are left out (or, with ``drop_overlong=False``, cut behind their media) and all rows
            padded to this width, before the shift.
        _post_tokenize_hook: ``(batch, processor) -> batch`` behind the tokenizer.
        drop_overlong: see ``max_length``.
    """
    return _collate(
        examples, processor, DEFAULT, max_length=max_length,
        drop_overlong=drop_overlong and max_length is not None, hook=_post_tokenize_hook,
    )  # fmt: skip


def qwen2_5_collate_fn(examples: Examples, processor: Any) -> BatchedDataDict:
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: rendered texts and flat media lists; frames are taken as they are."""
    return _collate(examples, processor, qwen2_5_vl.FAMILY)


def llava_onevision_collate_fn(examples: Examples, processor: Any) -> BatchedDataDict:
    """LLaVA-OneVision: as :func:`qwen2_5_collate_fn`."""
    return _collate(examples, processor, llava_onevision.FAMILY)


def qwen3_omni_collate_fn(examples: Examples, processor: Any, use_audio_in_video: bool = False) -> BatchedDataDict:
    """Qwen3-Omni: media as ``qwen_omni_utils`` reads them, right padding.

    Raises:
        ImportError: ``qwen_omni_utils`` is missing. ``VLMCollator`` does without it.
    """
    if not HAVE_QWEN_OMNI_UTILS:
        raise ImportError(
            "qwen3_omni_collate_fn reads media with qwen_omni_utils, which is not installed. "
            "Fix: pip install 'spanwise[vlm]' qwen-omni-utils, or use spanwise.vlm.VLMCollator, which does without."
        )
    read = process_mm_info
    if read is None:
        read = importlib.import_module("qwen_omni_utils").process_mm_info

    def call(processor: Any, conversations: list[Any], *_: Any) -> dict[str, Any]:
        return remote.omni_call(
            processor, conversations, read, use_audio_in_video=use_audio_in_video, own_class=is_own_class(processor)
        )

    return collate_called(examples, processor, _settings(processor, qwen3_omni.FAMILY), call)


def phi4_mm_collate_fn(examples: Examples, processor: Any) -> BatchedDataDict:
    """Phi-4-multimodal: the tokenizer's template, "audio" of each row, ``input_mode``."""
    return _collate(examples, processor, phi4_multimodal.FAMILY)


def kimi_vl_collate_fn(
    examples: Examples, processor: Any, max_length: int | None = None, drop_overlong: bool = True
) -> BatchedDataDict:
    """Kimi-VL: overlong rows are left out (or cut behind their media), then every row is padded to ``max_length``."""
    return _collate(
        examples, processor, kimi_vl.FAMILY, max_length=max_length,
        drop_overlong=drop_overlong and max_length is not None,
    )  # fmt: skip


def kimi_k25_vl_collate_fn(
    examples: Examples, processor: Any, max_length: int | None = None, drop_overlong: bool = False
) -> BatchedDataDict:
    """Kimi-K2.5: one call per sample, placeholders expanded from the grid, every row padded to ``max_length``.

    Overlong rows are cut, or left out with ``drop_overlong``. A cut that reaches image tokens takes that row's images
    out (its count is 0); with transformers' own processor it is an error instead. ``grid_thws`` and ``image_grid_hws``
    are there with either.
    """
    if takes_common_call(processor, kimi_k25.FAMILY):
        done = _collate(examples, processor, kimi_k25.FAMILY, max_length=max_length, drop_overlong=drop_overlong)
        if "image_grid_thw" in done:
            done["grid_thws"] = done["image_grid_thw"]
            done["image_grid_hws"] = done["image_grid_thw"][:, 1:]
        return done
    settings = _settings(processor, kimi_k25.FAMILY)
    proven = settings.labels == "proven"
    conversations: list[Any] = media.copied_in_rgb(conversations_of(examples, need_assistant=proven))
    kept = list(range(len(conversations)))
    if drop_overlong:
        conversations, kept = tokens.drop_overlong(conversations, processor, max_length)

    def labels_of(row: dict[str, Any], place: int) -> Tensor:
        alone = {key: row[key][None] for key in ("input_ids", "attention_mask")}
        return aligned_labels(alone, [conversations[place]], processor)[0]

    rows, places = remote.kimi_k25_rows(
        processor, conversations, max_length=max_length, drop_overlong=drop_overlong,
        labels_of=labels_of if proven else None,
    )  # fmt: skip
    batch = remote.kimi_k25_batch(rows, processor, max_length)
    counts = batch.pop("n_images_per_sample", None)
    conversations = [conversations[place] for place in places]
    if not proven:
        batch["labels"] = _current_builder(batch["input_ids"], conversations, processor)
    kept = [kept[place] for place in places]
    done = finished(
        batch, conversations, [examples[row] for row in kept], processor, replace(settings, labels="template")
    )
    done.pop("n_images_per_sample", None)
    if counts is not None:
        done["n_images_per_sample"] = counts
    if len(kept) < len(examples):
        done["left_out"] = {"overlong": len(examples) - len(kept)}
    return done


def nemotron_parse_collate_fn(
    examples: Examples,
    processor: Any,
    task_prompt: str = "</s><s><predict_bbox><predict_classes><output_markdown>",
) -> BatchedDataDict:
    """Nemotron-Parse: the first image, task prompt and first answer as decoder text; no chat template.

    The batch holds ``decoder_input_ids`` = ids[:, :-1], ``decoder_attention_mask`` and labels = ids[:, 1:] with the
    prompt masked. The decoder's start token is put first where the prompt does not begin with it.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    searched = _builders_replaced() or not getattr(tokenizer, "is_fast", False)
    conversations = media.copied_in_rgb(conversations_of(examples, need_assistant=not searched))
    images, targets = nemotron.parse_inputs(conversations)
    texts = [task_prompt + target for target in targets]
    start_id, pad_id = nemotron.start_and_pad_ids(tokenizer)

    def call(rows: Sequence[int]) -> dict[str, Any]:
        shown, said = [images[row] for row in rows], [texts[row] for row in rows]
        return dict(processor(images=shown, text=said, padding=True, return_tensors="pt"))

    batch = nemotron.with_start(said_by_row(call, range(len(texts)), processor), start_id)
    ids = batch["input_ids"]
    labels = None if searched else nemotron.target_labels(ids, texts, targets, tokenizer)
    if labels is None:  # there is no chat template, so markers mean nothing here: search, unless a builder was replaced
        search_answer = build_labels_from_template is _OWN_BUILDERS[1]
        builder = build_labels if search_answer else build_labels_from_template
        labels = builder(ids, conversations, processor)
    batch["labels"] = labels
    settings = Settings(nemotron_parse.FAMILY, labels="template", allow_unlabelled=searched)
    done = finished(batch, [], examples, processor, settings)
    done["decoder_input_ids"] = ids[:, :-1].clone()
    done["decoder_attention_mask"] = (done["decoder_input_ids"] != pad_id).long()
    counts = [int(image is not None) for image in images]
    if any(counts):
        done["n_images_per_sample"] = torch.tensor(counts, dtype=torch.int64)
    return done


def nemotron_omni_collate_fn(examples: Examples, processor: Any, max_length: int | None = None) -> BatchedDataDict:
    """Nemotron-Nano-Omni: one call per sample with its images, one list of video frames and one waveform."""
    return _collate(examples, processor, nemotron_omni.FAMILY, max_length=max_length)


def gemma4_prefix_collate_fn(examples: Examples, processor: Any, max_length: int | None = None) -> BatchedDataDict:
    """Gemma 4 with an empty thinking channel in front of every answer: seen, never trained on."""

    def insert(batch: dict[str, Any], _: Any) -> dict[str, Any]:
        return _inject_thinking_prefix_tokens(batch, getattr(processor, "tokenizer", processor))

    return default_collate_fn(examples, processor, max_length, insert)


def pad_collate_fn(examples: Examples, processor: Any, max_length: int | None = None) -> BatchedDataDict:
    """Pre-tokenized rows: padded, shifted once, media end to end in bfloat16."""
    return pretokenized.pad(examples, processor, max_length)


def neat_packed_vlm_collater(
    batch: Sequence[Mapping[str, Any]],
    padding_idx: int = 0,
    max_length: int | None = None,
    attn_implementation: str = "sdpa",
) -> BatchedDataDict:
    """Packs padded to one width with the mask that the attention needs; no shift. [] gives an empty batch."""
    return packing.neat_packed(batch, padding_idx, max_length, attn_implementation)


def packed_sequence_thd_vlm_collater(batch: Sequence[Mapping[str, Any]]) -> BatchedDataDict:
    """Packs as one row with ``cu_seqlens`` int32 [n + 1] and ``max_seqlen``; no shift."""
    return packing.thd_packed(batch)


COLLATE_FNS: dict[str, Callable[..., Any]] = {
    "Qwen2_5_VLProcessor": qwen2_5_collate_fn,
    "Qwen3OmniMoeProcessor": qwen3_omni_collate_fn,
    "KimiVLProcessor": kimi_vl_collate_fn,
    "KimiK25Processor": kimi_k25_vl_collate_fn,
    "Kimi_K25Processor": kimi_k25_vl_collate_fn,
    "NemotronParseProcessor": nemotron_parse_collate_fn,
    "NemotronH_Nano_Omni_Reasoning_V3Processor": nemotron_omni_collate_fn,
    "NemotronH_Omni_Reasoning_V3Processor": nemotron_omni_collate_fn,
    "LlavaOneVisionProcessor": llava_onevision_collate_fn,
    "LlavaOnevisionProcessor": llava_onevision_collate_fn,
    "default": default_collate_fn,
}

__all__ = [
    "COLLATE_FNS",
    "PackedDatasetWrapper",
    "PreTokenizedDatasetWrapper",
    "build_labels",
    "build_labels_from_template",
    "default_collate_fn",
    "gemma4_prefix_collate_fn",
    "kimi_k25_vl_collate_fn",
    "kimi_vl_collate_fn",
    "llava_onevision_collate_fn",
    "logger",
    "make_robust_collate",
    "neat_packed_vlm_collater",
    "nemotron_omni_collate_fn",
    "nemotron_parse_collate_fn",
    "packed_sequence_thd_vlm_collater",
    "pad_collate_fn",
    "phi4_mm_collate_fn",
    "qwen2_5_collate_fn",
    "qwen3_omni_collate_fn",
]
