"""The names and arguments that are kept from NeMo Automodel's collate functions."""

from __future__ import annotations

import inspect

import pytest
import torch

from spanwise.vlm import collate_fns

# As the seed lists them: names in order, and the defaults of those that have one.
SIGNATURES: dict[str, dict[str, object]] = {
    "make_robust_collate": {"dataset": ..., "collate_fn": ..., "max_retries": 10},
    "_find_pattern_indices": {
        "template": ..., "pattern": ..., "search_start_index": 0, "allow_first_token_mismatch": False,
    },
    "_extract_assistant_text": {"message": ...},
    "_decode_single_token": {"tokenizer": ..., "token_id": ...},
    "build_labels": {"input_ids_batch": ..., "conversations": ..., "processor": ...},
    "_get_assistant_marker": {"tokenizer": ...},
    "_get_stop_token_id": {"tokenizer": ...},
    "build_labels_from_template": {"input_ids_batch": ..., "conversations": ..., "processor": ...},
    "phi4_mm_collate_fn": {"examples": ..., "processor": ...},
    "_extract_media_from_conversations": {"conversations": ...},
    "_count_media_per_sample": {"conversations": ...},
    "qwen2_5_collate_fn": {"examples": ..., "processor": ...},
    "qwen3_omni_collate_fn": {"examples": ..., "processor": ..., "use_audio_in_video": False},
    "kimi_vl_collate_fn": {"examples": ..., "processor": ..., "max_length": None},
    "_expand_image_tokens": {
        "input_ids": ..., "attention_mask": ..., "grid_thws": ..., "media_token_id": ..., "merge_kernel_size": (2, 2),
    },
    "kimi_k25_vl_collate_fn": {"examples": ..., "processor": ..., "max_length": None},
    "nemotron_parse_collate_fn": {
        "examples": ..., "processor": ..., "task_prompt": "</s><s><predict_bbox><predict_classes><output_markdown>",
    },
    "_ensure_rgb": {"conversations": ...},
    "_extract_image_config": {"processor": ...},
    "_estimate_media_tokens": {"conversation": ..., "processor": ...},
    "_drop_overlong_samples": {"conversations": ..., "processor": ..., "max_length": ...},
    "default_collate_fn": {"examples": ..., "processor": ..., "max_length": None, "_post_tokenize_hook": None},
    "pad_collate_fn": {"examples": ..., "processor": ..., "max_length": None},
    "neat_packed_vlm_collater": {
        "batch": ..., "padding_idx": 0, "max_length": None, "attn_implementation": "sdpa",
    },
    "_inject_thinking_prefix_tokens": {"batch": ..., "tokenizer": ...},
    "gemma4_prefix_collate_fn": {"examples": ..., "processor": ..., "max_length": None},
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_those_of_the_seed(name: str) -> None:
    parameters = list(inspect.signature(getattr(collate_fns, name)).parameters.values())
    wanted = SIGNATURES[name]
    ours = {
        parameter.name: ... if parameter.default is inspect.Parameter.empty else parameter.default
        for parameter in parameters[: len(wanted)]
    }
    assert list(ours.items()) == list(wanted.items())
    assert all(parameter.default is not inspect.Parameter.empty for parameter in parameters[len(wanted) :])


def test_patterns_are_found_by_the_seed_s_argument_names() -> None:
    found = collate_fns._find_pattern_indices(
        template=torch.tensor([1, 2, 1, 2]), pattern=torch.tensor([1, 2]), search_start_index=1
    )
    assert found == (2, 4)
