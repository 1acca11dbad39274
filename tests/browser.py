"""Pages in headless Chromium: what they print, what they ask of other hosts, whether they outgrow their window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's browser; one at a time in a process."""
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield found
        found.close()


@contextmanager
def watched(browser: Browser, *, width: int = 1000, quiet: bool = True, **options: Any) -> Iterator[Page]:
    """A page that must ask no other host for anything, and print nothing where it is to be quiet."""
    page = browser.new_page(viewport={"width": width, "height": 800}, **options)
    printed: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: printed.append(message.text))
    page.on("pageerror", lambda error: printed.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    yield page
    # First what was asked for: a browser also prints what it did not get.
    elsewhere = [url for url in asked if not url.startswith(("file:", "data:"))]
    assert not elsewhere, f"the page asks for {elsewhere}"
    assert not (quiet and printed), f"the page prints {printed}"
    page.close()


def too_wide(page: Page) -> int:
    """How many pixels of the page lie outside of its window."""
    found: int = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return max(0, found)
