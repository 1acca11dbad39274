"""A page on which texts fill step by step: one table per text, one line per step, one cell per token.

What a step filled is marked and says how likely the model found it. O(steps · tokens) cells.

Shapes: B texts, W tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from spanwise.report.page import escape, section, write_page

STYLE = """
.unfold td { font-family: ui-monospace, monospace; white-space: pre; padding: 0 .3em; text-align: center; }
.unfold td.hidden { opacity: .35; }
.unfold td.filled { outline: 2px solid currentColor; outline-offset: -2px; font-weight: 600; }
"""


def write_unfolding(
    path: str | os.PathLike[str], steps: Sequence[Tensor], probabilities: Sequence[Tensor], tokenizer: Any
) -> Path:
    """Write the page; returns its path.

    Args:
        steps: ids [B, W] before the first and after every step.
        probabilities: float [B, W] of the tokens at each step.
        tokenizer: decodes single tokens; its MASK is shown as a dot, its PAD left out.
    """
    texts = range(len(steps[0]) if steps else 0)
    body = "".join(section(f"Text {row + 1}", _text(row, steps, probabilities, tokenizer)) for row in texts)
    return write_page(path, title="How the texts were filled", body=body, style=STYLE)


def _text(row: int, steps: Sequence[Tensor], probabilities: Sequence[Tensor], tokenizer: Any) -> str:
    before = steps[0][row]
    lines = []
    for number, (ids, likely) in enumerate(zip(steps, probabilities, strict=True)):
        now = ids[row]
        if number and bool((now == before).all()):
            continue  # this text was finished earlier
        cells = [
            _cell(int(token), bool(token != was), float(p), tokenizer)
            for token, was, p in zip(now, before, likely[row], strict=True)
            if int(token) != tokenizer.pad_token_id
        ]
        lines.append(f"<tr><th>{number}</th>{''.join(cells)}</tr>")
        before = now
    return f'<div class="scroll"><table class="unfold"><tbody>\n{"".join(lines)}\n</tbody></table></div>'


def _cell(token: int, filled: bool, probability: float, tokenizer: Any) -> str:
    if token == tokenizer.mask_token_id:
        return '<td class="hidden">·</td>'
    text = escape(tokenizer.decode([token]).replace("\n", "⏎"))
    return f'<td class="filled" title="{probability:.3f}">{text}</td>' if filled else f"<td>{text}</td>"
