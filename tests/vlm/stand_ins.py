"""Stand-ins for processors of remote code: their call styles and placeholders, on real parts of transformers.

Nothing here was compared with the released classes, which come with their checkpoints; the table of families says so.
They derive from ``ProcessorMixin``, as remote code does, and so differ from transformers' own classes only in what the
pipeline must not rely on: they report no offsets of what they replace, and take media under names of their own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from transformers import BatchFeature, ProcessorMixin

from tests.vlm import processors

PLACEHOLDER = "<|media_pad|>"
KIMI_PARTS = (
    "{% for message in messages %}"
    "{{ '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|media_start|>image<|media_content|><|media_pad|><|media_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)


class RemoteProcessor(ProcessorMixin):
    """An image processor and a tokenizer, held as remote code holds them."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
        self.calls: list[dict[str, Any]] = []

    def pixels(self, images: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.image_processor(images, return_tensors="pt")
        return seen["pixel_values"], seen["image_grid_thw"]


class KimiVLProcessor(RemoteProcessor):
    """Kimi-VL's: flat images, each placeholder repeated by the processor."""

    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> BatchFeature:
        texts, media = list(text), {}
        if images:
            pixels, grids = self.pixels(images)
            counts = iter((grids[:, 1] * grids[:, 2] // 4).tolist())
            texts = [PLACEHOLDER.join(_repeated(one.split(PLACEHOLDER), counts)) for one in texts]
            media = {"pixel_values": pixels, "image_grid_hws": grids[:, 1:]}
        self.calls.append(options)
        return BatchFeature({**self.tokenizer(texts, **options), **media})


def _repeated(pieces: list[str], counts: Any) -> list[str]:
    """With these joined by placeholders there are as many placeholders between two pieces as are counted."""
    spread = [pieces[0]]
    for piece in pieces[1:]:
        spread += [""] * (next(counts) - 1) + [piece]
    return spread


class KimiK25Processor(RemoteProcessor):
    """Kimi-K2.5's: one sample, ``medias=``, one placeholder per image and a grid."""

    def __call__(
        self, messages: Any = None, medias: Any = None, text: Any = None, return_tensors: str = "pt", **_: Any
    ) -> BatchFeature:
        found = {}
        if medias is not None:
            pixels, grids = self.pixels([media["image"] for media in medias])
            found = {"pixel_values": pixels, "grid_thws": grids}
        return BatchFeature({**self.tokenizer(text, return_tensors=return_tensors), **found})


class NemotronParseProcessor(RemoteProcessor):
    """Nemotron-Parse's: images and texts side by side, an end token behind every text."""

    def __call__(self, images: Any, text: Any, padding: bool, return_tensors: str) -> BatchFeature:
        encoded = self.tokenizer(text, padding=padding, return_tensors=return_tensors)
        return BatchFeature({**encoded, "pixel_values": self.pixels(images)[0]})


def _kimi_tokenizer() -> Any:
    return processors.tokenizer(
        "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|media_start|>", "<|media_content|>",
        "<|media_end|>", PLACEHOLDER,
    )  # fmt: skip


def _images() -> Any:
    return transformers.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 16)


@cache
def kimi_vl() -> Any:
    return KimiVLProcessor(_images(), _kimi_tokenizer(), chat_template=KIMI_PARTS)


@cache
def kimi_k25() -> Any:
    return KimiK25Processor(_images(), _kimi_tokenizer(), chat_template=KIMI_PARTS)


@cache
def nemotron_parse() -> Any:
    from tokenizers.processors import TemplateProcessing

    words = processors.tokenizer("</s>", "<s>", "<predict_bbox>", "<predict_classes>", "<output_markdown>")
    words.eos_token, words.bos_token = "</s>", "<s>"
    words.decoder_start_token_id = words.convert_tokens_to_ids("</s>")
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", words.decoder_start_token_id)]
    )
    return NemotronParseProcessor(_images(), words)
