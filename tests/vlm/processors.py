"""Real processors of every family that can be built offline: transformers' own classes on a tiny tokenizer.

transformers' image processors come in a PIL and a torchvision backend; the PIL one needs nothing. Where a processor
insists on a video processor, which all need torchvision, an object that passes its class check stands in for it, and
nothing is ever asked of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import transformers
from transformers import PreTrainedTokenizerFast, processing_utils
from transformers.utils import is_torchvision_available

from tests.tiny_tokenizers import byte_level_bpe

CHATML_PARTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'video' %}VIDEO"
    "{% elif part['type'] == 'audio' %}AUDIO{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA_PARTS = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' }}"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}{{ '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif 'text' in part %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA4_PARTS = (
    "{{ bos_token }}{% for message in messages %}{{ '<|turn>' }}"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}{{ '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|image|>' }}{% elif part['type'] == 'audio' %}{{ '<|audio|>' }}"
    "{% elif 'text' in part %}{{ part['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)
VICUNA_PARTS = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}"
    "{% endfor %}{% else %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
IDEFICS_PARTS = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
PIXTRAL_PARTS = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST]' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '[IMG]' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '[/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ part['text'] }}{% endfor %}{% endif %}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)

PHI_PARTS = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|image|>' }}{% elif part['type'] == 'audio' %}{{ '<|audio|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def content(image: str, filters: str = "") -> str:
    """A message's text, or its parts with a placeholder for each image."""
    return (
        "{% if message['content'] is string %}{{ message['content']" + filters + " }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + image
        + "{% else %}{{ part['text']" + filters + " }}{% endif %}{% endfor %}{% endif %}"
    )  # fmt: skip


LLAMA3_PARTS = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    + content("<|image|>", " | trim")
    + "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
COMMAND_R_PARTS = (
    "{{ '<BOS_TOKEN>' }}{% for message in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}"
    "{% if message['role'] == 'user' %}<|USER_TOKEN|>{% elif message['role'] == 'system' %}<|SYSTEM_TOKEN|>"
    "{% else %}<|CHATBOT_TOKEN|>{% endif %}"
    + content("<image>", " | trim")
    + "{{ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
DEEPSEEK_PARTS = (
    "{{ '<｜begin▁of▁sentence｜>' }}{% for message in messages if message['role'] == 'system' %}"
    + content("<image>")
    + "{% endfor %}{% for message in messages %}{% if message['role'] == 'user' %}{{ '<｜User｜>' }}"
    + content("<image>")
    + "{% elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' }}"
    + content("<image>")
    + "{{ '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)


def chatml(image: str, video: str = "", audio: str = "") -> str:
    """ChatML that prints placeholders for the parts that are not text."""
    return CHATML_PARTS.replace("IMAGE", image).replace("VIDEO", video).replace("AUDIO", audio)


def tokenizer(*special: str, **named: str) -> PreTrainedTokenizerFast:
    """The tiny byte-level BPE with further special tokens, some of them named attributes."""
    fresh = copy.deepcopy(byte_level_bpe())
    fresh.chat_template = None
    fresh.add_special_tokens({"additional_special_tokens": [*special, *named.values()]})
    for name, token in named.items():
        setattr(fresh, name, token)
        setattr(fresh, f"{name}_id", fresh.convert_tokens_to_ids(token))
    return fresh


class VideoProcessorMixin:
    """Passes the class check for video processors by its name, and can process nothing."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


@contextmanager
def video_stand_ins() -> Iterator[None]:
    """Let transformers find the stand-in under the name of the class that needs torchvision."""
    module: Any = processing_utils.transformers_module
    module.VideoProcessorMixin = VideoProcessorMixin
    try:
        yield
    finally:
        del module.VideoProcessorMixin


def video_processor(name: str, **attributes: Any) -> Any:
    """The real video processor where torchvision is at hand, else a stand-in."""
    if is_torchvision_available():
        return getattr(transformers, name)()
    return VideoProcessorMixin(**attributes)


def qwen2_vl_images(**options: Any) -> Any:
    return transformers.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 16, **options)


@cache
def qwen2_vl() -> Any:
    words = tokenizer("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    template = chatml("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")
    return transformers.Qwen2VLProcessor(
        qwen2_vl_images(),
        words,
        video_processor("Qwen2VLVideoProcessor", merge_size=2, temporal_patch_size=2),
        chat_template=template,
    )


@cache
def qwen2_5_vl() -> Any:
    base = qwen2_vl()
    return transformers.Qwen2_5_VLProcessor(
        base.image_processor, base.tokenizer, base.video_processor, chat_template=base.chat_template
    )


@cache
def qwen3_vl() -> Any:
    base = qwen2_vl()
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=16, size={"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 16}
    )
    return transformers.Qwen3VLProcessor(images, base.tokenizer, base.video_processor, chat_template=base.chat_template)


@cache
def llava() -> Any:
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return transformers.LlavaProcessor(
        images, tokenizer("<image>"), patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=VICUNA_PARTS,
    )  # fmt: skip


@cache
def llava_onevision() -> Any:
    images = transformers.LlavaOnevisionImageProcessorPil(
        size={"height": 28, "width": 28}, image_grid_pinpoints=[[28, 28], [28, 56], [56, 28], [56, 56]]
    )
    return transformers.LlavaOnevisionProcessor(
        images, tokenizer("<image>", "<video>"), video_processor("LlavaOnevisionVideoProcessor"), num_image_tokens=4,
        vision_feature_select_strategy="full", chat_template=chatml("<image>", "<video>"),
    )  # fmt: skip


@cache
def gemma3() -> Any:
    words = tokenizer(
        "<start_of_turn>", "<end_of_turn>", boi_token="<start_of_image>", eoi_token="<end_of_image>",
        image_token="<image_soft_token>",
    )  # fmt: skip
    images = transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    return transformers.Gemma3Processor(images, words, image_seq_length=4, chat_template=GEMMA_PARTS)


@cache
def gemma4() -> Any:
    words = tokenizer(
        "<|turn>", "<turn|>", "<|channel>", "<channel|>", boi_token="<|image>", eoi_token="<image|>",
        image_token="<|image|>", audio_token="<|audio|>", boa_token="<|audio>", eoa_token="<audio|>",
    )  # fmt: skip
    return transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(), transformers.Gemma4ImageProcessorPil(), words,
        video_processor("Gemma4VideoProcessor"), chat_template=GEMMA4_PARTS,
    )  # fmt: skip


@cache
def idefics3() -> Any:
    images = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    return transformers.Idefics3Processor(
        images, tokenizer("<global-img>", *rows), image_seq_len=4, chat_template=IDEFICS_PARTS
    )


@cache
def internvl() -> Any:
    words = tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )
    images = transformers.GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=3
    )
    return transformers.InternVLProcessor(
        images,
        words,
        video_processor("InternVLVideoProcessor"),
        image_seq_length=4,
        chat_template=chatml("<IMG_CONTEXT>\n", "<video>\n"),
    )


@cache
def pixtral() -> Any:
    words = tokenizer("[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
    images = transformers.PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": 16, "width": 16})
    return transformers.PixtralProcessor(images, words, patch_size=16, chat_template=PIXTRAL_PARTS)


@cache
def qwen3_omni() -> Any:
    words = tokenizer(
        image_token="<|image_pad|>", video_token="<|video_pad|>", audio_token="<|audio_pad|>",
        vision_bos_token="<|vision_start|>", vision_eos_token="<|vision_end|>",
        audio_bos_token="<|audio_start|>", audio_eos_token="<|audio_end|>",
    )  # fmt: skip
    template = chatml(
        "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>",
        "<|audio_start|><|audio_pad|><|audio_end|>",
    )  # fmt: skip
    return transformers.Qwen3OmniMoeProcessor(
        qwen2_vl_images(), video_processor("Qwen2VLVideoProcessor", merge_size=2, temporal_patch_size=2),
        transformers.WhisperFeatureExtractor(),
        words, chat_template=template,
    )  # fmt: skip


@cache
def kimi_k25() -> Any:
    words = tokenizer(
        "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>", "<|kimi_k25_video_placeholder|>"
    )
    template = chatml("<|media_begin|>image<|media_content|><|media_pad|><|media_end|>")
    images = transformers.Kimi_K25ImageProcessor(size={"max_height": 56, "max_width": 56})
    return transformers.Kimi_K25Processor(images, words, transformers.Kimi_K25VideoProcessor(), chat_template=template)


@cache
def phi4_multimodal() -> Any:
    words = tokenizer(
        "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", image_token="<|image|>", audio_token="<|audio|>"
    )
    words.chat_template = PHI_PARTS
    images = transformers.Phi4MultimodalImageProcessor(size={"height": 28, "width": 28})
    return transformers.Phi4MultimodalProcessor(images, transformers.Phi4MultimodalFeatureExtractor(), words)


@cache
def nemotron_omni() -> Any:
    words = tokenizer("<so_start>", "<so_end>", "<img>", "</img>", "<image>", "<video>", "<so_embedding>")
    return transformers.NemotronH_Omni_Reasoning_V3Processor(
        transformers.NemotronH_Omni_Reasoning_V3ImageProcessor(),
        transformers.NemotronH_Omni_Reasoning_V3VideoProcessor(),
        words, transformers.ParakeetFeatureExtractor(), chat_template=chatml("<image>", "<video>", "<so_embedding>"),
    )  # fmt: skip


@cache
def mllama() -> Any:
    """Llama 3's template on Llama 3.2's own class, which no family claims: its mask of images has a token axis."""
    words = tokenizer("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|image|>")
    words.bos_token = "<|begin_of_text|>"  # the processor puts it in front of a text that lacks it
    images = transformers.MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=4)
    return transformers.MllamaProcessor(images, words, chat_template=LLAMA3_PARTS)


@cache
def aya_vision() -> Any:
    """Command-R's template on Aya Vision's class."""
    words = tokenizer(
        "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|SYSTEM_TOKEN|>",
        "<|CHATBOT_TOKEN|>", "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE", "TILE_GLOBAL",
    )  # fmt: skip
    images = transformers.GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, min_patches=1, max_patches=1)
    return transformers.AyaVisionProcessor(images, words, patch_size=14, img_size=28, chat_template=COMMAND_R_PARTS)


@cache
def deepseek_vl() -> Any:
    """DeepSeek's template on DeepSeek-VL's class."""
    words = tokenizer(
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", image_token="<image>"
    )
    images = transformers.DeepseekVLImageProcessorPil(size={"height": 28, "width": 28}, min_size=14)
    return transformers.DeepseekVLProcessor(images, words, chat_template=DEEPSEEK_PARTS, num_image_tokens=4)


def _llava_onevision_with(template: str, *special: str) -> Any:
    base = llava_onevision()
    return transformers.LlavaOnevisionProcessor(
        base.image_processor, tokenizer("<image>", "<video>", *special), base.video_processor, num_image_tokens=4,
        vision_feature_select_strategy="full", chat_template=template,
    )  # fmt: skip


@cache
def llava_mistral() -> Any:
    return _llava_onevision_with(PIXTRAL_PARTS.replace("[IMG]", "<image>"), "[INST]", "[/INST]")


@cache
def llava_phi() -> Any:
    words = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
    return _llava_onevision_with(PHI_PARTS.replace("<|image|>", "<image>"), *words)


WITHOUT_TORCHVISION = (
    qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_omni, llava, llava_onevision, gemma3, gemma4, internvl, idefics3,
)  # fmt: skip
WITH_TORCHVISION = (*WITHOUT_TORCHVISION, pixtral, kimi_k25, phi4_multimodal, nemotron_omni)


def build(name: str) -> Any:
    """The processor of this name, made once."""
    with nullcontext() if is_torchvision_available() else video_stand_ins():
        return BUILDERS[name]()


OTHERS = (mllama, aya_vision, deepseek_vl, llava_mistral, llava_phi)
BUILDERS: dict[str, Callable[[], Any]] = {make.__name__: make for make in (*WITH_TORCHVISION, *OTHERS)}
OTHER_TEMPLATES = tuple(make.__name__ for make in OTHERS)
NO_FAMILY = ("mllama", "aya_vision", "deepseek_vl")
REAL = tuple(make.__name__ for make in WITHOUT_TORCHVISION)
