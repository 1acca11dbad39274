"""Qwen2.5-VL's processor without its video processor, which alone needs torchvision: images and text are complete.

Imported where a run needs it, since it imports transformers.
"""

from __future__ import annotations

from typing import Any

from transformers import ProcessorMixin, Qwen2_5_VLProcessor

IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", START, END, IMAGE, VIDEO)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ImageTextProcessor(Qwen2_5_VLProcessor):
    """Everything of ``Qwen2_5_VLProcessor`` but videos."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token, self.video_token = IMAGE, VIDEO
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)
        self.video_token_id = tokenizer.convert_tokens_to_ids(VIDEO)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def small_processor(texts: list[str], vocab_size: int, *, pixels: int) -> ImageTextProcessor:
    """A byte-level BPE trained on ``texts``, ChatML, and images of at most ``pixels`` pixels."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=[START, END, IMAGE, VIDEO],
    )  # fmt: skip
    images: Any = Qwen2VLImageProcessorPil
    return ImageTextProcessor(images(min_pixels=28 * 28, max_pixels=pixels), fast, chat_template=CHAT_TEMPLATE)
