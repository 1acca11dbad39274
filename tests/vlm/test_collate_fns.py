"""The collate functions by the names that people know, with duck-typed processors and with real ones."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from spanwise.vlm import VLMCollator, collate_fns
from tests.vlm import processors

NAMES = (
    "logger", "make_robust_collate", "_find_pattern_indices", "_extract_assistant_text", "_decode_single_token",
    "build_labels", "_get_assistant_marker", "_get_stop_token_id", "_IMSTART_TEMPLATE_PROCESSORS",
    "build_labels_from_template", "phi4_mm_collate_fn", "_extract_media_from_conversations", "_count_media_per_sample",
    "qwen2_5_collate_fn", "qwen3_omni_collate_fn", "kimi_vl_collate_fn", "_expand_image_tokens",
    "kimi_k25_vl_collate_fn", "nemotron_parse_collate_fn", "_ensure_rgb", "_extract_image_config",
    "_estimate_media_tokens",
    "_drop_overlong_samples", "default_collate_fn", "pad_collate_fn", "neat_packed_vlm_collater", "_GEMMA4_MODEL_TURN",
    "_GEMMA4_THINKING_PREFIX", "_inject_thinking_prefix_tokens", "gemma4_prefix_collate_fn", "COLLATE_FNS",
    "llava_onevision_collate_fn", "nemotron_omni_collate_fn", "packed_sequence_thd_vlm_collater",
    "PreTokenizedDatasetWrapper", "PackedDatasetWrapper",
)  # fmt: skip
IMAGE = Image.new("RGB", (60, 40), (10, 200, 30))


def chat(text: str, answer: str, *images: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [*({"type": "image", "image": i} for i in images), {"type": "text", "text": text}]},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]


def rows(*conversations: Any) -> list[dict[str, Any]]:
    return [{"conversation": conversation} for conversation in conversations]


class Words:
    """A duck-typed tokenizer: one id per word, shared by all of its kind."""

    pad_token_id = 0
    bos_token_id = 1
    eos_token = "<eos>"

    def __init__(self) -> None:
        self.ids: dict[str, int] = {"<pad>": 0, "<s>": 1, "<eos>": 2}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.ids.setdefault(word, len(self.ids)) for word in text.split()]

    def decode(self, token: Any) -> str:
        return {number: word for word, number in self.ids.items()}[int(token)]

    def __call__(self, text: str, **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([self.encode(text)])}

    def apply_chat_template(self, conversation: Any, **_: Any) -> str:
        return " ".join(f"<{m['role']}> {_words(m)} <eos>" for m in conversation)

    def convert_tokens_to_ids(self, word: str) -> int | None:
        return self.ids.get(word)


def _words(message: dict[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return " ".join("<media>" if part["type"] != "text" else part["text"] for part in content)


class Duck:
    """A processor of remote code that records how it was called."""

    def __init__(self) -> None:
        self.tokenizer = Words()
        self.calls: list[dict[str, Any]] = []

    def apply_chat_template(self, conversation: Any, tokenize: bool = True, **options: Any) -> Any:
        batched = isinstance(conversation[0], list)
        if not tokenize:
            one = self.tokenizer.apply_chat_template
            return [one(entry) for entry in conversation] if batched else one(conversation)
        self.calls.append(options)
        return self._batch([self.tokenizer.apply_chat_template(entry) for entry in conversation])

    def __call__(self, text: Any, **options: Any) -> dict[str, Any]:
        self.calls.append(options)
        return self._batch([text] if isinstance(text, str) else text) | self.extra(options)

    def extra(self, options: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _batch(self, texts: list[str]) -> dict[str, Any]:
        ids = [torch.tensor(self.tokenizer.encode(text)) for text in texts]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        return {"input_ids": padded, "attention_mask": (padded != 0).long(), "pixel_values": torch.ones(1, 3, 2, 2)}


def spelled(duck: Duck, labels: torch.Tensor) -> str:
    return " ".join(duck.tokenizer.decode(token) for token in labels[labels != -100])


def test_every_name_is_there() -> None:
    for name in NAMES:
        assert hasattr(collate_fns, name), name
    assert isinstance(collate_fns.logger, logging.Logger)
    assert collate_fns._GEMMA4_MODEL_TURN == "<|turn>model\n"
    assert collate_fns._GEMMA4_THINKING_PREFIX == "<|channel>thought\n<channel|>"
    for name in ("Qwen2_5_VLProcessor", "Qwen3OmniMoeProcessor", "KimiVLProcessor", "KimiK25Processor", "default",
                 "NemotronParseProcessor", "NemotronH_Nano_Omni_Reasoning_V3Processor", "LlavaOneVisionProcessor",
                 "LlavaOnevisionProcessor", "Kimi_K25Processor"):  # fmt: skip
        assert callable(collate_fns.COLLATE_FNS[name])


def test_default_with_a_duck() -> None:
    duck = Duck()
    batch = collate_fns.default_collate_fn(
        rows(chat("what is it", "a cat", IMAGE), chat("hello", "good day sir")), duck
    )
    assert duck.calls[0]["padding"] is True
    assert spelled(duck, batch["labels"][0]) == "a cat <eos>"
    assert spelled(duck, batch["labels"][1]) == "good day sir <eos>"
    assert batch["labels"].shape == batch["input_ids"].shape == batch["attention_mask"].shape
    assert batch["pixel_values"].dtype == torch.bfloat16
    assert batch["n_images_per_sample"].tolist() == [1, 0]
    assert "n_videos_per_sample" not in batch
    assert batch["labels_shifted"] is True


def test_builders_are_looked_up_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_it(ids: torch.Tensor, conversations: Any, processor: Any) -> torch.Tensor:
        return ids.clone()

    monkeypatch.setattr(collate_fns, "build_labels_from_template", all_of_it)
    batch = collate_fns.qwen2_5_collate_fn(rows(chat("what is it", "a cat")), Duck())
    assert (batch["labels"] != -100).all()
    real = collate_fns.qwen2_5_collate_fn(rows(chat("what is it", "a cat")), processors.build("qwen2_5_vl"))
    assert (real["labels"] != -100).all()


def test_qwen_call_style_and_no_cast() -> None:
    duck = Duck()
    batch = collate_fns.qwen2_5_collate_fn(rows(chat("what", "a cat", IMAGE), chat("no image", "right")), duck)
    assert duck.calls[0]["images"] == [IMAGE]
    assert duck.calls[0]["videos"] is None
    assert duck.calls[0]["do_sample_frames"] is False
    assert batch["pixel_values"].dtype == torch.float32


def test_llava_onevision() -> None:
    duck = Duck()
    collate_fns.llava_onevision_collate_fn(rows(chat("what", "a cat", IMAGE)), duck)
    assert duck.calls[0]["images"] == [IMAGE]
    assert duck.calls[0]["do_sample_frames"] is False
    processor = processors.build("llava_onevision")
    batch = collate_fns.llava_onevision_collate_fn(rows(chat("what", "a cat", IMAGE, IMAGE), chat("x", "y")), processor)
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["n_images_per_sample"].tolist() == [2, 0]
    assert batch["batch_num_images"].tolist() == [2]  # the processor counts rows that have any
    assert processor.tokenizer.decode(batch["labels"][0][batch["labels"][0] != -100]) == "a cat<|im_end|>"


def test_qwen3_omni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collate_fns, "HAVE_QWEN_OMNI_UTILS", False)
    with pytest.raises(ImportError, match=r"qwen_omni_utils.*Fix: pip install"):
        collate_fns.qwen3_omni_collate_fn(rows(chat("what", "a cat")), Duck())
    monkeypatch.setattr(collate_fns, "HAVE_QWEN_OMNI_UTILS", True)
    asked = []

    def read(conversation: Any, use_audio_in_video: bool) -> Any:
        asked.append(use_audio_in_video)
        return ["wave"], None, []

    monkeypatch.setattr(collate_fns, "process_mm_info", read)
    duck = Duck()
    collate_fns.qwen3_omni_collate_fn(rows(chat("what", "a cat")), duck, use_audio_in_video=True)
    assert asked == [True]
    assert "use_audio_in_video" not in duck.calls[0]
    monkeypatch.setattr(collate_fns, "process_mm_info", lambda *_, **__: (["wave"], None, ["frames"]))
    collate_fns.qwen3_omni_collate_fn(rows(chat("what", "a cat")), duck, use_audio_in_video=True)
    assert duck.calls[1]["use_audio_in_video"] is True
    assert duck.calls[0]["audio"] == [["wave"]]
    assert duck.calls[0]["padding_side"] == "right"
    assert "images" not in duck.calls[0]
    assert "videos" not in duck.calls[0]


def test_qwen3_omni_reads_media_with_its_utilities_for_the_real_class_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row with an image and a clip, one with neither; what was read is what the processor gets, labels proven."""
    other, wave = Image.new("RGB", (30, 90), (200, 10, 30)), np.sin(np.arange(3200, dtype=np.float32))

    def read(conversation: Any, use_audio_in_video: bool) -> Any:
        return ([wave], [other], None) if isinstance(conversation[0]["content"], list) else (None, None, None)

    monkeypatch.setattr(collate_fns, "HAVE_QWEN_OMNI_UTILS", True)
    monkeypatch.setattr(collate_fns, "process_mm_info", read)
    processor = processors.build("qwen3_omni")
    heard = chat("hear", "a cat", IMAGE)
    heard[0]["content"].insert(0, {"type": "audio", "audio": "somewhere.wav"})
    plain = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yes"}]
    batch = collate_fns.qwen3_omni_collate_fn(rows(plain, heard), processor)
    said = [processor.tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    assert said == ["yes<|im_end|>", "a cat<|im_end|>"]
    assert batch["image_grid_thw"].tolist() == processor.image_processor([other])["image_grid_thw"].tolist()
    assert len(batch["input_features"]) == 1
    assert batch["attention_mask"][0].tolist() == sorted(batch["attention_mask"][0].tolist(), reverse=True)


def test_phi4_modes() -> None:
    class Phi(Duck):
        def extra(self, options: dict[str, Any]) -> dict[str, Any]:
            made = {"image_sizes": torch.ones(1, 2), "image_attention_mask": torch.ones(1, 2)}
            if "audios" in options:
                made["input_audio_embeds"] = torch.ones(1, 4)
            if "images" in options:
                made["input_image_embeds"] = torch.ones(1)
            return made

    duck = Phi()
    heard = {"audio": {"array": [0.0, 1.0], "sampling_rate": 16_000}}
    for images, sound, mode in (((), {}, 0), ((IMAGE,), {}, 1), ((), heard, 2), ((IMAGE,), heard, 3)):
        made = collate_fns.phi4_mm_collate_fn([{"conversation": chat("x", "y", *images)} | sound], duck)
        assert made["input_mode"] == mode
        assert not {"image_sizes", "image_attention_mask", "input_image_embeds"} & set(made)
    duck.calls.clear()
    example = {"conversation": chat("listen", "a bell"), "audio": {"array": [0.0, 1.0], "sampling_rate": 16_000}}
    batch = collate_fns.phi4_mm_collate_fn([example], duck)
    assert duck.calls[0]["audios"] == [([0.0, 1.0], 16_000)]
    assert batch["input_mode"] == 2
    assert spelled(duck, batch["labels"][0]) == "a bell <eos>"
    silent = collate_fns.phi4_mm_collate_fn(rows(chat("read", "ok")), Duck())
    assert silent["input_mode"] == 0
    long = rows(chat("word " * 1100, "ok"))
    with pytest.raises(ValueError, match="expected fewer than 1024"):
        collate_fns.phi4_mm_collate_fn(long, Duck())


def test_kimi_vl_drops_then_pads() -> None:
    duck = Duck()
    batch = collate_fns.kimi_vl_collate_fn(
        rows(chat("one two three four five six seven", "no"), chat("hi", "yes")), duck, 8
    )
    assert len(batch["input_ids"]) == 1
    assert batch["left_out"] == {"overlong": 1}
    options = duck.calls[0]
    assert options["padding"] == "max_length"
    assert options["truncation"] is False
    assert options["add_special_tokens"] is False
    free = Duck()
    collate_fns.kimi_vl_collate_fn(rows(chat("hi", "yes", IMAGE)), free)
    assert free.calls[0]["truncation"] is True
    assert free.calls[0]["images"] == [IMAGE]


class Kimi(Duck):
    media_placeholder_token_id = 3

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer.ids["<media>"] = 3

    def extra(self, options: dict[str, Any]) -> dict[str, Any]:
        medias = options.get("medias")
        if not medias:
            return {"pixel_values": None}
        return {"grid_thws": torch.tensor([[1, 4, 4]] * len(medias)), "pixel_values": torch.ones(16 * len(medias), 2)}


def test_kimi_k25_expands_counts_and_never_splits_an_image() -> None:
    duck = Kimi()
    examples = rows(chat("what", "a cat", IMAGE), chat("hello", "day"))
    batch = collate_fns.kimi_k25_vl_collate_fn(examples, duck, max_length=20)
    assert batch["input_ids"].shape == (2, 19)
    assert (batch["input_ids"][0] == 3).sum() == 4
    assert batch["grid_thws"].tolist() == [[1, 4, 4]]
    assert batch["image_grid_hws"].tolist() == [[4, 4]]
    assert batch["n_images_per_sample"].tolist() == [1, 0]
    assert spelled(duck, batch["labels"][0]) == "a cat <eos>"
    cut = collate_fns.kimi_k25_vl_collate_fn(examples, Kimi(), max_length=4)
    assert (cut["input_ids"] == 3).sum() == 0
    assert "pixel_values" not in cut
    with pytest.raises(ValueError, match="exceed max_length=4"):
        collate_fns.kimi_k25_vl_collate_fn(examples[:1], Kimi(), max_length=4, drop_overlong=True)


def test_nemotron_parse() -> None:
    class Parser(Duck):
        def extra(self, options: dict[str, Any]) -> dict[str, Any]:
            assert options["images"] == [IMAGE]
            return {}

    duck = Parser()
    batch = collate_fns.nemotron_parse_collate_fn(
        rows(chat("ignored", "a title", IMAGE)), duck, task_prompt="<s> read "
    )
    assert batch["decoder_input_ids"].tolist() == [[1, *duck.tokenizer.encode("read a")]]
    assert batch["labels"].tolist() == [[-100, *duck.tokenizer.encode("a title")]]
    assert batch["decoder_attention_mask"].tolist() == [[1, 1, 1]]
    assert batch["n_images_per_sample"].tolist() == [1]
    begun = collate_fns.nemotron_parse_collate_fn(rows(chat("ignored", "a title", IMAGE)), duck, task_prompt="read ")
    assert begun["decoder_input_ids"][0, 0] == 1
    assert begun["decoder_input_ids"].tolist() == batch["decoder_input_ids"].tolist()
    duck.tokenizer.pad_token_id = None
    with pytest.raises(ValueError, match="pad_token_id and decoder_start_token_id"):
        collate_fns.nemotron_parse_collate_fn(rows(chat("ignored", "a title", IMAGE)), duck)


def test_nemotron_omni_with_a_duck() -> None:
    class Omni(Duck):
        def extra(self, options: dict[str, Any]) -> dict[str, Any]:
            return (
                {"pixel_values": torch.ones(len(options.get("images", [])), 3, 2, 2)}
                if "images" in options
                else {"pixel_values": None}
            )

    duck = Omni()
    batch = collate_fns.nemotron_omni_collate_fn(rows(chat("what", "a cat", IMAGE, IMAGE), chat("hi", "yes")), duck)
    assert batch["pixel_values"].shape == (2, 3, 2, 2)
    assert batch["image_flags"].tolist() == [[1], [1]]
    assert spelled(duck, batch["labels"][0]) == "a cat <eos>"
    video = {"type": "video", "video": [IMAGE]}
    with pytest.raises(ValueError, match="row 0 brings 2 videos"):
        collate_fns.nemotron_omni_collate_fn(
            rows([{"role": "user", "content": [video, video]}, {"role": "assistant", "content": "x"}]), duck
        )


def test_the_collator_with_ducks() -> None:
    duck = Duck()
    batch = VLMCollator(duck, labels="search")(rows(chat("what is it", "a cat", IMAGE)))
    assert spelled(duck, batch["labels"][0]) == "a cat <eos>"
    inner = collate_fns.PreTokenizedDatasetWrapper(rows(chat("what is it", "a cat", IMAGE)), duck)
    assert spelled(duck, inner[0]["labels"]) == "a cat <eos>"
    with pytest.raises(ValueError, match=r"row 0 has roles \['user'\]"):
        VLMCollator(duck, labels="search")(rows([{"role": "user", "content": "x"}]))
    with pytest.raises(ValueError, match="none of the 1 rows has a label"):
        VLMCollator(duck, labels="search")(rows(chat("what is it", "")))
    heard = {"conversation": chat("x", "y"), "audio": ([0.0, 1.0], 16_000)}
    phi = type("Phi4MMProcessor", (Duck,), {})()
    VLMCollator(phi, labels="search")([heard])
    assert phi.calls[0]["audios"] == [([0.0, 1.0], 16_000)]
    with pytest.raises(ValueError, match="takes one sample at a time"):
        VLMCollator(type("KimiK25Processor", (Kimi,), {})(), labels="template")


def test_other_labels_need_no_proof() -> None:
    processor = copy.copy(processors.build("qwen2_5_vl"))
    processor.chat_template = processor.chat_template.replace("part['text']", "(part['text'] | upper)")
    examples = rows(chat("what", "a cat", IMAGE))
    shouted = VLMCollator(processor, labels="template")(examples)
    assert processor.tokenizer.decode(shouted["labels"][0][shouted["labels"][0] != -100]) == "A CAT<|im_end|>"


def test_small_helpers() -> None:
    find = collate_fns._find_pattern_indices
    ids = torch.tensor([1, 2, 3, 2, 3])
    assert find(ids, torch.tensor([2, 3])) == (1, 3)
    assert find(ids, torch.tensor([2, 3]), 2) == (3, 5)
    assert find(ids, torch.tensor([9, 3]), 0, True) == (1, 3)
    assert find(ids, torch.tensor([9])) == (-1, -1)
    assert collate_fns._extract_assistant_text({"content": "x"}) == "x"
    assert collate_fns._extract_assistant_text({"content": [{"type": "text", "text": "x"}]}) == "x"

    class OnlyLists:
        def decode(self, ids: Any) -> str:
            if not isinstance(ids, list):
                raise TypeError
            return f"<{ids[0]}>"

    assert collate_fns._decode_single_token(OnlyLists(), 7) == "<7>"
    assert collate_fns._decode_single_token(object(), 7) == "7"
    qwen = processors.build("qwen2_5_vl").tokenizer
    assert collate_fns._get_assistant_marker(qwen)[0] == qwen.convert_tokens_to_ids("<|im_start|>")
    assert collate_fns._get_stop_token_id(qwen) == qwen.convert_tokens_to_ids("<|im_end|>")
    assert collate_fns._get_assistant_marker(object()) is None
    media = chat("x", "y", IMAGE)
    assert collate_fns._extract_media_from_conversations([media]) == ([IMAGE], None)
    assert collate_fns._count_media_per_sample([media, chat("x", "y")]) == ([1, 0], [0, 0])
    grey = chat("x", "y", Image.new("L", (4, 4)))
    assert collate_fns._ensure_rgb([grey])[0] is grey
    assert grey[0]["content"][0]["image"].mode == "RGB"


def test_the_older_builders_on_plain_chats() -> None:
    processor = processors.build("qwen2_5_vl")
    examples = rows(chat("what", "a cat", IMAGE), chat("hello", "a good day"))
    proven = collate_fns.qwen2_5_collate_fn(examples, processor)
    whole = torch.cat([proven["input_ids"], torch.zeros(2, 1).long()], dim=1)
    conversations = [example["conversation"] for example in examples]
    for build in (collate_fns.build_labels, collate_fns.build_labels_from_template):
        assert torch.equal(build(whole, conversations, processor)[:, 1:], proven["labels"])


def test_default_pads_to_max_length_and_leaves_callers_alone() -> None:
    palette = Image.new("P", (60, 40))
    examples = rows(chat("what", "a cat", palette), chat("word " * 60, "too long"))
    before = copy.deepcopy(examples[1])
    batch = collate_fns.default_collate_fn(examples, processors.build("llava"), max_length=64)
    assert batch["input_ids"].shape == (1, 63)
    assert batch["left_out"] == {"overlong": 1}
    assert examples[1] == before
    assert examples[0]["conversation"][0]["content"][0]["image"] is palette
