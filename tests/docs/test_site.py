"""The documentation as it is built: without a warning, and no page of it loads anything from another host."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.browser import chromium, watched

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.full, pytest.mark.browser]


@pytest.fixture(scope="module")
def generator_path(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Where mkdocs lies: in this environment, or installed beside it, which leaves this one as it is."""
    if find_spec("mkdocs") and find_spec("material") and find_spec("mkdocstrings"):
        return []
    folder = tmp_path_factory.mktemp("mkdocs")
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    call([*pip, "-c", str(ROOT / "constraints.txt"), "--target", str(folder), *extra], os.environ)
    return [str(folder)]


@pytest.fixture(scope="module")
def site(generator_path: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``make docs`` builds, in another folder."""
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join(generator_path)}
    said = call([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], environment)
    assert "WARNING" not in said
    return folder


def call(words: list[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def test_every_page_is_built(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= {page.relative_to(site) for page in site.rglob("*.html")}


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    with chromium() as browser:
        for page in pages:
            # Opened as a file, the search cannot fetch its index from the same folder and says so.
            with watched(browser, quiet=False) as opened:
                opened.goto(page.as_uri())
                assert opened.inner_text("h1"), page
