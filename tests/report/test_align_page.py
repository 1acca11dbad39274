"""What `spanwise align` shows: JSON keys, the terminal, the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spanwise.cli import main
from spanwise.report.align_page import visible, write_align_page
from spanwise.xtoken.show import align_text


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, byte_bpe: Any, sentencepiece_bpe: Any) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("tokenizers")
    byte_bpe.save_pretrained(root / "student")
    sentencepiece_bpe.save_pretrained(root / "teacher")
    return str(root / "student" / "tokenizer.json"), str(root / "teacher")


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as left:
        main(["align", *arguments])
    return int(left.value.code or 0)


def test_json_has_half_open_ranges_that_tile_both_sides(
    folders: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*folders, "--text", "the statement is é 日", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"chunks", "coverage", "quality"}
    assert found["coverage"] == 1.0
    assert found["quality"] == "canonical"
    for side in ("student", "teacher"):
        at = 0
        for chunk in found["chunks"]:
            assert chunk[side][0] == at
            at = chunk[side][1]
        assert at > 0
    assert all(isinstance(chunk["correct"], bool) for chunk in found["chunks"])


def test_a_file_in_the_terminal_and_on_a_page(
    folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("<b>some & text</b>\n", encoding="utf-8")
    page = tmp_path / "out" / "page.html"
    assert run([*folders, "--file", str(tmp_path / "text.txt"), "--html", str(page)]) == 0
    assert "coverage 100.0 %" in capsys.readouterr().out
    content = page.read_text(encoding="utf-8")
    assert "<b>some" not in content
    assert "&lt;" in content
    assert "http" not in content.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    "arguments",
    [["--text", "a", "--file", "b"], ["--file", "/nowhere/at/all.txt"], ["--file", "/"], ["--file", "latin-1.txt"]],
)
def test_bad_arguments_leave_with_2(
    arguments: list[str],
    folders: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin-1.txt").write_bytes("naïve".encode("latin-1"))
    assert run([*folders, *arguments, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"error"}
    assert all(word in found["error"] for word in ("expected", "probably", "Fix:"))


def test_a_file_is_aligned_as_it_is_line_ends_included(
    folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dos.txt").write_bytes(b"the\r\nstatement\r\n")
    assert run([*folders, "--file", str(tmp_path / "dos.txt"), "--json"]) == 0
    from_file = capsys.readouterr().out
    assert run([*folders, "--text", "the\r\nstatement\r\n", "--json"]) == 0
    assert from_file == capsys.readouterr().out
    assert run([*folders, "--text", "the\nstatement\n", "--json"]) == 0
    assert from_file != capsys.readouterr().out


def test_what_is_not_claimed_is_red_and_among_the_worst(byte_bpe: Any, wordpiece: Any, tmp_path: Path) -> None:
    found = align_text(byte_bpe, wordpiece, "The 日本 Statement")
    assert found.coverage < 1
    assert not found.worst()[0].correct
    assert 'class="chunk wrong"' in write_align_page(tmp_path / "p.html", found, student="a", teacher="b").read_text()


def test_an_empty_text_has_no_chunks(byte_bpe: Any) -> None:
    assert align_text(byte_bpe, byte_bpe, "").as_json() == {"chunks": [], "coverage": 1.0, "quality": "exact"}


def test_blanks_and_control_characters_are_shown() -> None:
    assert visible("a\x00\u200d b") == "a\\u0000\\u200d·b"
