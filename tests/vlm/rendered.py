"""Each family's chat written by hand, media tokens left out: what the label oracle compares tokens with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.reference.chat_oracle import Piece


def text_of(message: dict[str, Any], image: str, *, trim: bool = False) -> str:
    """A message's content, each image printed as what is left of it without media tokens."""
    content = message["content"]
    if isinstance(content, str):
        return content.strip() if trim else content
    return "".join(
        image if part["type"] == "image" else part["text"].strip() if trim else part["text"] for part in content
    )


def chatml(image: str) -> Callable[[Sequence[dict[str, Any]]], list[Piece]]:
    def render(messages: Sequence[dict[str, Any]]) -> list[Piece]:
        pieces: list[Piece] = []
        for message in messages:
            pieces += [
                (f"<|im_start|>{message['role']}\n", False),
                (text_of(message, image) + "<|im_end|>", message["role"] == "assistant"),
                ("\n", False),
            ]
        return pieces

    return render


def gemma(open_turn: str, close_turn: str, image: str) -> Callable[[Sequence[dict[str, Any]]], list[Piece]]:
    def render(messages: Sequence[dict[str, Any]]) -> list[Piece]:
        pieces: list[Piece] = [("<|im_start|>", False)]
        for message in messages:
            role = "model" if message["role"] == "assistant" else message["role"]
            pieces += [
                (f"{open_turn}{role}\n", False),
                (text_of(message, image, trim=True) + close_turn, role == "model"),
                ("\n", False),
            ]
        return pieces

    return render


def vicuna(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    """A text part ends with a blank; the blank before an answer is the answer's, the prompt is ``ASSISTANT:``."""
    pieces: list[Piece] = []
    for message in messages:
        images = "\n" * sum(part["type"] == "image" for part in message["content"])
        text = "".join(part["text"] + " " for part in message["content"] if part["type"] == "text")
        if message["role"] == "assistant":
            pieces += [("ASSISTANT:", False), (f" {text}", True)]
        else:
            prefix = "" if message["role"] == "system" else f"{message['role'].upper()}: "
            pieces.append((prefix + images + text, False))
    return pieces


def idefics(image: str) -> Callable[[Sequence[dict[str, Any]]], list[Piece]]:
    def render(messages: Sequence[dict[str, Any]]) -> list[Piece]:
        pieces: list[Piece] = [("<|im_start|>", False)]
        for message in messages:
            blank = "" if message["content"][0]["type"] == "image" else " "
            text = blank + text_of(message, image) + "<end_of_utterance>"
            said = message["role"] == "assistant"
            pieces += [(message["role"].capitalize() + ":", False), (text, said), ("\n", False)]
        return pieces

    return render


def pixtral(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    pieces: list[Piece] = [("<|im_start|>", False)]
    for message in messages:
        if message["role"] == "user":
            pieces += [("[INST]", False), (text_of(message, ""), False), ("[/INST]", False)]
        else:
            pieces.append((text_of(message, "") + "<|im_end|>", True))
    return pieces


def phi(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    pieces: list[Piece] = []
    for message in messages:
        pieces.append((f"<|{message['role']}|>", False))
        pieces.append((text_of(message, "") + "<|end|>", message["role"] == "assistant"))
    return pieces


def llama3(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    pieces: list[Piece] = [("<|begin_of_text|>", False)]
    for message in messages:
        pieces.append((f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False))
        pieces.append((text_of(message, "", trim=True) + "<|eot_id|>", message["role"] == "assistant"))
    return pieces


def command_r(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    pieces: list[Piece] = [("<BOS_TOKEN>", False)]
    names = {"system": "SYSTEM", "user": "USER", "assistant": "CHATBOT"}
    for message in messages:
        pieces.append((f"<|START_OF_TURN_TOKEN|><|{names[message['role']]}_TOKEN|>", False))
        pieces.append((text_of(message, "", trim=True) + "<|END_OF_TURN_TOKEN|>", message["role"] == "assistant"))
    return pieces


def deepseek(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    pieces: list[Piece] = [("<｜begin▁of▁sentence｜>", False)]
    pieces += [(text_of(message, ""), False) for message in messages if message["role"] == "system"]
    for message in messages:
        if message["role"] == "user":
            pieces.append(("<｜User｜>" + text_of(message, ""), False))
        elif message["role"] == "assistant":
            pieces += [("<｜Assistant｜>", False), (text_of(message, "") + "<｜end▁of▁sentence｜>", True)]
    return pieces


def kimi(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    pieces: list[Piece] = []
    for message in messages:
        role = message["role"]
        pieces.append((f"<|im_{role}|>{role}<|im_middle|>", False))
        pieces.append((text_of(message, "image") + "<|im_end|>", role == "assistant"))
    return pieces


# family: renderer, how an answer opens and closes, whether a system turn is allowed
RENDERERS: dict[str, tuple[Callable[[Sequence[dict[str, Any]]], list[Piece]], str, str, bool]] = {
    "qwen2_vl": (chatml(""), "<|im_start|>assistant\n", "<|im_end|>", True),
    "qwen2_5_vl": (chatml(""), "<|im_start|>assistant\n", "<|im_end|>", True),
    "qwen3_vl": (chatml(""), "<|im_start|>assistant\n", "<|im_end|>", True),
    "qwen3_omni": (chatml(""), "<|im_start|>assistant\n", "<|im_end|>", True),
    "llava": (vicuna, "ASSISTANT: ", " ", True),
    "llava_onevision": (chatml(""), "<|im_start|>assistant\n", "<|im_end|>", True),
    "gemma3": (
        gemma("<start_of_turn>", "<end_of_turn>", "\n\n\n\n"), "<start_of_turn>model\n", "<end_of_turn>", True,
    ),
    "gemma4": (gemma("<|turn>", "<turn|>", ""), "<|turn>model\n", "<turn|>", True),
    "internvl": (chatml("\n"), "<|im_start|>assistant\n", "<|im_end|>", True),
    "idefics3": (idefics("\n\n\n"), "Assistant:", "<end_of_utterance>", True),
    "pixtral": (pixtral, "[/INST]", "<|im_end|>", False),
    "kimi_k25": (chatml("image"), "<|im_start|>assistant\n", "<|im_end|>", True),
    "phi4_multimodal": (phi, "<|assistant|>", "<|end|>", True),
    "mllama": (llama3, "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", True),
    "aya_vision": (command_r, "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>", True),
    "deepseek_vl": (deepseek, "<｜Assistant｜>", "<｜end▁of▁sentence｜>", True),
    "llava_mistral": (pixtral, "[/INST]", "<|im_end|>", False),
    "llava_phi": (phi, "<|assistant|>", "<|end|>", True),
    "kimi_vl": (kimi, "<|im_assistant|>assistant<|im_middle|>", "<|im_end|>", True),
    "nemotron_omni": (chatml(""), "<|im_start|>assistant\n", "<|im_end|>", True),
}  # fmt: skip
