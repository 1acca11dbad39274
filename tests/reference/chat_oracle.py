"""What the assistant said, written down by hand: one plain Python renderer per template family.

Each renderer walks the messages and says of every piece of text whether the assistant produces it. It knows nothing of
Jinja, sentinels or prefixes; that its pieces join to what the real template renders is checked by the test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Piece = tuple[str, bool]
Renderer = Callable[[Sequence[dict[str, Any]]], list[Piece]]


def spans(pieces: Sequence[Piece]) -> tuple[str, list[tuple[int, int]]]:
    """The joined text and the spans of what is said; adjacent said pieces join."""
    text, found, begin = "", [], None
    for piece, said in pieces:
        if said and begin is None:
            begin = len(text)
        if not said and begin is not None:
            found.append((begin, len(text)))
            begin = None
        text += piece
    if begin is not None:
        found.append((begin, len(text)))
    return text, found


def chatml(default_system: str | None = None) -> Renderer:
    def render(messages: Sequence[dict[str, Any]]) -> list[Piece]:
        pieces: list[Piece] = []
        if default_system is not None and messages[0]["role"] != "system":
            pieces.append((f"<|im_start|>system\n{default_system}<|im_end|>\n", False))
        for place, message in enumerate(messages):
            role, content = message["role"], message.get("content")
            if role == "tool":
                if messages[place - 1]["role"] != "tool":
                    pieces.append(("<|im_start|>user", False))
                pieces.append((f"\n<tool_response>\n{content}\n</tool_response>", False))
                if place + 1 == len(messages) or messages[place + 1]["role"] != "tool":
                    pieces.append(("<|im_end|>\n", False))
            elif role == "assistant":
                said = [content] if content else []
                for call in message.get("tool_calls", ()):
                    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                    name = call["function"]["name"]
                    said.append(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')
                pieces += [("<|im_start|>assistant\n", False), ("\n".join(said) + "<|im_end|>", True), ("\n", False)]
            else:
                pieces.append((f"<|im_start|>{role}\n{content}<|im_end|>\n", False))
        return pieces

    return render


def qwen3(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    """ChatML whose last answer carries its reasoning, an empty block when there is none; earlier ones lose theirs."""
    last_user = max(place for place, message in enumerate(messages) if message["role"] == "user")
    rewritten = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            thought, closed, answer = message.get("content", "").rpartition("</think>")
            if closed:
                thought, answer = thought.partition("</think>")[0].rpartition("<think>")[2], answer.lstrip("\n")
                thought = thought.strip("\n")
            if place > last_user and (place == len(messages) - 1 or thought):
                lead = answer.lstrip("\n")
                answer = f"<think>\n{thought}\n</think>\n\n{lead}"
                if message.get("tool_calls") and not lead:
                    answer = answer.removesuffix("\n")  # the joining newline below stands for it
            message = {**message, "content": answer}
        rewritten.append(message)
    return chatml()(rewritten)


def llama3(date: str) -> Renderer:
    def render(messages: Sequence[dict[str, Any]]) -> list[Piece]:
        system = messages[0]["content"].strip() if messages[0]["role"] == "system" else ""
        preamble = f"Cutting Knowledge Date: December 2023\nToday Date: {date}\n\n{system}<|eot_id|>"
        pieces = [(f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{preamble}", False)]
        for message in messages[1:] if messages[0]["role"] == "system" else messages:
            role = "ipython" if message["role"] == "tool" else message["role"]
            pieces.append((f"<|start_header_id|>{role}<|end_header_id|>\n\n", False))
            if message.get("tool_calls"):
                function = message["tool_calls"][0]["function"]
                arguments = json.dumps(function["arguments"], ensure_ascii=False)
                pieces.append((f'{{"name": "{function["name"]}", "parameters": {arguments}}}<|eot_id|>', True))
            elif role == "ipython":
                pieces.append((json.dumps(message["content"], ensure_ascii=False) + "<|eot_id|>", False))
            else:
                pieces.append((message["content"].strip() + "<|eot_id|>", role == "assistant"))
        return pieces

    return render


def early_llama3(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    """The first Llama 3 template, which always ends with a header for one more answer."""
    pieces: list[Piece] = [("<|begin_of_text|>", False)]
    for message in messages:
        pieces.append((f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False))
        pieces.append((message["content"].strip() + "<|eot_id|>", message["role"] == "assistant"))
    return [*pieces, ("<|start_header_id|>assistant<|end_header_id|>\n\n", False)]


def gemma(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    pieces, prefix = [("<bos>", False)], ""
    if messages[0]["role"] == "system":
        prefix, messages = messages[0]["content"] + "\n\n", messages[1:]
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = "".join(
                "<start_of_image>" if part["type"] == "image" else part["text"].strip() for part in content
            )
        else:
            content = content.strip()
        if message["role"] == "assistant":
            pieces += [("<start_of_turn>model\n", False), (content + "<end_of_turn>", True), ("\n", False)]
        else:
            pieces.append((f"<start_of_turn>{message['role']}\n{prefix}{content}<end_of_turn>\n", False))
        prefix = ""
    return pieces


def mistral(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    pieces = [("<s>", False)]
    if messages[0]["role"] == "system":
        messages = messages[1:]  # printed only where a user has the last word
    for message in messages:
        if message["role"] == "user":
            pieces.append((f"[INST]{message['content']}[/INST]", False))
        elif message["role"] == "tool":
            call_id = message["tool_call_id"]
            result = f'[TOOL_RESULTS]{{"content": {message["content"]}, "call_id": "{call_id}"}}[/TOOL_RESULTS]'
            pieces.append((result, False))
        elif message.get("tool_calls"):
            calls = [
                json.dumps(call["function"], ensure_ascii=False)[:-1] + f', "id": "{call["id"]}"}}'
                for call in message["tool_calls"]
            ]
            pieces.append((f"[TOOL_CALLS][{', '.join(calls)}]</s>", True))
        else:
            pieces.append((message["content"] + "</s>", True))
    return pieces


def deepseek(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    pieces = [(f"<｜begin▁of▁sentence｜>{system}", False)]
    for message in messages:
        if message["role"] == "user":
            pieces.append((f"<｜User｜>{message['content']}", False))
        elif message["role"] == "assistant":
            pieces += [("<｜Assistant｜>", False), (f"{message['content']}<｜end▁of▁sentence｜>", True)]
    return pieces


def command_r(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    pieces = [("<BOS_TOKEN>", False)]
    names = {"system": "SYSTEM", "user": "USER", "assistant": "CHATBOT"}
    for message in messages:
        content = message["content"] if message["role"] == "system" else message["content"].strip()
        pieces.append((f"<|START_OF_TURN_TOKEN|><|{names[message['role']]}_TOKEN|>", False))
        pieces.append((content + "<|END_OF_TURN_TOKEN|>", message["role"] == "assistant"))
    return pieces


def phi(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    pieces = []
    for message in messages:
        pieces += [
            (f"<|{message['role']}|>\n", False),
            (message["content"] + "<|end|>", message["role"] == "assistant"),
            ("\n", False),
        ]
    return [*pieces, ("<|endoftext|>", False)]


def llama2(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    """A system message stands inside the first question; the blank before an answer is the answer's."""
    pieces, prefix = [], ""
    for message in messages:
        if message["role"] == "system":
            prefix = f"<<SYS>>\n{message['content']}\n<</SYS>>\n\n"
        elif message["role"] == "user":
            pieces.append((f"<s>[INST] {prefix}{message['content'].strip()} [/INST]", False))
            prefix = ""
        else:
            pieces.append((f" {message['content'].strip()} </s>", True))
    return pieces
