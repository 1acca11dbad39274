"""The names and arguments that are kept from XLM's MLM package."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing

import pytest

import spanwise.mlm as room

NAMES = {
    "RotaryTransformerMLMModel": (
        "num_embeddings d_model num_layers nhead padding_idx mask_idx dim_feedforward dropout activation "
        "layer_norm_eps rotary_emb_dim max_length force_flash_attn use_flex_attn final_layer_without_normalization"
    ),
    "MLMLoss": "loss_on_padding loss_on_visible_tokens model tokenizer use_num_masked_factor",
    "MLMPredictor": "max_steps max_new_tokens tokenizer model noise_schedule top_k top_p skip_special_tokens",
    "DefaultMLMCollator": "tokenizer block_size noise_schedule loss_on_padding truncate add_bos add_eos",
    "DefaultInfillMLMCollator": "tokenizer block_size noise_schedule loss_on_padding truncate add_bos add_eos",
    "MLMInfillWithExactTargetPredCollator": "tokenizer block_size noise_schedule loss_on_padding truncate add_bos",
    "MLMSeq2SeqTrainCollator": "tokenizer noise_schedule block_size input_block_size add_bos add_eos truncate",
    "MLMSeq2SeqCollator": "tokenizer noise_schedule block_size input_block_size add_bos add_eos truncate",
    "MLMSeq2SeqPredCollator": "tokenizer noise_schedule block_size input_block_size add_bos add_eos truncate",
    "PackedMLMCollator": "tokenizer block_size noise_schedule use_flex_attn",
    "MLMEmptyDataset": "tokenizer num_examples max_length",
    "MLMEmptyDatasetFromLengthRef": "tokenizer num_examples length_ref_file min_length",
    "PaplUnconditionalMLMDataset": "tokenizer examples_per_node lengths",
    "HistoryTopKPlugin": "output_dir k max_new_tokens",
}
FORWARD = "x_t attention_mask positions token_type_ids"
TYPES = {
    "MLMBatch": (
        "input_ids attention_mask target_ids noise_t noise_weight fixed_positions_mask positions segment_ids "
        "labels_shifted"
    ),
    "PackedFlexMLMBatch": "input_ids target_ids positions segment_ids",
    "MLMSeq2SeqPredictionBatch": "input_ids attention_mask target_ids",
    "MLMUncondtionalPredictionBatch": "input_ids attention_mask",
    "MLMLossDict": "loss",
    "MLMPredictionDict": "loss text ids time_taken output_start_idx steps_taken tokens_per_forward forwards",
    "MLMStepResults": "x",
}


@pytest.mark.parametrize("name", NAMES)
def test_arguments_come_in_the_reference_order(name):
    ours = [parameter for parameter in inspect.signature(getattr(room, name)).parameters if parameter != "self"]
    wanted = NAMES[name].split()
    assert ours[: len(wanted)] == wanted


def test_forward_takes_the_reference_arguments():
    assert list(inspect.signature(room.RotaryTransformerMLMModel.forward).parameters)[1:5] == FORWARD.split()


@pytest.mark.parametrize("name", TYPES)
def test_types_are_typed_dictionaries(name):
    kind = getattr(room, name)
    assert typing.is_typeddict(kind)
    assert set(kind.__annotations__) == set(TYPES[name].split())


def test_the_model_is_a_protocol_and_a_misspelt_name_has_an_alias():
    assert typing.Protocol in room.MLMModel.__mro__
    assert list(inspect.signature(room.MLMModel.__call__).parameters)[1:4] == FORWARD.split()[:3]
    assert room.MLMUnconditionalPredictionBatch is room.MLMUncondtionalPredictionBatch


def test_classes_keep_their_parents():
    assert issubclass(room.MLMSeq2SeqPredCollator, room.MLMSeq2SeqCollator)
    assert issubclass(room.HistoryTopKPlugin, room.HistoryPluginBase)
    assert set(room.__all__) <= set(dir(room))


def test_importing_the_room_loads_no_transformers():
    program = "import sys, spanwise.mlm; print('transformers' in sys.modules, 'datasets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
