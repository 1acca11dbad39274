"""The one page template: self-contained HTML that opens anywhere, offline, in light and dark.

Everything that people look at (an alignment, the first batches of a recipe, a run, the demo) is a list of sections in
this frame. Pages hold no address of any network; styles and scripts are inline. O(page) memory.
"""

from __future__ import annotations

import html
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<link rel="icon" href="data:,">
<style>{{ style }}{{ extra_style }}</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
{% if subtitle %}<p class="subtitle">{{ subtitle }}</p>{% endif %}
{{ body }}
</main>
{% if script %}<script>{{ script }}</script>{% endif %}
</body>
</html>
"""


def render_page(*, title: str, body: str, subtitle: str = "", style: str = "", script: str = "") -> str:
    """The page as HTML.

    Args:
        title: plain text, escaped here.
        body: HTML, taken as it is: escape what came from a user with :func:`escape`.
        subtitle: plain text, escaped here.
        style: CSS beside the shared one.
        script: JavaScript, taken as it is.
    """
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(TEMPLATE)
    return template.render(
        title=title,
        subtitle=subtitle,
        body=Markup(body),  # noqa: S704 — callers escape what came from a user
        style=Markup(STYLE),  # noqa: S704
        extra_style=Markup(style),  # noqa: S704
        script=Markup(script),  # noqa: S704
    )


def write_page(
    path: str | os.PathLike[str], *, title: str, body: str, subtitle: str = "", style: str = "", script: str = ""
) -> Path:
    """Write the page to ``path``, complete or not at all; returns the path. Arguments as :func:`render_page`."""
    target = Path(path)
    text = render_page(title=title, body=body, subtitle=subtitle, style=style, script=script)
    if target.is_dir():
        raise ValueError(f"'{target}' is a folder; expected the name of a page. Fix: {target / 'page.html'}.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=target.parent, delete=False) as staging:
            staging.write(text)
    except OSError as error:
        raise ValueError(
            f"the page '{target}' cannot be written ({error.strerror}); expected a folder that this user may write to. "
            "The path is probably misspelt. Fix: name another path."
        ) from error
    Path(staging.name).chmod(0o644)
    Path(staging.name).replace(target)
    return target


def escape(text: object) -> str:
    """Text made safe inside HTML, quotes included."""
    return html.escape(str(text), quote=True)


def section(heading: str, body: str) -> str:
    """A heading (plain text) above a body (HTML)."""
    return f"<section><h2>{escape(heading)}</h2>\n{body}\n</section>\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of plain values; numbers are aligned to the right."""
    body = []
    numeric = [True] * len(columns)
    for row in rows:
        numeric = [was and _is_number(value) for was, value in zip(numeric, row, strict=True)]
        body.append(row)
    classes = [' class="number"' if right and body else "" for right in numeric]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(columns, classes, strict=True))
    lines = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(shown(value))}</td>" for value, kind in zip(row, classes, strict=True))
        + "</tr>\n"
        for row in body
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{lines}</tbody></table></div>'


def shown(value: object) -> str:
    """How a value stands in a table: floats with four significant digits, the missing as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
