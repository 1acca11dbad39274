"""What a run and `spanwise inspect` write, in a real browser: nothing printed, nothing fetched, nothing cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from spanwise.cli import main
from spanwise.report.align_page import write_align_page
from spanwise.train.recipe import parse_recipe
from spanwise.train.run import train
from spanwise.xtoken.show import align_text
from tests import tiny_tokenizers
from tests.browser import too_wide, watched
from tests.train import runs

pytestmark = pytest.mark.browser

WIDTHS = (1000, 390)
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a long name, a teacher in it, and its recipe: reports print such paths."""
    folder = tmp_path_factory.mktemp("a-folder-with-a-name-that-no-window-of-a-telephone-has-room-for")
    runs.save_teacher(folder / "teacher")
    return folder


def look(browser: Browser, path: Path) -> dict[str, Any]:
    """Open a page in every width; what stands on it."""
    for width in WIDTHS:
        with watched(browser, width=width) as page:
            page.goto(path.as_uri())
            assert too_wide(page) == 0, f"{path.name} in a window of {width}"
            found = {
                "headings": [heading.inner_text() for heading in page.query_selector_all("h2")],
                "curves": page.locator("svg").count(),
                "cut": page.eval_on_selector_all("pre", "all => all.filter(e => e.scrollWidth > e.clientWidth).length"),
                "broken": page.eval_on_selector_all("img", "all => all.filter(e => !e.naturalWidth).length"),
                "chunks": page.locator(".chunk").count(),
            }
            assert found["cut"] == 0
            assert found["broken"] == 0
    return found


def test_a_run_report(browser: Browser, desk: Path) -> None:
    content = runs.recipe(desk, desk / "teacher", max_steps=2, eval_strategy="steps", eval_steps=1)
    content["output"] = str(desk / ("a-run-with-a-long-name-" * 4))
    train(parse_recipe(content))
    found = look(browser, Path(content["output"]) / "report.html")
    assert found["curves"] >= 7
    assert {"Held-out measures", "Curves", "Alignment of the first rows", "Left out of training", "Recipe"} <= set(
        found["headings"]
    )


@pytest.mark.parametrize("task", ["distill", "vlm-digits", "mlm-sudoku"])
def test_the_first_batches(task: str, browser: Browser, desk: Path) -> None:
    recipe = RECIPES / f"{task}.yaml"
    if task == "distill":
        recipe = runs.write(runs.recipe(desk, desk / "teacher"), desk / "distill.yaml")
    with pytest.raises(SystemExit) as left:
        main(["inspect", str(recipe), "--rows", "2", "-o", str(desk / f"{task}.html"), "--json"])
    assert left.value.code == 0
    found = look(browser, desk / f"{task}.html")
    assert found["headings"] == ["Batch 0, row 0", "Batch 0, row 1"]
    assert found["chunks"] > 20


def test_the_watch_sees_what_it_is_for(browser: Browser, tmp_path: Path) -> None:
    for name, inside, problem in (
        ("fetches", '<link rel=stylesheet href="http://127.0.0.1:9/style.css">', "127.0.0.1:9"),
        ("prints", "<script>console.log('printed')</script>", "printed"),
        ("wide", '<div style="width:3000px">wide</div>', "wide.html in a window"),
    ):
        (tmp_path / f"{name}.html").write_text(f"<!doctype html><link rel=icon href='data:,'>{inside}")
        with pytest.raises(AssertionError, match=problem):
            look(browser, tmp_path / f"{name}.html")


def test_an_alignment(browser: Browser, tmp_path: Path) -> None:
    tokenizers = tiny_tokenizers.byte_level_bpe(420), tiny_tokenizers.wordpiece()
    found = align_text(*tokenizers, "The statement, naïve and 日本, " + "a-word-without-a-blank" * 20)
    path = write_align_page(tmp_path / "page.html", found, student="s" * 80, teacher="t" * 80)
    assert look(browser, path)["chunks"] == len(found.chunks)
