"""The demo's page and its table, from results made by hand: every part is there, and a browser shows all of it."""

from __future__ import annotations

import csv
import html
import re

import pytest

from spanwise.demo import arms as a
from spanwise.demo import page as demo_page
from spanwise.demo.jobs import held_out
from spanwise.demo.page import GRID_FILE, training_size, write_demo_page
from spanwise.demo.sentence import PROVES_NOTHING, lead
from spanwise.demo.table import arms_table
from spanwise.loading import BUILTIN_SMOLLM2, load_tokenizer
from spanwise.train.builtin import builtin_documents
from spanwise.train.catalog import recipe_text
from spanwise.train.recipe import parse_recipe, read_yaml
from tests.browser import chromium, too_wide, watched
from tests.demo.handmade import FACTS, result
from tests.docs.test_blocks import check_command


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_demo_page(tmp_path_factory.mktemp("page") / "report.html", result(2.3), FACTS, quick=False)


@pytest.fixture(scope="module")
def page(path):
    return path.read_text()


def part(page, heading):
    """The text of one section, without its marks."""
    (found,) = re.findall(rf"<h2>{re.escape(heading)}</h2>(.*?)</section>", page, re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", " ", found))


def test_the_sentence_stands_first_and_nothing_is_fetched(page):
    assert page.index(html.escape(lead(result(2.3)))) < page.index("<h2>")
    assert "http://" not in page
    assert "https://" not in page


def test_a_quick_page_says_that_it_proves_nothing(tmp_path, monkeypatch, page):
    for name in ("_aligned_example", "_projection_part"):  # the slow parts, which say the same for every scale
        monkeypatch.setattr(demo_page, name, lambda *_: "")
    monkeypatch.setattr(demo_page, "student_tokenizer", lambda: None)
    quick = write_demo_page(tmp_path / "report.html", result(2.3, seeds=1), FACTS, quick=True).read_text()
    assert f'<p class="bad">{PROVES_NOTHING}</p>' in quick
    assert quick.count("proves nothing") == 1
    assert "12 steps of 8 windows of 700 bytes" in quick
    assert "with 1 seed per arm" in quick
    assert PROVES_NOTHING not in page


def test_curves_and_a_dot_for_every_seed(page):
    section = page[page.index("A small student and a teacher") : page.index("One sentence")]
    dots = re.findall(r"<circle[^>]*><title>([^<]*)</title>", section)
    names = (a.CROSS_ENTROPY, a.DISTILLED, a.DOUBLED)
    assert [dot.split(":")[0] for dot in dots] == [name for name in names for _ in range(2)]
    assert [dot.split(": ")[1] for dot in dots] == ["2.5000", "2.5000", "2.3000", "2.3100", "2.4000", "2.4000"]
    curves = re.findall(r"<polyline[^>]*><title>([^<]*)</title>", section)
    assert sorted(curve.split(":")[0] for curve in curves) == sorted(
        f"{name}, seed {seed}" for name in names for seed in (0, 1)
    )


def test_controls_spread_and_equal_wall_clock(page):
    student = part(page, "A small student and a teacher with another tokenizer")
    assert re.search(r"½ cross entropy \+ ½ teacher\s+2\s+2\.305\s+0\.007071\s", student)
    assert "At equal wall-clock" in student
    assert "AdamW's step does not depend on the loss's scale" in student
    swap = part(page, "A model on another tokenizer")
    for name in (a.ORIGINAL, a.SWAPPED, a.SWAPPED_TRAINED, a.ORIGINAL_TRAINED):
        assert name in swap
    assert "53% of the gap on Python's help and 43% on the tales" in swap
    assert "78% of the new tokens are byte-equal" in swap


def test_the_grid_is_that_of_the_benchmark(page):
    student = part(page, "A small student and a teacher with another tokenizer")
    rows = list(csv.DictReader(GRID_FILE.read_text().splitlines()))
    assert len(rows) == 6
    for row in rows:
        shown = (row["arm"], f"{float(row['learning_rate']):.4g}", f"{float(row['bits_per_byte']):.4g}")
        assert re.search(r"\s+".join(map(re.escape, shown)), student), shown


def test_the_sizes_are_those_of_the_recipes_and_of_the_held_out_text(page, path):
    recipe = a.student_recipe(
        a.CROSS_ENTROPY, 0, scale=a.FULL, folder=path, tokenizer=path, cache=path, train="", rate=a.LEARNING_RATE
    )
    assert (recipe["train"]["max_steps"], recipe["train"]["per_device_train_batch_size"]) == (200, 4)
    pages = builtin_documents(a.DOCS)[:40]
    size = training_size(a.FULL)
    assert size.startswith("200 steps of 4 windows of 700 bytes (560 kB in all), cut from 40 pages")
    assert f"({sum(len(text.encode()) for text in pages) / 1e3:,.0f} kB)" in size
    assert size in html.unescape(page)
    fine_print = part(page, "Read before believing")
    for most, who in ((12_000, "swap"), (None, "student")):
        for name in (a.DOCS_HELD_OUT, a.TALES_HELD_OUT):
            texts = held_out(name, most)
            assert f"({sum(len(text.encode()) for text in texts):,} bytes)" in fine_print, who
    assert "12 kB" not in fine_print
    assert "with 2 seeds per arm" in fine_print


def test_what_is_said_of_the_teacher_is_so(page):
    fine_print = part(page, "Read before believing")
    assert "its weights are 4-bit quantised" in fine_print
    assert "lacks the original's rule of digit splitting" in fine_print
    teacher = load_tokenizer(BUILTIN_SMOLLM2)
    assert "Digits" not in str(teacher.backend_tokenizer.pre_tokenizer)
    assert not [token for token in teacher.get_vocab() if re.search(r"\d\d", token) and not token.startswith("<")]


def test_the_aligned_sentence_is_readable(page):
    sentence = part(page, "One sentence, two tokenizers")
    assert "·qu" in sentence
    assert "·façade" in sentence
    assert "Ġ" not in sentence
    assert "Ã" not in sentence
    assert "31 chunks hold 100.0% of the student's tokens" in sentence


def test_projection_coverage(page):
    rows = re.findall(r"(\d+\.\d)%", part(page, "Projection coverage"))
    exact, reached, of_text = map(float, rows)
    assert 50 < exact < reached <= 100
    assert exact < of_text <= 100


def test_what_it_cost(page):
    cost = part(page, "What it cost")
    for name, value in (
        ("whole demo, seconds", "280"),
        ("teacher's pass over the corpus, seconds", "60"),
        ("teacher tokens scored", "1000"),
        ("bytes per teacher token on disk", "140"),
        ("most memory of a training process, MB", "700"),
    ):
        assert re.search(rf"{re.escape(name)}\s+{value}\s", cost), name


@pytest.mark.parametrize(("has_gpu", "words"), [(True, "This machine has a GPU"), (False, "On a machine with a GPU")])
def test_the_three_commands_exist_and_fit_the_recipe(has_gpu, words, monkeypatch):
    monkeypatch.setattr(demo_page.torch.cuda, "is_available", lambda: has_gpu)
    found = html.unescape(demo_page._next_commands())
    assert words in found
    (block,) = re.findall(r"<pre>(.*?)</pre>", found, re.DOTALL)
    show, train, evaluate = block.replace("\\\n", " ").splitlines()
    for line in (show, train, evaluate):
        check_command(line)
    recipe = parse_recipe(read_yaml(recipe_text(show.split()[3]), name="shown"), train.split()[3:])
    assert recipe.output == evaluate.split()[2]
    assert recipe.data.eval == evaluate.split()[-1]


@pytest.mark.browser
def test_a_browser_shows_all_of_it(path):
    cut = "element => element.scrollWidth > element.clientWidth"
    with chromium() as browser:
        for width in (1000, 390):
            with watched(browser, width=width) as opened:
                opened.goto(path.as_uri())
                assert too_wide(opened) == 0
                assert opened.eval_on_selector_all("pre", f"all => all.filter({cut}).length") == 0
                assert opened.locator("svg").count() == 2
                assert opened.locator(".chunks .chunk").count() == 31


def test_the_table_has_every_arm_with_its_spread():
    found = {
        "arms": result(2.3),
        "sentence": "A sentence of [brackets].",
        "report": "/a/" + "long/" * 30 + "report.html",
    }
    printed = arms_table(found)
    lines = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in printed.splitlines() if "│" in line}
    cells = {name: [cell.strip() for cell in line] for name, line in lines.items()}
    assert cells == {
        a.ORIGINAL: ["1", "1.030", "", "1.130", "50"],
        a.SWAPPED: ["1", "1.270", "", "1.360", "50"],
        a.SWAPPED_TRAINED: ["1", "1.090", "", "1.230", "70"],
        a.ORIGINAL_TRAINED: ["1", "0.930", "", "1.060", "72"],
        a.CROSS_ENTROPY: ["2", "2.500", "2.500–2.500", "2.000", "50"],
        a.DISTILLED: ["2", "2.305", "2.300–2.310", "2.000", "50"],
        a.DOUBLED: ["2", "2.400", "2.400–2.400", "2.000", "50"],
    }
    assert "A sentence of [brackets]." in printed
    assert f"Report: {found['report']}\n" in printed
