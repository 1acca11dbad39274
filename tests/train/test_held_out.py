"""Held-out text: what is measured of each kind of row, and what is refused before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spanwise.train.data import StreamedRows, open_corpus, rename_columns
from spanwise.train.held_out import check_held_out, documents
from spanwise.train.recipe import Data
from spanwise.train.student import corpus_texts


def jsonl(tmp_path: Path, *rows: dict[str, Any]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


SEEN = {"type": "image", "url": "x.png"}
CHATS = {
    "strings": (["hi", "ho"], "hi\n\nho"),
    "parts": ([[SEEN, {"type": "text", "text": "hi"}], [{"type": "text", "text": "ho"}]], "hi\n\nho"),
    "a call of a tool": (["hi", None], "hi"),
}


@pytest.mark.parametrize("name", CHATS)
def test_of_a_chat_its_text_is_measured_and_no_python_code(tmp_path: Path, name: str) -> None:
    contents, text = CHATS[name]
    roles = ("user", "assistant")
    row = {"messages": [{"role": role, "content": said} for role, said in zip(roles, contents, strict=True)]}
    assert list(documents(jsonl(tmp_path, row), columns={})) == [text]
    assert "".join(corpus_texts([row])) == text.replace("\n", ""), "a tokenizer is trained on the same"


def test_the_other_kinds_are_measured_whole(tmp_path: Path) -> None:
    rows = [{"prompt": "a ", "completion": "b"}, {"message_log": [{"content": "c "}, {"content": "d"}]}]
    for row, text in zip(rows, ("a b", "c d"), strict=True):
        assert list(documents(jsonl(tmp_path, row), columns={})) == [text]


def test_the_column_that_was_chosen_wins_over_one_that_has_our_name(tmp_path: Path) -> None:
    row = {"text": "a summary", "content": "the text", "id": 3}
    assert list(documents(jsonl(tmp_path, row), columns={"text": "content"})) == ["the text"]
    for ordered in (row, dict(reversed(row.items()))):
        assert rename_columns(ordered, {"text": "content"}, 0) == {"text": "the text", "id": 3}
    swapped = rename_columns({"prompt": "a", "completion": "b"}, {"prompt": "completion", "completion": "prompt"}, 0)
    assert swapped == {"prompt": "b", "completion": "a"}


def in_latin(tmp_path: Path) -> str:
    (tmp_path / "old.txt").write_bytes("naïve".encode("latin-1"))
    return str(tmp_path / "old.txt")


def test_held_out_text_in_another_encoding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.eval: the corpus could not be read on .UnicodeDecodeError.*UTF-8"):
        check_held_out(Data(train="x.txt", eval=in_latin(tmp_path)))
    with pytest.raises(ValueError, match=r"old\.txt is no UTF-8.*Fix: iconv -f ISO-8859-1"):
        open_corpus(in_latin(tmp_path))


def test_half_a_surrogate_pair_is_found_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "whole"}\n{"text": "cut \\ud83d"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl could not be read as json .line 2"):
        open_corpus(str(path))


def test_a_stream_without_text_is_refused_before_it_trains_nothing(tmp_path: Path) -> None:
    how: dict[str, Any] = {"columns": {}, "window_bytes": 16, "shuffle_buffer": 2, "seed": 0}
    blank = open_corpus(jsonl(tmp_path, {"text": ""}, {"text": " \n"}), stream=True)
    with pytest.raises(ValueError, match=r"the stream holds no text .left out: 2 rows without text"):
        StreamedRows(blank, **how)
    some = open_corpus(jsonl(tmp_path, {"text": ""}, {"text": "a row"}), stream=True)
    assert [row["text"] for row in StreamedRows(some, **how)] == ["a row"]
