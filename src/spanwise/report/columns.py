"""Tokens in columns: what stands above and what stands below, in one box. Shared by every page that shows tokens.

A page says which boxes there are and which class colours each; this file knows how a box looks and how blanks are made
visible. O(tokens) characters.
"""

from __future__ import annotations

from collections.abc import Sequence

from spanwise.report.page import escape

COLOURS = 6

STYLE = """
.chunks { line-height: 1; display: flex; flex-wrap: wrap; gap: 3px; align-items: flex-start; }
.chunk { border-radius: 4px; padding: 3px 4px; font: 13px/1.5 ui-monospace, Menlo, monospace; color: var(--ink); }
.chunk .side { white-space: pre; display: block; min-height: 1.5em; }
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


def piece(text: str, kind: str = "", count: int = 1) -> str:
    """One token's text as HTML, or that of ``count`` like ones; ``kind`` is its class."""
    opening = f'<i class="{kind}">' if kind else "<i>"
    return f"{opening}{escape(visible(text))}{f' ×{count}' if count > 1 else ''}</i>"


def visible(text: str) -> str:
    """A token's text with its blanks and control characters shown.

    >>> visible(" a\\n")
    '·a↵'
    """
    shown = text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥")
    return "".join(character if character.isprintable() else f"\\u{ord(character):04x}" for character in shown)
