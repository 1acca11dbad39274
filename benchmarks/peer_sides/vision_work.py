"""Processors, batches and marked templates of the vision comparison; runs in a peer's environment too."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import transformers
from PIL import Image

from tests.vlm import processors

Chat = list[dict[str, Any]]
CHATML = ("{{ '<|im_start|>' + message['role'] + '\n' }}", "<|im_end|>")
# How a template opens a turn, and what closes it: between them, the closing included, is what the assistant says.
TURNS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_omni", "llava_onevision", "internvl"), CHATML),
    "gemma3": ("{{ '\n' }}", "<end_of_turn>"),
    "gemma4": ("{{ '\n' }}", "<turn|>"),
}
MARKED = (*TURNS, "llava")


def marked_template(name: str) -> str:
    """A processor's template with generation marks around what the assistant says; LLaVA's has them as released."""
    template = processors.build(name).chat_template
    if name not in TURNS:
        return template
    opening, stop = TURNS[name]
    closing = f"{{{{ '{stop}\n' }}}}"
    before, rest = template.split(opening, 1)
    said, after = rest.split(closing, 1)
    said += f"{{{{ '{stop}' }}}}"
    return (
        f"{before}{opening}{{% if message['role'] == 'assistant' %}}{{% generation %}}{said}{{% endgeneration %}}"
        f"{{% else %}}{said}{{% endif %}}{{{{ '\n' }}}}{after}"
    )


def read_chats(file: str) -> list[Chat]:
    """Conversations from disk, with the images that they name."""
    chats = json.loads(Path(file).read_text())
    for chat in chats:
        for part in (part for message in chat for part in message["content"] if part["type"] == "image"):
            part["image"] = Image.open(Path(file).with_name(part["image"])).convert("RGB")
    return chats


def batch_of(rows: int, size: tuple[int, int]) -> list[dict[str, Any]]:
    """Conversations of three exchanges, the first with one image; about 250 text tokens."""
    answer = "The picture shows a plain field of one colour, with some noise that a camera would add. " * 2
    batch = []
    for place in range(rows):
        image = Image.effect_noise(size, 20 + place)
        turns: Chat = [
            {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        for question in ("Are you sure?", "Say it in other words."):
            turns.append({"role": "user", "content": [{"type": "text", "text": question}]})
            turns.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        batch.append({"conversation": turns})
    return batch


def released(name: str) -> Any:
    """A processor with the image size that its family was released with."""
    processor = copy.copy(processors.build(name))
    if name in ("qwen2_vl", "qwen2_5_vl"):
        processor.image_processor = transformers.Qwen2VLImageProcessorPil()
    elif name == "llava":
        square = {"height": 336, "width": 336}
        processor.image_processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size=square)
    elif name == "gemma3":
        processor.image_processor = transformers.Gemma3ImageProcessorPil()
    return processor


def timed_batch() -> list[Chat]:
    """16 conversations with images of 640 × 480 in RGB, as every side takes them."""
    chats = [row["conversation"] for row in batch_of(16, (640, 480))]
    for chat in chats:
        chat[0]["content"][0]["image"] = chat[0]["content"][0]["image"].convert("RGB")
    return chats
