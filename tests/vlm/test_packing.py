"""Packs: nothing lost, nothing cut, and the model cannot tell a packed document from one alone."""

from __future__ import annotations

import inspect
import logging
import pickle
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from spanwise.vlm import PackedDatasetWrapper, PreTokenizedDatasetWrapper, VLMCollator, exact_lengths
from spanwise.vlm.collate_fns import (
    default_collate_fn,
    neat_packed_vlm_collater,
    packed_sequence_thd_vlm_collater,
    pad_collate_fn,
)
from spanwise.vlm.packing import additive_mask, pack
from tests.vlm import processors
from tests.vlm.tiny_model import qwen2_5_vl_model


def row(text: str, answer: str, *sizes: tuple[int, int]) -> dict[str, Any]:
    images = [{"type": "image", "image": Image.effect_noise(size, 40 + 10 * place)} for place, size in enumerate(sizes)]
    return {
        "conversation": [
            {"role": "user", "content": [*images, {"type": "text", "text": text}]},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
    }


ROWS = [
    row("what is this?", "a cat", (60, 40)),
    row("no picture here, only words", "fine"),
    row("two of them", "a dog and a bird", (30, 30), (90, 28)),
    row("你好 " * 6, "好"),
    row("again", "no", (56, 84)),
]


def pretokenized(**options: Any) -> PreTokenizedDatasetWrapper:
    return PreTokenizedDatasetWrapper(ROWS, processors.build("qwen2_5_vl"), **options)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_logits_equal_logits_alone(attention: str) -> None:
    processor = processors.build("qwen2_5_vl")
    model = qwen2_5_vl_model(processor.tokenizer)
    model.set_attn_implementation(attention)
    inner = pretokenized(inject_fake_images=False)
    packs = PackedDatasetWrapper(inner, [[0, 1, 2], [3, 4]], 512, get_rope_index=model.model.get_rope_index)
    batch = neat_packed_vlm_collater([packs[0], packs[1]], attn_implementation=attention)
    assert batch["attention_mask"].dtype == torch.bool
    assert batch["attention_mask"].shape == (2, 1, *[batch["input_ids"].shape[1]] * 2)
    assert batch["position_ids"].shape == (3, *batch["input_ids"].shape)
    keys = ("input_ids", "attention_mask", "position_ids", "pixel_values", "image_grid_thw", "mm_token_type_ids")
    packed_inputs = {key: batch[key].float() if key == "pixel_values" else batch[key] for key in keys}
    if attention == "eager":
        packed_inputs["attention_mask"] = additive_mask(batch["attention_mask"], torch.float32)
    with torch.no_grad():
        packed = model(**packed_inputs).logits
        for place, rows in enumerate([[0, 1, 2], [3, 4]]):
            begin = 0
            for index in rows:
                alone = VLMCollator(processor)([ROWS[index]])
                inputs = {key: alone[key] for key in keys if key in alone and key != "position_ids"}
                if "pixel_values" in inputs:
                    inputs["pixel_values"] = inputs["pixel_values"].bfloat16().float()
                expected = model(**inputs).logits[0]
                end = begin + len(expected)
                torch.testing.assert_close(packed[place, begin:end], expected, rtol=1e-4, atol=1e-5)
                assert batch["labels"][place, begin:end].tolist() == alone["labels"][0].tolist()
                begin = end


def test_the_plan_is_exact_and_says_what_it_leaves_out() -> None:
    inner = pretokenized(inject_fake_images=False)
    lengths = exact_lengths(inner)
    assert lengths == [len(inner[place]["input_ids"]) for place in range(len(ROWS))]
    size = sorted(lengths)[-2]
    packs = PackedDatasetWrapper.from_lengths(inner, lengths, size)
    laid = [place for rows in packs.bins for place in rows]
    too_long = [place for place, length in enumerate(lengths) if length - 1 > size]
    assert sorted([*laid, *too_long]) == list(range(len(ROWS)))
    assert packs.left_out == ({"overlong": len(too_long)} if too_long else {})
    assert all(len(packs[place]["input_ids"]) <= size for place in range(len(packs)))


def test_indexed_masks_positions_and_the_seams() -> None:
    packs = PackedDatasetWrapper(pretokenized(inject_fake_images=False), [[0, 1], [3]], 256)
    batch = neat_packed_vlm_collater([packs[0], packs[1]], padding_idx=7, attn_implementation="flash_attention_2")
    index = batch["attention_mask"]
    assert index.shape == batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape
    assert sorted(set(index[0].tolist())) in ([1, 2], [0, 1, 2])
    for number in (1, 2):
        positions = batch["position_ids"][0][index[0] == number]
        assert positions.tolist() == list(range(len(positions)))
    padding = index == 0
    assert (batch["input_ids"][padding] == 7).all()
    assert (batch["labels"][padding] == -100).all()
    assert batch["labels_shifted"] is True
    first = pretokenized(inject_fake_images=False)[0]
    seam = int((index[0] == 1).sum()) - 1
    assert batch["labels"][0, seam] == first["labels"][-1]


def test_thd() -> None:
    packs = PackedDatasetWrapper(pretokenized(inject_fake_images=False), [[0, 1], [3]], 256)
    batch = packed_sequence_thd_vlm_collater([packs[0], packs[1]])
    sizes = [length - 1 for length in exact_lengths(packs.inner)]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["cu_seqlens"].tolist() == [0, sizes[0], sizes[0] + sizes[1], sizes[0] + sizes[1] + sizes[3]]
    assert batch["max_seqlen"] == max(sizes[0], sizes[1], sizes[3])
    assert (
        batch["input_ids"].shape
        == batch["labels"].shape
        == batch["position_ids"].shape
        == (1, sum(sizes[:2]) + sizes[3])
    )
    hidden = PackedDatasetWrapper(pretokenized(), [[0, 1]], 256)[0]
    with pytest.raises(ValueError, match="hides tokens from attention"):
        packed_sequence_thd_vlm_collater([hidden])


def test_bad_packs_are_refused() -> None:
    assert neat_packed_vlm_collater([]) == {}
    packs = PackedDatasetWrapper(pretokenized(inject_fake_images=False), [[0, 1]], 256)
    with pytest.raises(ValueError, match="expected at most max_length=3"):
        neat_packed_vlm_collater([packs[0]], max_length=3)
    with pytest.raises(ValueError, match="expected at most 10"):
        PackedDatasetWrapper(packs.inner, [[0, 1]], 10)[0]
    with pytest.raises(ValueError, match="1 lengths were given for 5 rows"):
        PackedDatasetWrapper.from_lengths(packs.inner, [7], 10)
    good = packs.inner[0]
    for bad, said in (
        (good | {"labels": good["labels"][1:]}, "row 1 has tokens per key"),
        ({key: value for key, value in good.items() if key != "labels"}, r"row 1 .* lacks \['labels'\]"),
    ):
        for collate in (lambda rows: pad_collate_fn(rows, packs.inner.processor), lambda rows: pack(rows, 900)):
            with pytest.raises(ValueError, match=said):
                collate([good, bad])
    short = packs[0] | {"position_ids": packs[0]["position_ids"][1:]}
    for lay in (neat_packed_vlm_collater, packed_sequence_thd_vlm_collater):
        with pytest.raises(ValueError, match="row 1 has tokens per key"):
            lay([packs[0], short])
    unchecked = inspect.unwrap(VLMCollator.__init__)  # as it is called without the type checks of the tests
    with pytest.raises(ValueError, match="packing='nea' was given; expected one of"):
        unchecked(VLMCollator.__new__(VLMCollator), processors.build("llava"), packing="nea", max_length=10)
    with pytest.raises(ValueError, match="max_length=0 was given; expected at least 2"):
        VLMCollator(processors.build("llava"), max_length=0)
    with pytest.raises(ValueError, match=r"rows \[0\] have up to .* a batch without rows is none"):
        VLMCollator(processors.build("llava"), packing="neat", max_length=5, drop_overlong=True)(ROWS[1:2])
    with pytest.raises(ValueError, match="attn_implementation"):
        neat_packed_vlm_collater([packs[0]], attn_implementation="paged")


def test_fake_images_are_hidden_and_pads_agree_with_the_collator() -> None:
    processor = processors.build("qwen2_5_vl")
    inner = pretokenized()
    text_only = inner[1]
    media = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    shown = text_only["input_ids"] == media
    assert shown.any()
    assert (text_only["attention_mask"][shown] == 0).all()
    plain = pretokenized(inject_fake_images=False)
    padded = pad_collate_fn([plain[place] for place in range(len(ROWS))], processor)
    direct = VLMCollator(processor)(ROWS)
    for key in ("input_ids", "attention_mask", "labels", "n_images_per_sample", "image_grid_thw"):
        assert torch.equal(padded[key], direct[key]), key
    assert padded["pixel_values"].dtype == torch.bfloat16


def test_overlong_rows_are_replaced_counted_or_cut_behind_their_media() -> None:
    lengths = exact_lengths(pretokenized(inject_fake_images=False))
    longest = lengths.index(max(lengths))
    limit = max(lengths) - 1
    inner = pretokenized(inject_fake_images=False, max_length=limit)
    assert len(inner[longest]["input_ids"]) <= limit
    assert inner.replaced == {"overlong": 1}
    cut = pretokenized(inject_fake_images=False, max_length=limit, truncate=True)
    assert len(cut[longest]["input_ids"]) == limit
    with pytest.raises(ValueError, match="cuts into the media"):
        pretokenized(inject_fake_images=False, max_length=5, truncate=True)[0]
    with pytest.raises(ValueError, match="rows in turn are longer"):
        pretokenized(inject_fake_images=False, max_length=5)[0]


@pytest.mark.parametrize("packing", ["neat", "flash", "thd"])
def test_the_collator_packs(packing: Any) -> None:
    collator = VLMCollator(processors.build("qwen2_5_vl"), packing=packing, max_length=40, drop_overlong=True)
    batch = collator(ROWS)
    lengths = exact_lengths(pretokenized(inject_fake_images=False))
    kept = [length - 1 for length in lengths if length - 1 <= 40]
    assert int((batch["labels"] != -100).sum()) > 0
    assert 0 < len(kept) < len(lengths)
    assert batch["left_out"] == {"overlong": len(lengths) - len(kept)}
    if packing == "thd":
        assert batch["input_ids"].shape[1] == sum(kept)
    else:
        assert batch["input_ids"].shape[1] == 40
    with pytest.raises(ValueError, match="pass drop_overlong=True"):
        VLMCollator(processors.build("qwen2_5_vl"), packing=packing, max_length=20)(ROWS)


def test_a_bad_row_in_a_pack_is_named() -> None:
    collator = VLMCollator(processors.build("qwen2_5_vl"), packing="neat", max_length=200)
    with pytest.raises(ValueError, match="row 1 has roles"):
        collator([ROWS[0], {"conversation": [{"role": "user", "content": "x"}]}])


def test_a_bad_row_of_a_data_set_is_named_by_its_place_there() -> None:
    data = [*ROWS, {"conversation": [{"role": "user", "content": "x"}]}, row("x", "y")]
    data[6]["conversation"][0]["content"].insert(0, {"type": "image", "image": "no such file.png"})
    inner = PreTokenizedDatasetWrapper(data, processors.build("qwen2_5_vl"))
    with pytest.raises(ValueError, match=r"^row 5 has roles \['user'\]; expected at least one assistant turn"):
        inner[5]
    with pytest.raises(ValueError, match=r"^row 6: the image 'no such file\.png' cannot be read"):
        inner[6]


def test_text_rows_with_a_hidden_image_train_beside_rows_with_their_own() -> None:
    """In either order: the model takes sizes of images in turn, and skips the hidden ones."""
    processor = processors.build("qwen2_5_vl")
    model = qwen2_5_vl_model(processor.tokenizer)
    inner = pretokenized()
    for order in ([1, 0, 2], [0, 1, 2]):
        batch = pad_collate_fn([inner[place] for place in order], processor)
        shown = {key: batch[key] for key in batch if key not in ("labels", "labels_shifted", "n_images_per_sample")}
        with torch.no_grad():
            logits = model(**shown | {"pixel_values": batch["pixel_values"].float()}).logits
        for line, index in enumerate([0, 2]):
            alone = VLMCollator(processor)([ROWS[index]])
            size = alone["input_ids"].shape[1]
            inputs = {key: alone[key] for key in shown if key in alone}
            inputs["pixel_values"] = inputs["pixel_values"].bfloat16().float()
            with torch.no_grad():
                expected = model(**inputs).logits[0]
            torch.testing.assert_close(logits[line, :size], expected, rtol=1e-4, atol=1e-5)


def test_packs_that_would_count_on_one_axis_say_so(caplog: pytest.LogCaptureFixture) -> None:
    model = qwen2_5_vl_model(processors.build("qwen2_5_vl").tokenizer)
    rope = model.model.get_rope_index
    with caplog.at_level(logging.WARNING):
        PackedDatasetWrapper(pretokenized(), [[0]], 100, get_rope_index=rope)
        VLMCollator(processors.build("llava"), packing="neat", max_length=100)
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        VLMCollator(processors.build("qwen2_5_vl"), packing="neat", max_length=100)
    assert "Pass get_rope_index=model.model.get_rope_index" in caplog.text


def test_positions_of_sound_are_the_model_s() -> None:
    """Qwen3-Omni counts its own way and by arguments of its own: lengths of clips, no token types."""
    processor = processors.build("qwen3_omni")
    ids = processor.tokenizer.convert_tokens_to_ids
    marks = {"image": "image_pad", "video": "video_pad", "audio": "audio_pad", "vision_start": "vision_start",
             "audio_start": "audio_start"}  # fmt: skip
    config = SimpleNamespace(
        **{f"{name}_token_id": ids(f"<|{word}|>") for name, word in marks.items()}, position_id_per_seconds=13.0,
        vision_config=SimpleNamespace(spatial_merge_size=2), audio_config=SimpleNamespace(n_window=50),
    )  # fmt: skip
    thinker = Qwen3OmniMoeThinkerForConditionalGeneration
    model: Any = SimpleNamespace(config=config, spatial_merge_size=2)
    model.get_llm_pos_ids_for_vision = MethodType(thinker.get_llm_pos_ids_for_vision, model)
    model.get_rope_index = MethodType(thinker.get_rope_index, model)
    heard = row("what is it?", "a cat", (60, 40))
    heard["conversation"][0]["content"].insert(0, {"type": "audio", "audio": np.sin(np.arange(8000) / 9)})
    inner = PreTokenizedDatasetWrapper([heard, ROWS[1]], processor, inject_fake_images=False)
    packs = PackedDatasetWrapper(inner, [[0, 1]], 400, get_rope_index=model.get_rope_index)
    documents = [inner[0], inner[1]]
    for place, document in enumerate(documents):
        begin = 0 if place == 0 else len(documents[0]["input_ids"]) - 1
        named = {"audio_seqlens": document["feature_attention_mask"].sum(-1)} if place == 0 else {}
        whole = document["input_ids"][None]
        expected = model.get_rope_index(
            whole, document.get("image_grid_thw"), None, torch.ones_like(whole), False, **named
        )[0][:, 0, :-1]
        assert torch.equal(packs[0]["position_ids"][:, begin : begin + expected.shape[1]], expected)
    assert packs[0]["position_ids"].shape == (3, sum(len(document["input_ids"]) - 1 for document in documents))


def test_a_mask_of_images_is_cut_and_padded_along_its_tokens() -> None:
    """Llama 3.2's: [B, S, images, tiles]."""
    processor = processors.build("mllama")
    examples = [row("look here", "that is it", (60, 40)), row("x", "y", (20, 90))]
    batch = VLMCollator(processor)(examples)
    mask = batch["cross_attention_mask"]
    stock = processor.apply_chat_template(
        [example["conversation"] for example in examples], tokenize=True, return_dict=True, return_tensors="pt",
        processor_kwargs={"padding": True},
    )["cross_attention_mask"]  # fmt: skip
    assert torch.equal(mask, stock[:, :-1])
    cut = VLMCollator(processor, max_length=mask.shape[1] - 2)(examples)["cross_attention_mask"]
    assert torch.equal(cut, stock[:, : cut.shape[1]])
    assert cut.shape[1] == mask.shape[1] - 3
    padded = default_collate_fn(examples, processor, max_length=40)
    assert padded["cross_attention_mask"].shape == (2, 39, *mask.shape[2:])
    assert torch.equal(padded["cross_attention_mask"][:, : stock.shape[1]], stock)
    assert not padded["cross_attention_mask"][:, stock.shape[1] :].any()
    inner = PreTokenizedDatasetWrapper(examples, processor, inject_fake_images=False)
    with pytest.raises(ValueError, match=r"rows carry \['cross_attention_mask'\]"):
        pad_collate_fn([inner[0]], processor)


def test_wrappers_are_picklable() -> None:
    inner = PreTokenizedDatasetWrapper(ROWS, processors.build("internvl"))
    packs = PackedDatasetWrapper(inner, [[0, 1]], 256)
    again = pickle.loads(pickle.dumps(packs))
    assert torch.equal(again[0]["input_ids"], packs[0]["input_ids"])
