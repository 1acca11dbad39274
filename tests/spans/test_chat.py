"""Spans of what the assistant said, against renderers written by hand, on templates that people use."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from spanwise.spans.chat import AssistantSpans, UnprovenSpanError, assistant_spans, span_labels, tokens_inside
from tests.conftest import real_tokenizer
from tests.reference import chat_oracle as oracle
from tests.reference.chat_stress import CATEGORIES, conversation
from tests.tiny_tokenizers import byte_level_bpe

PHI = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for message in rest %}"
    "{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'].strip() %}"
    "{% else %}{% set content = message['content'].strip() %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '<s>' + '[INST] ' + content + ' [/INST]' }}"
    "{% else %}{{ ' ' + content + ' ' + '</s>' }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = '<|begin_of_text|>' + content %}{% endif %}"
    "{{ content }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\n"
    "  {%- if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
DATE = "05 May 2025"
SMOLLM_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


@cache
def with_template(name: str, template: str, *added: str) -> PreTrainedTokenizerBase:
    tokenizer = copy.deepcopy(byte_level_bpe())
    tokenizer.add_special_tokens({"additional_special_tokens": list(added)})
    tokenizer.chat_template = template
    tokenizer.name_or_path = name
    return tokenizer


# family: tokenizer, renderer by hand, how an answer opens and closes, system message allowed, tool calls allowed
FAMILIES: dict[str, tuple[Any, oracle.Renderer, str, str, bool, bool]] = {
    "qwen2_5": (
        lambda: real_tokenizer("qwen2_5"), oracle.chatml(QWEN_SYSTEM),
        "<|im_start|>assistant\n", "<|im_end|>", True, True,
    ),
    "qwen3": (lambda: real_tokenizer("qwen3"), oracle.qwen3, "<|im_start|>assistant\n", "<|im_end|>", True, True),
    "llama3_2": (
        lambda: real_tokenizer("llama3_2"), oracle.llama3(DATE),
        "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", True, True,
    ),
    "gemma3": (lambda: real_tokenizer("gemma3"), oracle.gemma, "<start_of_turn>model\n", "<end_of_turn>", True, False),
    "mistral_nemo": (lambda: real_tokenizer("mistral_nemo"), oracle.mistral, "[/INST]", "</s>", True, True),
    "deepseek_v3": (
        lambda: real_tokenizer("deepseek_v3"), oracle.deepseek, "<｜Assistant｜>", "<｜end▁of▁sentence｜>", True, False,
    ),
    "command_r_plus": (
        lambda: real_tokenizer("command_r_plus"), oracle.command_r,
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>", True, False,
    ),
    "phi": (
        lambda: with_template("phi", PHI, "<|end|>", "<|assistant|>", "<|user|>", "<|endoftext|>"), oracle.phi,
        "<|assistant|>\n", "<|end|>", True, False,
    ),
    "llama2": (lambda: with_template("llama2", LLAMA2, "<s>", "</s>"), oracle.llama2, "[/INST]", "</s>", True, False),
    "llama3": (
        lambda: with_template("llama3", LLAMA3, "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>"),
        oracle.early_llama3,
        "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", True, False,
    ),
    "smollm2": (
        lambda: real_tokenizer("smollm2"), oracle.chatml(SMOLLM_SYSTEM),
        "<|im_start|>assistant\n", "<|im_end|>", True, False,
    ),
    "marks": (
        lambda: with_template("marks", GENERATION), oracle.chatml(),
        "<|im_start|>assistant\n", "<|im_end|>", True, False,
    ),
}  # fmt: skip


def stress(family: str, repeats: int) -> list[list[dict[str, Any]]]:
    _, _, header, stop, system, tools = FAMILIES[family]
    strict = family == "mistral_nemo"
    return [
        conversation(category, seed, header=header, stop=stop, system=system, strict_tools=strict)
        for category in CATEGORIES
        if tools or category != "tool_calls"
        for seed in range(repeats)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_span_is_what_the_hand_written_renderer_says(family: str) -> None:
    tokenizer, renderer = FAMILIES[family][0](), FAMILIES[family][1]
    options = {"date_string": DATE} if family == "llama3_2" else {}
    find = AssistantSpans(tokenizer)
    chats = stress(family, 6)
    for messages in chats:
        before = copy.deepcopy(messages)
        expected_text, expected = oracle.spans(renderer(messages))
        text, spans = find(messages, **options)
        assert text == expected_text, messages
        assert spans == expected, (messages, [text[a:b] for a, b in spans])
        assert messages == before
    assert len(chats) >= 54


def test_no_assistant_turn_gives_no_span() -> None:
    text, spans = assistant_spans(byte_level_bpe(), [{"role": "user", "content": "hello"}])
    assert text == "<|im_start|>user\nhello<|im_end|>\n"
    assert spans == []


def test_reasoning_is_what_the_assistant_said() -> None:
    tokenizer = real_tokenizer("qwen3")
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "<think>\none more\n</think>\n\n2"},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4", "reasoning_content": "two more"},
    ]
    text, spans = assistant_spans(tokenizer, messages)
    assert [text[a:b] for a, b in spans] == ["2<|im_end|>", "<think>\ntwo more\n</think>\n\n4<|im_end|>"]
    silent = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    text, spans = assistant_spans(tokenizer, silent, enable_thinking=False)
    assert [text[a:b] for a, b in spans] == ["2<|im_end|>"]
    text, spans = assistant_spans(tokenizer, silent)
    assert [text[a:b] for a, b in spans] == ["<think>\n\n</think>\n\n2<|im_end|>"]


TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3_2", "mistral_nemo"])
def test_tools_and_their_calls(family: str) -> None:
    tokenizer = FAMILIES[family][0]()
    header, stop = FAMILIES[family][2:4]
    messages = conversation("tool_calls", 3, header=header, stop=stop, system=False)
    messages += conversation("tool_calls", 4, header=header, stop=stop, system=False)
    text, spans = assistant_spans(tokenizer, messages, tools=[TOOL])
    said = [text[a:b] for a, b in spans]
    turns = [message for message in messages if message["role"] == "assistant"]
    assert len(said) == len(turns)
    for turn, words in zip(turns, said, strict=True):
        assert words.endswith(stop)
        for call in turn.get("tool_calls", ()):
            assert call["function"]["name"] in words
        assert (turn.get("content") or "").strip() in words


def test_a_template_that_prints_lists_as_python_is_refused() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "ho"}]},
    ]
    with pytest.raises(ValueError, match="prints list content as Python code"):
        assistant_spans(real_tokenizer("llama3_2"), messages)
    with pytest.raises(ValueError, match=r"could not render a chat with roles .*Fix: join the text parts"):
        assistant_spans(real_tokenizer("qwen2_5"), messages)


def test_a_user_who_types_python_lists_is_not_refused() -> None:
    quoted = "{'type': 'text', 'text': 'hi'}"
    messages = [
        {"role": "user", "content": [{"type": "text", "text": quoted}]},
        {"role": "assistant", "content": [{"type": "text", "text": quoted}]},
    ]
    text, spans = assistant_spans(real_tokenizer("gemma3"), messages)
    assert [text[a:b] for a, b in spans] == [quoted + "<end_of_turn>"]


def test_lists_of_parts_and_images() -> None:
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " what? "}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a cat "}, {"type": "text", "text": " and a dog"}]},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]
    text, spans = assistant_spans(real_tokenizer("gemma3"), messages)
    assert (text, spans) == oracle.spans(oracle.gemma(messages))


def test_what_cannot_be_proven_is_refused_by_name() -> None:
    shouting = with_template(
        "shouting",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if 'quiet' in messages[-1].content %}{{ m.content }}"
        "{% else %}{{ m.content | upper }}{{ messages[-1].content | length }}{% endif %}<|im_end|>\n{% endfor %}",
    )
    with pytest.raises(UnprovenSpanError, match=r"message 1 cannot be proven.*shouting.*Fix: put {% generation %}"):
        assistant_spans(shouting, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "be quiet"}])


def test_private_use_characters_in_the_chat_are_text_like_any_other() -> None:
    word = "\ue0f00\ue0f10\ue0f2"
    messages = [{"role": "user", "content": word}, {"role": "assistant", "content": f"{word} {word}"}]
    text, spans = assistant_spans(byte_level_bpe(), messages)
    assert [text[a:b] for a, b in spans] == [f"{word} {word}<|im_end|>"]


def test_templates_without_stop_token_or_prompt() -> None:
    bare = with_template("bare", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    messages = [
        {"role": "user", "content": "assistant: x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z"},
        {"role": "assistant", "content": "assistant: "},
    ]
    text, spans = assistant_spans(bare, messages)
    assert [text[a:b] for a, b in spans] == ["y\n", "assistant: \n"]
    ends = with_template("ends", "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '<|im_end|>' }}")
    text, spans = assistant_spans(ends, messages)
    assert [text[a:b] for a, b in spans] == ["y", "assistant: <|im_end|>"]


def test_without_a_template() -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        assistant_spans(real_tokenizer("llama2"), [{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="expected a tokenizer or processor"):
        assistant_spans(object(), [])


def test_what_is_remembered_is_bounded_and_picklable() -> None:
    find = AssistantSpans(byte_level_bpe())
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    for number in range(40):
        find(messages, variable=number)
    assert len(find._frames) <= 32
    assert pickle.loads(pickle.dumps(find))(messages) == find(messages)


@pytest.mark.parametrize("family", ["qwen2_5", "llama3_2", "gemma3", "mistral_nemo", "marks"])
def test_characters_become_tokens(family: str) -> None:
    """Joined, the labelled tokens are what was said, but for a first token that begins in the header."""
    tokenizer = FAMILIES[family][0]()
    header, stop = FAMILIES[family][2:4]
    for seed in range(8):
        for category in ("plain", "quoted_stop", "leading_newline", "empty_answer"):
            messages = conversation(category, seed, header=header, stop=stop, system=False)
            text, spans = assistant_spans(tokenizer, messages)
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            labels = span_labels(encoded["input_ids"], encoded["offset_mapping"], spans)
            assert labels.dtype == torch.int64
            inside = [any(start <= a and b <= end for start, end in spans) for a, b in encoded["offset_mapping"]]
            assert (labels != -100).tolist() == inside
            said = "".join(text[start:end] for start, end in spans)
            assert "".join(said.split()) == "".join(tokenizer.decode(labels[labels != -100]).split())


def test_token_edge_cases() -> None:
    assert tokens_inside([], [(0, 4)]).tolist() == []
    assert tokens_inside([(0, 2)], []).tolist() == [False]
    assert tokens_inside([(3, 3), (4, 4), (8, 8), (9, 9)], [(4, 9)]).tolist() == [False, True, True, False]
    assert tokens_inside([(3, 5), (8, 10), (4, 9)], [(4, 9)]).tolist() == [False, False, True]
    assert tokens_inside(torch.tensor([[1, 2], [2, 3], [6, 7]]), [(1, 2), (6, 9)]).tolist() == [True, False, True]
