"""Every kind of row, under columns of its own names, from a file to the weights: the right tokens are trained on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from spanwise.train.recipe import parse_recipe
from spanwise.train.run import train
from spanwise.train.run_log import read_log
from tests import tiny_tokenizers
from tests.train import runs

ASKED = ["What is a row?", "And what is its length, in bytes?"]
SAID = [" It is one document.", " As many as its text has, naïve ones too."]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("desk")
    runs.save_teacher(root / "teacher")
    tiny_tokenizers.byte_level_bpe().save_pretrained(root / "tokenizer")
    return root


def ids(text: str) -> list[int]:
    return tiny_tokenizers.byte_level_bpe()(text, add_special_tokens=False)["input_ids"]


def chat(place: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": ASKED[place]}, {"role": "assistant", "content": SAID[place]}]


# Our column → its name in the data and what it holds; and how many tokens of the row are trained on. The first token of
# a row has no predictor.
KINDS: dict[str, tuple[dict[str, tuple[str, Any]], Any]] = {
    "text": ({"text": ("body", lambda i: ASKED[i] + SAID[i])}, lambda i: len(ids(ASKED[i] + SAID[i])) - 1),
    "messages": ({"messages": ("chat", chat)}, lambda i: len(ids(SAID[i] + "<|im_end|>"))),
    "prompt": (
        {"prompt": ("question", lambda i: ASKED[i]), "completion": ("answer", lambda i: SAID[i])},
        lambda i: len(ids(SAID[i])) + 1,  # and the end of text, which is what stops an answer
    ),
    "message_log": ({"message_log": ("log", chat)}, lambda i: len(ids(ASKED[i] + SAID[i])) - 1),
    "input_ids": (
        {"input_ids": ("tokens", lambda i: ids(ASKED[i] + SAID[i]))},
        lambda i: len(ids(ASKED[i] + SAID[i])) - 1,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_row_trains_on_the_right_tokens(tmp_path: Path, desk: Path, kind: str) -> None:
    columns, trained = KINDS[kind]
    path = tmp_path / "rows.jsonl"
    rows = [{theirs: made(i) for theirs, made in columns.values()} | {"note": "not read"} for i in range(len(ASKED))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = runs.recipe(tmp_path, desk / "teacher", max_steps=1, per_device_train_batch_size=len(rows))
    content["student"]["tokenizer"] = str(desk / "tokenizer")
    content["data"] = {"train": str(path), "columns": {ours: theirs for ours, (theirs, _) in columns.items()}}
    result = train(parse_recipe(content))
    (step,) = read_log(Path(result["output"]) / "log.jsonl")
    assert step["ce_count"] == sum(trained(i) for i in range(len(rows)))
    assert step["kd/0_count"] > 0
    assert math.isfinite(step["loss"])
    assert result["left_out"] == {}
