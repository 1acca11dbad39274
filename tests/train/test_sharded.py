"""Sharded models (FSDP2) on two processes: the curve of one process, and parameters that really are sharded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from spanwise.train.sharding import shard_by_decoder_layers
from spanwise.train.student import with_adapters
from tests.train import runs
from tests.train.small_tasks import alone, dealt, distill, masked, vision
from tests.train.two_ranks import on_two_ranks

SHARDED = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}


def test_sharded_models_give_the_curve_of_one_process_in_every_task(tmp_path: Path) -> None:
    """The first is also saved as one model, and continued from its shards when the newest checkpoint is gone."""
    teacher = runs.save_teacher(tmp_path / "teacher")
    fused, tied = distill(tmp_path, teacher, True), distill(tmp_path, teacher, True)
    tied["student"]["model"] = runs.config(tie_word_embeddings=True)
    tasks = [fused, tied, distill(tmp_path, teacher, False), vision(tmp_path), masked(tmp_path)]
    wanted = [alone(content, tmp_path / f"alone-{place}") for place, content in enumerate(tasks)]
    contents = [dealt(content, tmp_path / f"sharded-{place}", **SHARDED) for place, content in enumerate(tasks)]
    contents[0]["train"] |= {"save_strategy": "steps", "save_steps": 2}
    found = on_two_ranks(contents, tmp_path, "sharded", again=[0])
    for expected, ranks in zip(wanted, found, strict=True):
        for seen in ranks:
            assert seen["kinds"] == ["sharded"], "plain DDP would leave whole parameters"
            torch.testing.assert_close(seen["loss_per_step"], expected["loss_per_step"], rtol=2e-5, atol=1e-6)
    # Two micro-batches and one, twice over; the second epoch once more in the run that is continued.
    assert [[seen["fused"] for seen in ranks] for ranks in found] == [[9, 9], [6, 6], [0, 0], [0, 0], [0, 0]]
    assert all(seen["gathered"] for ranks in found for seen in ranks)
    for seen in found[0]:
        torch.testing.assert_close(seen["again"], wanted[0]["loss_per_step"], rtol=2e-5, atol=1e-6)
    saved, whole = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("sharded-0", "alone-0"))
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adapted", [False, True], ids=["bare", "adapters"])
def test_a_vision_tower_stays_with_the_root(adapted: bool) -> None:
    """LLaVA names layers that it does not have, on which accelerate would give up."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14} | sizes,
        text_config={"model_type": "llama", "vocab_size": 40} | sizes,
    )
    model: Any = LlavaForConditionalGeneration(config)
    if adapted:
        model = with_adapters(model, {"r": 2, "target_modules": ["q_proj"]})
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=None)
    shard_by_decoder_layers(plugin, model)
    assert plugin.transformer_cls_names_to_wrap == ["LlamaDecoderLayer"]
    plugin.transformer_cls_names_to_wrap = ["CLIPEncoderLayer"]
    shard_by_decoder_layers(plugin, model)
    assert plugin.transformer_cls_names_to_wrap == ["CLIPEncoderLayer"], "the user's word"
