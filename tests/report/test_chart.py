from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from hypothesis import given
from hypothesis import strategies as st

from spanwise.report.chart import dot_plot, line_chart
from spanwise.report.page import render_page, section, table, write_page

number = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(st.tuples(number, number), max_size=30))
def test_any_curve_is_well_formed_and_inside_its_frame(points):
    figure = line_chart({"kd & <ce>": points}, title="loss", x_label="step")
    root = ElementTree.fromstring(figure)
    for polyline in root.iter("polyline"):
        for pair in polyline.get("points").split():
            x, y = map(float, pair.split(","))
            assert -1 <= x <= 641
            assert -1 <= y <= 301


@given(st.lists(number, max_size=6), st.lists(number, max_size=6))
def test_any_dots_are_well_formed(first, second):
    ElementTree.fromstring(dot_plot({"a": first, "<b>": second}, title="seeds", x_label="bits per byte"))


def test_long_curves_keep_their_ends():
    figure = line_chart({"a": [(float(i), float(i)) for i in range(5000)]}, title="t", x_label="x")
    points = next(ElementTree.fromstring(figure).iter("polyline")).get("points").split()
    assert len(points) == 400
    assert float(points[0].split(",")[0]) < float(points[-1].split(",")[0])


def test_points_that_are_not_finite_are_counted():
    assert "2 points were not finite" in line_chart(
        {"a": [(0.0, 1.0), (1.0, float("nan")), (2.0, float("inf"))]}, title="t", x_label="x"
    )


def test_a_page_escapes_what_is_text_and_names_no_network():
    page = render_page(title="<script>", body=section("a & b", table(["name", "n"], [["<x>", 3], ["y", None]])))
    assert "&lt;script&gt;" in page
    assert "&lt;x&gt;" in page
    assert "http://" not in page
    assert "https://" not in page


def test_a_page_is_written_whole(tmp_path):
    path = write_page(tmp_path / "deep" / "report.html", title="run", body="<p>ok</p>")
    assert path.read_text().endswith("</html>\n") or path.read_text().endswith("</html>")
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
