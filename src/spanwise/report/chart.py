"""Line charts and dot plots as inline SVG: no library, no script, one `<title>` per mark as the tooltip.

O(points) characters; long curves are thinned to at most 400 points, the first and the last always kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from spanwise.report.page import escape

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 26, 34
MOST_POINTS = 400

Point = tuple[float, float]


def line_chart(series: Mapping[str, Sequence[Point]], *, title: str, x_label: str, y_label: str = "") -> str:
    """Curves over a common x axis. Points that are not finite are left out of the curve and counted below it."""
    finite = {
        name: [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])] for name, points in series.items()
    }
    lost = sum(len(points) for points in series.values()) - sum(len(points) for points in finite.values())
    every = [point for points in finite.values() for point in points]
    if not every:
        return f'<p class="soft">{escape(title)}: nothing was logged.</p>'
    x_ticks, y_ticks = _ticks([x for x, _ in every]), _ticks([y for _, y in every])
    place = _placer(x_ticks, y_ticks)
    marks = [_frame(title, x_label, y_label, x_ticks, y_ticks, place)]
    for index, (name, points) in enumerate(finite.items()):
        if not points:
            continue
        thinned = _thin(points)
        path = " ".join(f"{place(x, y)[0]:.1f},{place(x, y)[1]:.1f}" for x, y in thinned)
        colour = f"var(--s{index % 6})"
        last = points[-1]
        marks.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8">'
            f"<title>{escape(name)}: {last[1]:.4g} at {last[0]:g}</title></polyline>"
        )
        if len(points) == 1:
            x, y = place(*last)
            marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    note = f'<p class="soft">{lost} points were not finite and are not drawn.</p>' if lost else ""
    return f"<figure>{_svg(title, marks)}{_legend([name for name, points in finite.items() if points])}{note}</figure>"


def dot_plot(groups: Mapping[str, Sequence[float]], *, title: str, x_label: str) -> str:
    """One row of dots per group (one dot per seed, say), with the mean as a bar."""
    finite = {name: [v for v in values if math.isfinite(v)] for name, values in groups.items()}
    every = [value for values in finite.values() for value in values]
    if not every:
        return f'<p class="soft">{escape(title)}: nothing was measured.</p>'
    ticks = _ticks(every)
    label_width, row_height = 190, 30
    height = TOP + BOTTOM + row_height * len(finite)

    def across(value: float) -> float:
        return label_width + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (WIDTH - label_width - RIGHT)

    marks = [_title(title, 0)]
    marks += [
        f'<line x1="{across(t):.1f}" y1="{TOP}" x2="{across(t):.1f}" y2="{height - BOTTOM}" stroke="var(--line)"/>'
        f'<text x="{across(t):.1f}" y="{height - BOTTOM + 14}" text-anchor="middle">{t:g}</text>'
        for t in ticks
    ]
    marks.append(f'<text x="{WIDTH - RIGHT}" y="{height - 4}" text-anchor="end">{escape(x_label)}</text>')
    for row, (name, values) in enumerate(finite.items()):
        y = TOP + row_height * (row + 0.5)
        marks.append(f'<text x="{label_width - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        if values:
            middle = across(sum(values) / len(values))
            marks.append(
                f'<line x1="{middle:.1f}" y1="{y - 9:.1f}" x2="{middle:.1f}" y2="{y + 9:.1f}" '
                f'stroke="var(--s{row % 6})" stroke-width="2.5"/>'
            )
        marks.extend(
            f'<circle cx="{across(v):.1f}" cy="{y:.1f}" r="4.5" fill="var(--s{row % 6})" fill-opacity=".65">'
            f"<title>{escape(name)}: {v:.4f}</title></circle>"
            for v in values
        )
    return f"<figure>{_svg(title, marks, height)}</figure>"


def _ticks(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5
    raw = (high - low) / 5
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _placer(x_ticks: Sequence[float], y_ticks: Sequence[float]) -> Callable[[float, float], Point]:
    def place(x: float, y: float) -> Point:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    return place


def _frame(
    title: str,
    x_label: str,
    y_label: str,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    place: Callable[[float, float], Point],
) -> str:
    parts = [_title(title, LEFT)]
    for tick in y_ticks:
        _, y = place(x_ticks[0], tick)
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="var(--line)"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for tick in x_ticks:
        x, _ = place(tick, y_ticks[0])
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x_label)}</text>')
    if y_label:
        parts.append(f'<text x="{WIDTH - RIGHT}" y="14" text-anchor="end">{escape(y_label)}</text>')
    return "".join(parts)


def _title(title: str, x: int) -> str:
    return f'<text x="{x}" y="14" style="font-weight:600">{escape(title)}</text>'


def _thin(points: Sequence[Point]) -> list[Point]:
    if len(points) <= MOST_POINTS:
        return list(points)
    step = (len(points) - 1) / (MOST_POINTS - 1)
    return [points[round(i * step)] for i in range(MOST_POINTS)]


def _svg(title: str, marks: Sequence[str], height: int = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(marks)}</svg>'
    )


def _legend(names: Sequence[str]) -> str:
    items = (
        f'<span style="margin-right:1.2em"><span style="color:var(--s{index % 6})">●</span> {escape(name)}</span>'
        for index, name in enumerate(names)
    )
    return f'<figcaption class="soft">{"".join(items)}</figcaption>'
