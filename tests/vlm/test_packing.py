"""Packs: nothing lost, nothing cut, and the model cannot tell a packed document from one alone."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from PIL import Image

from spanwise.vlm import PackedDatasetWrapper, PreTokenizedDatasetWrapper, VLMCollator, exact_lengths
from spanwise.vlm.collate_fns import neat_packed_vlm_collater, packed_sequence_thd_vlm_collater, pad_collate_fn
from spanwise.vlm.packing import additive_mask
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
    with pytest.raises(ValueError, match="row 1 of the batch, taken alone: row 0 has roles"):
        collator([ROWS[0], {"conversation": [{"role": "user", "content": "x"}]}])


def test_wrappers_are_picklable() -> None:
    inner = PreTokenizedDatasetWrapper(ROWS, processors.build("internvl"))
    packs = PackedDatasetWrapper(inner, [[0, 1]], 256)
    again = pickle.loads(pickle.dumps(packs))
    assert torch.equal(again[0]["input_ids"], packs[0]["input_ids"])
