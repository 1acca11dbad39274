"""The inspector's data: rows as training sees them, from tokenizers alone; every kind of batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spanwise.cli import main
from spanwise.report.inspect_page import ShownRow, ShownStrip
from spanwise.train import distill, mlm, vlm
from spanwise.train.inspect import first_rows, inspect_recipe
from spanwise.train.inspect_rows import vision_rows
from spanwise.train.recipe import parse_recipe
from spanwise.train.sampler import PlacedRows, StepSampler
from tests import tiny_tokenizers
from tests.train import runs

VLM = Path(__file__).parents[2] / "recipes" / "vlm-digits.yaml"
SUDOKU = Path(__file__).parents[2] / "recipes" / "mlm-sudoku.yaml"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("tokenizers")
    tiny_tokenizers.byte_level_bpe(420, start=8).save_pretrained(root / "bytes")
    tiny_tokenizers.sentencepiece_bpe().save_pretrained(root / "sentencepiece")
    return [str(root / "bytes"), str(root / "sentencepiece")]


def distill_recipe(tmp_path: Path, tokenizers: list[str], **data: Any) -> Any:
    content = runs.recipe(tmp_path)
    content["teachers"] = [
        {"model": "no/such-model", "tokenizer": name, "loss": loss}
        for name, loss in zip(tokenizers, ["prefix_kl", "alm"], strict=False)
    ]
    content["data"] |= data
    return parse_recipe(content)


def tokens(strip: ShownStrip, side: str) -> int:
    return sum(token.count for column in strip.columns for token in getattr(column, side))


def test_two_teachers_over_packed_rows_without_any_model(tmp_path: Path, tokenizers: list[str]) -> None:
    recipe = distill_recipe(tmp_path, tokenizers, packing=True)
    rows = first_rows(recipe, 4)
    assert rows
    for row in rows:
        assert [strip.below.split(":")[0] for strip in row.strips] == ["teacher 0", "teacher 1"]
        for strip in row.strips:
            documents = [column.document for column in strip.columns if column.document]
            assert documents == sorted(documents)
            assert set(documents) == set(range(1, int(str(row.counts["documents"])) + 1))
            assert {column.state for column in strip.columns if column.document} <= {"paired", "alone"}
            for column in strip.columns:
                if column.state == "paired":
                    texts = ["".join(token.text for token in side) for side in (column.above, column.below)]
                    assert texts[0].strip() == texts[1].strip() or "▁" in texts[1] or "\\x" in texts[0]
        assert row.counts["% in a correct chunk, teacher 0"] == 100.0
    assert sum(int(str(row.counts["documents"])) for row in rows) == 4


def test_counts_are_the_batch_s_own(tmp_path: Path, tokenizers: list[str]) -> None:
    (row, *_) = first_rows(distill_recipe(tmp_path, tokenizers[:1]), 4)
    (strip,) = row.strips
    assert tokens(strip, "above") == int(str(row.counts["tokens"])) + int(str(row.counts["padding"]))
    real = [column for column in strip.columns if column.document]
    assert sum(token.count for column in real for token in column.below) == row.counts["tokens, teacher 0"]


def test_rows_come_in_the_order_of_training(tmp_path: Path) -> None:
    recipe = distill_recipe(tmp_path, [])
    rows: Any = distill.build(recipe, tmp_path).train_rows
    first = PlacedRows(rows)[next(iter(StepSampler(len(rows), batch_size=4, seed=0)))[0]]["text"]
    shown = first_rows(recipe, 1)[0].strips[0]
    assert shown.below == ""
    assert "".join(token.text for column in shown.columns for token in column.above).encode()[:40] in first.encode()


def test_a_chat_shows_what_is_trained_and_what_is_unused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizers.byte_level_bpe()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}"
        "{% endif %}{% endfor %}"
    )
    for name in ("student", "teacher"):
        tokenizer.save_pretrained(tmp_path / name)
    chat = [{"role": "user", "content": "the question"}, {"role": "assistant", "content": "the answer"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    content = runs.recipe(tmp_path, None) | {
        "student": {"model": runs.config(), "tokenizer": str(tmp_path / "student")},
        "teachers": [{"model": str(tmp_path / "teacher"), "loss": "prefix_kl"}],
        "data": {"train": str(tmp_path / "chat.jsonl"), "context_length": 128},
    }
    (row,) = first_rows(parse_recipe(content), 8)
    kinds = {
        kind: "".join(t.text for c in row.strips[0].columns for t in c.above if t.kind == kind)
        for kind in ("trained", "given")
    }
    assert "the answer" in kinds["trained"]
    assert "question" in kinds["given"]
    assert "question" not in kinds["trained"]
    assert {column.state for column in row.strips[0].columns} >= {"paired", "unused"}


def test_a_teacher_with_the_student_s_tokenizer_needs_no_strip(tmp_path: Path, tokenizers: list[str]) -> None:
    recipe = distill_recipe(tmp_path, tokenizers[:1])
    content = recipe.model_dump() | {"student": {"model": runs.config(), "tokenizer": tokenizers[0]}}
    content["teachers"][0]["loss"] = "kl"
    (row,) = first_rows(parse_recipe(content), 1)
    assert [(strip.above, strip.below) for strip in row.strips] == [("student", "")]
    content["student"]["tokenizer"] = tokenizers[1]
    with pytest.raises(ValueError, match="another tokenizer than the student"):
        first_rows(parse_recipe(content), 1)


def test_masked_rows_show_what_is_hidden() -> None:
    from spanwise.train.recipe import load_recipe

    recipe = load_recipe(SUDOKU)
    assert isinstance(recipe, mlm.TaskRecipe)
    rows = first_rows(recipe, 3)
    assert len(rows) == 3
    for row in rows:
        columns = row.strips[0].columns
        hidden = [column for column in columns if column.above[0].kind == "hidden"]
        assert len(hidden) == row.counts["hidden"]
        assert all(column.below[0].text in "1234" for column in hidden)
        digits = [(column.below or column.above)[0].text for column in columns if column.document]
        assert all(sorted(digits[at : at + 4]) == ["1", "2", "3", "4"] for at in range(0, 16, 4))


@pytest.mark.parametrize("packing", [False, True])
def test_images_stand_at_their_tokens(packing: bool) -> None:
    from spanwise.train.recipe import load_recipe

    recipe = load_recipe(VLM, [f"data.packing={str(packing).lower()}", "train.per_device_train_batch_size=3"])
    assert isinstance(recipe, vlm.TaskRecipe)
    rows = first_rows(recipe, 6)
    pictures = [column.image for row in rows for column in row.strips[0].columns if column.above[0].kind == "media"]
    assert len(pictures) == 6
    assert all(image is not None and image.startswith("data:image/png;base64,") for image in pictures)
    assert len(set(pictures)) == 6
    assert (len(rows) < 6) == packing
    said = "".join(token.text for row in rows for column in row.strips[0].columns for token in column.below)
    assert said.count("<|im_end|>") == 6


@pytest.mark.parametrize("touching", [True, False])
def test_two_images_of_a_row_are_told_apart(touching: bool) -> None:
    from spanwise.train.digits import digit_rows
    from spanwise.train.recipe import load_recipe
    from spanwise.train.vlm import VisionTask, open_processor

    recipe = load_recipe(VLM)
    assert isinstance(recipe, vlm.TaskRecipe)
    rows: Any = vlm.ConversationRows("builtin:digits", {})
    rows.rows = digit_rows()[:6]
    first, second = rows.rows[0]["conversation"], rows.rows[1]["conversation"]
    parts = [first[0]["content"][0], second[0]["content"][0], first[0]["content"][1]]
    both = [{"role": "user", "content": parts if touching else [parts[0], parts[2], parts[1]]}, first[1]]
    task = VisionTask(recipe, None, open_processor(recipe, rows), rows, None)
    (row,) = vision_rows(task, [{"conversation": both}], task.collator([{"conversation": both}]))
    pictures = [column.image for column in row.strips[0].columns if column.image]
    assert len(set(pictures)) == 2
    assert not row.images
    assert tokens(row.strips[0], "above") == int(str(row.counts["tokens"])) + int(str(row.counts["padding"]))


def test_streams_and_plain_text(tmp_path: Path) -> None:
    rows = first_rows(distill_recipe(tmp_path, [], stream=True), 2)
    assert len(rows) == 2
    assert isinstance(rows[0], ShownRow)


def test_the_command_prints_rows_and_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    with pytest.raises(SystemExit) as left:
        main(["inspect", str(SUDOKU), "--rows", "2", "-o", str(out), "--json"])
    assert left.value.code == 0
    assert json.loads(capsys.readouterr().out) == {"rows": 2, "path": str(out)}
    page = out.read_text(encoding="utf-8")
    assert "http" not in page
    assert page.count('<section class="row"') == 2


def test_the_default_path_lies_beside_the_output(tmp_path: Path) -> None:
    found = inspect_recipe(distill_recipe(tmp_path, []), rows=1)
    assert found["path"] == str(tmp_path / "run.inspect.html")
    assert not (tmp_path / "run").exists()


def test_the_command_refuses_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["inspect", str(SUDOKU), "--rows", "0", "--json"])
    assert left.value.code == 2
    assert set(json.loads(capsys.readouterr().out)) == {"error"}
