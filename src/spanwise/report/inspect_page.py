"""What ``spanwise inspect`` shows: rows of a batch, every token with what it is, both sides of a chunk in one box.

Plain data in, one self-contained page out: hovering or focusing a box lights up both of its sides, in every strip that
holds the same tokens; arrow keys walk, ``/`` searches across tokens. O(tokens) characters; runs of padding and of media
are one box each.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spanwise.report import columns
from spanwise.report.page import escape, shown, write_page

Kind = Literal["trained", "given", "hidden", "padding", "media"]
State = Literal["paired", "wrong", "unused", "alone"]

LEGEND: dict[str, str] = {
    "trained": "trained on",
    "given": "given, not trained on",
    "hidden": "hidden (mask)",
    "media": "image, video or audio",
    "padding": "padding",
}
LARGEST_IMAGE = 224


@dataclass(frozen=True)
class ShownToken:
    """A token, or a run of like ones (padding, media) of ``count``."""

    text: str
    kind: Kind
    count: int = 1


@dataclass(frozen=True)
class ShownColumn:
    """One box: the tokens above and below, what the pair is worth, whose document it is, and its image.

    Attributes:
        state: paired, wrong (not claimed), unused (outside of what is trained on), alone (one side only).
        document: 1, 2, … where rows are packed; padding has 0.
        image: a data URI.
    """

    above: tuple[ShownToken, ...]
    below: tuple[ShownToken, ...] = ()
    state: State = "alone"
    document: int = 1
    image: str | None = None


@dataclass(frozen=True)
class ShownStrip:
    """One side over another: their names and the boxes, in order. ``below`` is empty where there is one side only."""

    above: str
    below: str
    columns: Sequence[ShownColumn]


@dataclass(frozen=True)
class ShownRow:
    """A row of a batch: what it is called, its counts, and a strip per teacher (one where there is none)."""

    heading: str
    counts: Mapping[str, object]
    strips: Sequence[ShownStrip]
    images: Sequence[str] = ()


STYLE = columns.STYLE + Path(__file__).with_name("inspect_page.css").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("inspect_page.js").read_text(encoding="utf-8")


def write_inspect_page(path: str | os.PathLike[str], rows: Sequence[ShownRow], *, title: str, subtitle: str) -> Path:
    """Write the page; returns its path."""
    body = _head() + "\n".join(_row(number, row) for number, row in enumerate(rows))
    return write_page(path, title=title, subtitle=subtitle, body=body, style=STYLE, script=SCRIPT)


def _head() -> str:
    legend = " ".join(f'<i class="{kind}">{escape(words)}</i>' for kind, words in LEGEND.items())
    return (
        '<div class="bar"><input id="search" type="search" placeholder="search tokens ( / )" aria-label="search">'
        '<output id="found" for="search"></output><span class="legend chunk">'
        f'{legend} <b class="seam">2</b> next document <span class="wrong">not paired</span></span>'
        '<span class="soft keys"><kbd>←</kbd> <kbd>→</kbd> chunk, <kbd>↑</kbd> <kbd>↓</kbd> line, '
        "<kbd>PgUp</kbd> <kbd>PgDn</kbd> row, <kbd>/</kbd> search, <kbd>Enter</kbd> next hit</span></div>"
        '<div id="detail" role="status" aria-live="polite">Hover or focus a chunk.</div>'
    )


def _row(number: int, row: ShownRow) -> str:
    counts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(shown(value))}</dd>" for name, value in row.counts.items())
    images = "".join(f'<img src="{escape(image)}" alt="image of row {number}">' for image in row.images)
    strips = "".join(_strip(number, place, strip) for place, strip in enumerate(row.strips))
    inside = f"<h2>{escape(row.heading)}</h2><dl>{counts}</dl>{images}{strips}"
    return f'<section class="row" id="row-{number}">{inside}</section>'


def _strip(row: int, place: int, strip: ShownStrip) -> str:
    names = escape(strip.above) + (f" <b>over</b> {escape(strip.below)}" if strip.below else "")
    boxes = []
    above_at = below_at = 0
    document = strip.columns[0].document if strip.columns else 0
    for number, column in enumerate(strip.columns):
        if column.document != document and column.document:
            boxes.append(f'<b class="seam" title="document {column.document} begins">{column.document}</b>')
        document = column.document
        above_end = above_at + sum(token.count for token in column.above)
        below_end = below_at + sum(token.count for token in column.below)
        boxes.append(_box(number, column, (above_at, above_end), (below_at, below_end), bool(strip.below)))
        above_at, below_at = above_end, below_end
    return (
        f'<h3>{names}</h3><div class="chunks" data-row="{row}" data-strip="{place}" '
        f'data-above="{escape(strip.above)}" data-below="{escape(strip.below)}">{"".join(boxes)}</div>'
    )


def _box(number: int, column: ShownColumn, above: tuple[int, int], below: tuple[int, int], has_two_sides: bool) -> str:
    sides = [_side(column.above, column.image)]
    if has_two_sides:
        sides.append(_side(column.below, None))
    colour = f"c{number % columns.COLOURS}" if column.state in ("paired", "unused") else ""
    attributes = f' tabindex="-1" data-a="{above[0]} {above[1]}" data-b="{below[0]} {below[1]}"'
    return columns.box(sides, f"{column.state} {colour}".strip(), attributes)


def _side(tokens: Sequence[ShownToken], image: str | None) -> str:
    picture = "" if image is None else f'<img src="{escape(image)}" alt="image">'
    pieces = [columns.piece(token.text, token.kind, token.count) for token in tokens]
    return picture + "".join(pieces)


def data_uri(image: Any) -> str:
    """A PIL image as a small PNG in a data URI; the image itself is left as it is."""
    small = image.convert("RGB")
    small.thumbnail((LARGEST_IMAGE, LARGEST_IMAGE))
    with io.BytesIO() as file:
        small.save(file, format="PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
