"""Tokens in columns: what stands above and what stands below, in one box. Shared by every page that shows tokens.

A page says which boxes there are and which class colours each; this file knows how a box looks and how blanks are made
visible. O(tokens) characters.
"""

from __future__ import annotations

from collections.abc import Sequence

from spanwise.report.page import escape

COLOURS = 6

STYLE = """
.chunks { line-height: 1; display: flex; flex-wrap: wrap; gap: 3px; }
.chunk { border-radius: 4px; padding: 3px 4px; font: 13px/1.5 ui-monospace, Menlo, monospace; color: var(--ink); }
.chunk .side { white-space: pre; display: block; min-height: 1.5em; border-radius: 2px; }
.chunk .side + .side { border-top: 1px solid var(--soft); }
.chunk i { font-style: normal; }
.chunk i + i { border-left: 1px solid var(--soft); padding-left: 2px; margin-left: 2px; }
.c0 { background: var(--c0); } .c1 { background: var(--c1); } .c2 { background: var(--c2); }
.c3 { background: var(--c3); } .c4 { background: var(--c4); } .c5 { background: var(--c5); }
.wrong { background: var(--paper); outline: 2px solid var(--bad); outline-offset: -2px; }
"""


def box(sides: Sequence[str], classes: str, attributes: str = "") -> str:
    """One box; ``sides`` are HTML, from above to below, and ``attributes`` further HTML attributes."""
    inside = "".join(f'<span class="side">{side}</span>' for side in sides)
    return f'<div class="chunk {classes}"{attributes}>{inside}</div>'


def piece(text: str, classes: str = "") -> str:
    """One token's text as HTML."""
    return f"<i{f' class={chr(34)}{classes}{chr(34)}' if classes else ''}>{escape(visible(text))}</i>"


def visible(text: str) -> str:
    """A token's text with its blanks and control characters shown.

    >>> visible(" a\\n")
    '·a↵'
    """
    shown = text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥")
    return "".join(character if character.isprintable() else f"\\u{ord(character):04x}" for character in shown)
