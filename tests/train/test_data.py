from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwise.train.builtin import builtin_documents
from spanwise.train.data import (
    IndexedRows,
    StreamedRows,
    open_corpus,
    rename_columns,
    row_kind,
    text_windows,
)
from spanwise.train.held_out import documents
from spanwise.train.left_out import CARRIED

ROWS = [{"text": "first row, longer"}, {"text": " \n"}, {"text": "second"}, {"text": "三番目の行"}]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


@given(st.text(max_size=200), st.integers(16, 64))
def test_windows_joined_give_the_text_and_none_is_too_long(text, window_bytes):
    text = text.encode("utf-8", "ignore").decode()
    windows = text_windows(text, window_bytes)
    assert "".join(windows) == text
    assert all(0 < len(window.encode()) <= window_bytes for window in windows)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "txt"])
def test_every_file_kind_gives_the_same_rows(tmp_path, kind):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset

    path = tmp_path / f"corpus.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif kind == "arrow":
        Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
        next((tmp_path / "saved").glob("*.arrow")).rename(path)
    else:
        path.write_text("one document\nof two lines", encoding="utf-8")
    rows = IndexedRows(open_corpus(str(path)), columns={}, window_bytes=None)
    if kind == "txt":
        assert [row["text"] for row in rows] == ["one document\nof two lines"]
    else:
        assert [rows[i]["text"] for i in range(len(rows))] == [row["text"] for row in ROWS if row["text"].strip()]
        assert rows.left_out.reasons == {"rows without text": 1}


def test_streamed_rows_are_the_indexed_ones_in_another_order(jsonl):
    indexed = IndexedRows(open_corpus(str(jsonl)), columns={}, window_bytes=16)
    streamed = StreamedRows(open_corpus(str(jsonl), stream=True), columns={}, window_bytes=16, shuffle_buffer=4, seed=0)
    assert sorted(row["text"] for row in streamed) == sorted(indexed[i]["text"] for i in range(len(indexed)))
    carried = sum((Counter(row.get(CARRIED)) for row in streamed), Counter())
    assert carried == indexed.left_out.reasons == {"rows without text": 1}


def test_columns_are_mapped_and_a_missing_one_is_named():
    assert rename_columns({"content": "a", "id": 3}, {"text": "content"}, 0) == {"text": "a", "id": 3}
    with pytest.raises(ValueError, match=r"row 5 has the columns body; expected content"):
        rename_columns({"body": "a"}, {"text": "content"}, 5)
    with pytest.raises(ValueError, match=r"data\.columns"):
        row_kind({"body": "a"}, 2)


def test_a_corpus_without_text_is_refused(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text('{"text": ""}\n{"text": "  "}\n')
    with pytest.raises(ValueError, match="2 rows and none holds text"):
        IndexedRows(open_corpus(str(path)), columns={}, window_bytes=None)


@pytest.mark.parametrize(
    ("name", "words"),
    [("missing.jsonl", "there is no file"), ("data.csv", "there is no file|ends in"), ("no-such-dataset", "hub")],
)
def test_a_corpus_that_is_not_there_is_named(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.csv").write_text("a,b\n")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        open_corpus(name)


def test_a_truncated_file_is_named(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "cut o')
    with pytest.raises(ValueError, match="could not be read as json"):
        open_corpus(str(path))


@pytest.mark.parametrize("name", ["builtin:python-docs", "builtin:tales"])
def test_held_out_documents_are_whole_and_never_trained_on(name):
    trained, held_out = builtin_documents(name), builtin_documents(f"{name}:eval")
    assert len(held_out) > 5
    everything_trained = "\n".join(" ".join(text.split()) for text in trained)
    for text in held_out:
        words = text.split()
        runs_of_words = [" ".join(words[start : start + 12]) for start in range(len(words) - 11)]
        assert not [run for run in runs_of_words if run in everything_trained]
    assert list(documents(f"{name}:eval", columns={}, most=3)) == held_out[:3]


def test_an_unknown_builtin_is_named():
    with pytest.raises(ValueError, match="no built-in corpus 'builtin:news'"):
        open_corpus("builtin:news")


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """The rows of a memory-mapped corpus are read one at a time; only the index of windows is held."""
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for number in range(2_000):
            file.write(json.dumps({"text": f"{number} " + "word " * 400}) + "\n")
    rows = IndexedRows(open_corpus(str(path)), columns={}, window_bytes=512)
    assert len(rows) > 4_000
    held = rows._index.nbytes
    assert held == 24 * len(rows)
    assert rows[len(rows) - 1]["text"].endswith("word ")
