"""The inspector's page in a real browser: both sides light up, keys walk, search crosses tokens, nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from spanwise.report.inspect_page import ShownColumn, ShownRow, ShownStrip, ShownToken, data_uri, write_inspect_page
from tests.browser import watched

pytestmark = pytest.mark.browser


def column(above: str, below: str, state: Any = "paired", document: int = 1, kind: Any = "trained") -> ShownColumn:
    sides = [tuple(ShownToken(text, kind) for text in side.split("|") if text) for side in (above, below)]
    return ShownColumn(*sides, state, document)


def rows() -> list[ShownRow]:
    from PIL import Image

    first = ShownStrip(
        "student",
        "teacher 0: large",
        [
            column("The", "Th|e"),
            column(" state|ment", " statement"),
            column("é", "e|´", "wrong"),
            column(" is", " is", document=2, kind="given"),
            ShownColumn((ShownToken("padding", "padding", 5),), (ShownToken("padding", "padding", 3),), "alone", 0),
        ],
    )
    second = ShownStrip("student", "teacher 1: small", [column("The| state", "The st|ate"), column("ment|é| is", "x")])
    picture = ShownColumn(
        (ShownToken("media", "media", 4),), (), "alone", 1, data_uri(Image.new("RGB", (64, 32), "red"))
    )
    third = ShownStrip("token", "label it predicts", [picture, column("<b>a", "answer", "alone")])
    return [
        ShownRow("Batch 0, row 0", {"tokens": 5, "padding": 5, "coverage": 83.3}, [first, second]),
        ShownRow("Batch 0, row 1", {"tokens": 6}, [third]),
    ]


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    path = write_inspect_page(tmp_path / "page.html", rows(), title="First <batches>", subtitle="Task distill")
    with watched(browser, color_scheme="dark") as opened:
        opened.goto(path.as_uri())
        yield opened


def lit(page: Page) -> list[str]:
    return [side.inner_text() for side in page.query_selector_all(".side.on")]


def test_hovering_a_chunk_lights_up_both_sides_in_every_strip(page: Page) -> None:
    assert lit(page) == []
    page.hover(".chunk >> text=·state >> nth=0")
    first = page.query_selector_all('.chunks[data-strip="0"] .side.on')
    assert ["".join(side.inner_text().split()) for side in first] == ["·statement", "·statement"]
    second = page.query_selector_all('.chunks[data-strip="1"] .side.on')
    assert len(second) == 4
    assert "student [1, 3) ·statement" in page.inner_text("#detail")
    assert "teacher 0: large [2, 3) ·statement" in page.inner_text("#detail")
    page.hover(".chunk.wrong >> nth=-1")
    assert "not paired" in page.inner_text("#detail")


def test_arrow_keys_walk_chunks_lines_and_rows(page: Page) -> None:
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.innerText").split() == ["The", "The"]
    first = page.query_selector_all('.chunks[data-strip="0"] .side.on')
    assert ["".join(side.inner_text().split()) for side in first] == ["The", "The"]
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.a") == "1 3"
    assert len(lit(page)) >= 2
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.parentElement.dataset.strip") == "1"
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.parentElement.dataset.strip") == "0"
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.a") == "5 10"
    page.keyboard.press("PageDown")
    assert page.evaluate("document.activeElement.parentElement.dataset.row") == "1"
    page.keyboard.press("PageUp")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.parentElement.dataset.row") == "0"


def test_search_crosses_tokens_and_enter_goes_on(page: Page) -> None:
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("The statement")
    assert len(page.query_selector_all(".hit")) == 4
    assert page.inner_text("#found") == "4 chunks"
    page.keyboard.press("Enter")
    assert page.inner_text("#found") == "1 of 4"
    page.keyboard.press("Escape")
    assert page.query_selector_all(".hit") == []
    assert page.evaluate("document.activeElement.classList.contains('chunk')")
    page.keyboard.press("/")
    page.keyboard.type("no such text")
    assert page.inner_text("#found") == "0 chunks"


def test_what_is_on_the_page(page: Page) -> None:
    assert page.inner_text("h1") == "First <batches>"
    assert [seam.inner_text() for seam in page.query_selector_all(".chunks .seam")] == ["2"]
    assert "padding ×5" in page.inner_text("#row-0")
    assert page.evaluate("document.querySelector('.chunks img').naturalWidth") == 64
    assert page.query_selector(".chunks b:not(.seam)") is None
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
