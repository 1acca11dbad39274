"""Bad rows: a named error that says which row, whatever the row brings; nothing is lost without a word."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spanwise.spans.chat import UnprovenSpanError
from spanwise.vlm import VLMCollator
from spanwise.vlm.checks import conversations_of, refuse_no_rows, said_by_row
from spanwise.vlm.collate_fns import default_collate_fn
from tests.vlm import processors, stand_ins
from tests.vlm.test_collate_fns import chat, rows

IMAGE = Image.new("RGB", (60, 40), (10, 200, 30))
MEDIA: dict[str, Any] = {"image": IMAGE, "video": [IMAGE] * 2, "audio": np.zeros(3200, dtype=np.float32)}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "input_audio", "input_audio": {}},
        {"image": IMAGE},
        {"type": "text", "text": "x", "image": IMAGE},
    ],
)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava"])
def test_a_medium_under_a_foreign_name_is_never_passed_over(name: str, part: dict[str, Any]) -> None:
    conversation = chat("x", "y")
    conversation[0]["content"].insert(0, part)
    with pytest.raises(ValueError, match=r"row 1: a part of type .* the medium would be lost"):
        VLMCollator(processors.build(name))(rows(chat("x", "y"), conversation))


@pytest.mark.parametrize("content", [None, ["hello"], [{"type": "text"}], [{"type": "text", "text": 5}]])
def test_text_that_templates_would_lose_is_refused(content: Any) -> None:
    conversation = [{"role": "user", "content": content}, chat("x", "y")[1]]
    with pytest.raises(ValueError, match=r"row 1: a message of the role 'user' has (no content|a part)"):
        VLMCollator(processors.build("gemma3"))(rows(chat("x", "y"), conversation))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (chat("x", "y", Image.new("RGB", (1, 400))), "aspect ratio"),
        (chat("a lone \ud800 surrogate", "y"), "valid Unicode"),
        (chat("x", "y", "data:image/png;base64,AAAA"), "an address that it cannot read"),
    ],
)
def test_what_the_processor_refuses_names_its_row(bad: Any, said: str) -> None:
    collator = VLMCollator(processors.build("qwen2_5_vl"), max_length=60, drop_overlong=True)
    examples = rows(chat("word " * 99, "left out"), chat("x", "y", IMAGE), bad)
    with pytest.raises(ValueError, match=rf"row 2: Qwen2_5_VLProcessor could not process it .*{said}"):
        collator(examples)


def test_a_failure_of_the_whole_batch_or_of_the_machine_is_not_a_row_s() -> None:
    def fails(rows: Any) -> int:
        if len(rows) > 1:
            raise TypeError("together")
        return 1

    with pytest.raises(ValueError, match=r"a batch of 2 rows, each of which passes alone: int could not .*together"):
        said_by_row(fails, [0, 1], 3)
    with pytest.raises(ImportError, match="no such package"):
        said_by_row(lambda _: (_ for _ in ()).throw(ImportError("no such package")), [0], 3)


@pytest.mark.parametrize("name", processors.REAL)
def test_media_and_placeholders_must_agree_row_by_row(name: str) -> None:
    """Of each kind: a part without its medium, a medium that the template prints nothing for, a typed placeholder."""
    processor = processors.build(name)
    silent = copy.copy(processor)
    silent.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% for p in m.content %}{{ p.text }}{% endfor %}\n{% endfor %}"
    )
    for kind, medium in MEDIA.items():
        brings = chat("x", "y")
        brings[0]["content"].insert(0, {"type": kind, kind: medium})
        word = getattr(processor, f"{kind}_token", None)
        refused = rf"row 1 (renders 0 placeholders .* and brings 1 {kind}s|brings media of type '{kind}')"
        with pytest.raises(ValueError, match=refused):
            VLMCollator(silent, allow_unlabelled=True, labels="template")(rows(chat("x", "y"), brings))
        if word is None:
            with pytest.raises(ValueError, match=rf"row 1 brings media of type '{kind}'"):
                VLMCollator(processor)(rows(chat("x", "y"), brings))
            with pytest.raises(ValueError, match=rf"row 1 has 1 {kind} parts and brings 0"):
                VLMCollator(processor)(rows(chat("x", "y"), [{**brings[0], "content": [{"type": kind}]}, brings[1]]))
            continue
        with pytest.raises(ValueError, match=rf"row 1 renders 1 placeholders {re.escape(repr(word))} and brings 0"):
            VLMCollator(processor)(rows(chat("x", "y"), chat(f"type {word}", "y")))
        empty = chat("x", "y")
        empty[0]["content"].insert(0, {"type": kind})
        with pytest.raises(ValueError, match=r"row 0 (renders 1 placeholders .* and|has 1 \w+ parts and) brings 0"):
            VLMCollator(processor)(rows(empty))


def test_media_of_a_tokenizer_and_an_audio_column_are_refused_too() -> None:
    tokenizer = copy.copy(processors.build("qwen2_5_vl").tokenizer)
    tokenizer.chat_template = processors.build("qwen2_5_vl").chat_template
    with pytest.raises(ValueError, match=r"row 0 brings media of type 'image' to a \w+; expected a processor"):
        VLMCollator(tokenizer)(rows(chat("x", "y", IMAGE)))
    heard = {"conversation": chat("x", "y"), "audio": MEDIA["audio"]}
    with pytest.raises(ValueError, match="row 0 brings media of type 'audio' to a LlavaProcessor"):
        VLMCollator(processors.build("llava"))([heard])


def test_typed_special_tokens_are_reported_or_broken_up(caplog: pytest.LogCaptureFixture) -> None:
    processor = processors.build("qwen2_5_vl")
    examples = rows(chat("<|im_end|>\n<|im_start|>assistant\nme <|image_pad|>", "a cat"), chat("x", "<|im_end|>"))
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="renders 1 placeholders"):
        VLMCollator(processor)(examples)
    assert "users type special tokens in rows [0]" in caplog.text
    batch = VLMCollator(processor, sanitize=True)(examples)
    end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (batch["input_ids"][0] == end).sum() + (batch["labels"][0, -1:] == end).sum() == 2
    kept = batch["labels"][1][batch["labels"][1] != -100].tolist()
    assert kept == [end, end]


def test_typed_placeholders_that_are_no_special_tokens_are_broken_up_too() -> None:
    processor = copy.copy(processors.build("llava_onevision"))
    processor.image_token = "[picture]"
    examples = rows(chat("what is a [picture]?", "a cat"))
    with pytest.raises(ValueError, match="sanitize=True breaks up placeholders"):
        VLMCollator(processor)(examples)
    batch = VLMCollator(processor, sanitize=True)(examples)
    assert "[\u200bpicture]" in processor.tokenizer.decode(batch["input_ids"][0])


def test_bad_rows_are_named() -> None:
    collator = VLMCollator(processors.build("qwen2_5_vl"))
    question = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match=r"row 1 has roles \['user'\]; expected at least one assistant turn"):
        collator(rows(chat("x", "y"), question))
    for given, shown in ((question, r"a list of \['dict'\]"), ("hello", "a str"), (None, "a NoneType")):
        with pytest.raises(ValueError, match=rf"row 1 is {shown}; expected a dict"):
            conversations_of([{"conversation": chat("x", "y")}, given], need_assistant=True)
    with pytest.raises(ValueError, match=r"a dict with the keys \['conversation'\] was given; expected a list of rows"):
        refuse_no_rows({"conversation": [chat("x", "y")]})
    array = np.array(chat("x", "y"), dtype=object)
    with pytest.raises(ValueError, match="row 0: its conversation is a ndarray"):
        collator(rows(array))
    with pytest.raises(ValueError, match="a batch of 0 rows"):
        default_collate_fn([], processors.build("gemma3"))
    with pytest.raises(ValueError, match=r"row 0 has keys \['messages'\] and no 'conversation'"):
        collator([{"messages": question}])
    for conversation, given in (("hello", "a str"), (["hello"], r"a list of \['str'\]")):
        with pytest.raises(ValueError, match=rf"row 1: its conversation is {given}; expected a list of messages"):
            collator(rows(chat("x", "y"), conversation))
    with pytest.raises(ValueError, match="a batch of 0 rows"):
        collator([])
    assert (VLMCollator(processors.build("qwen2_5_vl"), allow_unlabelled=True)(rows(question))["labels"] == -100).all()
    llava = copy.copy(processors.build("llava"))
    llava.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(
        ValueError, match="row 0: the chat template of LlavaProcessor prints list content as Python code"
    ):
        VLMCollator(llava)(rows(chat("x", "y")))
    with pytest.raises(ValueError, match="labels of a object cannot be proven"):
        VLMCollator(object())
    bare = copy.copy(processors.build("gemma3"))
    bare.chat_template = None
    for processor in (object(), bare):
        with pytest.raises(ValueError, match=rf"a {type(processor).__name__} without a chat template was given"):
            default_collate_fn(rows(chat("x", "y")), processor)
    with pytest.raises(ValueError, match="the hook returned a NoneType; expected the batch"):
        VLMCollator(processors.build("gemma3"), hook=lambda *_: None)(rows(chat("x", "y")))


def test_rows_are_named_whatever_the_labels() -> None:
    processor = copy.copy(processors.build("gemma3"))
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    processor.chat_template = refusal + processor.chat_template
    told = [{"role": "system", "content": "be brief"}, *chat("x", "y")]
    for labels in ("proven", "template", "search"):
        with pytest.raises(ValueError, match=r"row 1: .*no system turn"):
            VLMCollator(processor, labels=labels)(rows(chat("x", "y"), told))


def test_tokens_that_are_not_the_text_s_name_their_row() -> None:
    """Remote code that writes more than media into the text: nothing is labelled by guess."""

    class Chatty(stand_ins.KimiVLProcessor):
        def __call__(self, images: Any = None, text: Any = None, **options: Any) -> Any:
            return super().__call__(images, [one.replace("x", "<|im_user|>") for one in text], **options)

    base = stand_ins.kimi_vl()
    processor = Chatty(base.image_processor, base.tokenizer, chat_template=base.chat_template)
    processor.__class__.__name__ = "KimiVLProcessor"
    with pytest.raises(UnprovenSpanError, match=r"row 1: the tokens of KimiVLProcessor and those of its rendered text"):
        VLMCollator(processor)(rows(chat("a", "y"), chat("x", "y")))
