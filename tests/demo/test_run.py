"""The demo's course with every piece of work patched out: which arms are asked for, what is kept, what is printed."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace

import pytest

from spanwise.cli import main
from spanwise.demo import arms, jobs, run
from spanwise.loading import cache_dir
from tests.demo.handmade import arm

BITS = {
    arms.ORIGINAL: 1.03,
    arms.SWAPPED: 1.27,
    arms.SWAPPED_TRAINED: 1.09,
    arms.ORIGINAL_TRAINED: 0.93,
    arms.CROSS_ENTROPY: 2.5,
    arms.DISTILLED: 2.4,
    arms.DOUBLED: 2.5,
}


class PoolInThisProcess(ProcessPoolExecutor):
    """Does at once what it is given; starts no process."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, work, *words):
        future = Future()
        future.set_result(work(*words))
        return future


@pytest.fixture
def done(monkeypatch, tmp_path):
    """What was done, counted by name; nothing is trained, and the page is one word."""
    counts = Counter()

    def prepare(work, scale):
        counts["prepare"] += 1
        for name in ("tokenizer-8k", "tokenizer-2k", "swapped"):
            (work / name).mkdir()
        (work / "student-corpus.jsonl").write_text("")
        return {"seconds": 1.0, "exact_share": 0.78}

    def score(work, scale):
        counts["score"] += 1
        (work / "teacher-cache").mkdir()
        return {"tokens": 1000, "bytes_per_token": 140.0, "seconds": 1.0}

    def made(name, seed):
        counts[name, seed] += 1
        return arm(name, seed, BITS[name])

    monkeypatch.setenv("SPANWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run, "ProcessPoolExecutor", PoolInThisProcess)
    monkeypatch.setattr(jobs, "prepare", prepare)
    monkeypatch.setattr(jobs, "score_corpus", score)
    monkeypatch.setattr(jobs, "measure_untrained", lambda name, *_: made(name, None))
    monkeypatch.setattr(jobs, "train_swap", lambda name, source, seed, *_: made(name, seed))
    monkeypatch.setattr(jobs, "train_student", lambda name, seed, *_: made(name, seed))
    monkeypatch.setattr(run, "write_demo_page", lambda path, *_, **__: path.write_text("page"))
    return counts


def command(*words):
    with pytest.raises(SystemExit) as left:
        main(["demo", *words])
    return left.value.code


def seeds_of(done, name):
    return sorted(word[1] for word in done if isinstance(word, tuple) and word[0] == name)


@pytest.mark.parametrize(
    ("words", "seeds"),
    [([], [0, 1]), (["--seeds", "3"], [0, 1, 2]), (["--quick"], [0]), (["--quick", "--seeds", "2"], [0, 1])],
)
def test_how_many_seeds(words, seeds, done, tmp_path, capsys):
    assert command("-o", str(tmp_path / "out"), "--json", *words) == 0
    result = json.loads(capsys.readouterr().out)
    for name in run.STUDENT_ARMS:
        assert seeds_of(done, name) == seeds
    for name in (arms.SWAPPED_TRAINED, arms.ORIGINAL_TRAINED):
        assert seeds_of(done, name) == [0]
    assert [(arm["name"], arm["seed"]) for arm in result["arms"]][-3:] == [(n, seeds[-1]) for n in run.STUDENT_ARMS]
    assert result["sentence"].startswith("This was --quick") == ("--quick" in words)
    assert ("no verdict" in result["sentence"]) == (len(seeds) == 1)
    assert "1 seeds" not in result["sentence"]
    assert (tmp_path / "out" / "report.html").read_text() == "page"
    assert json.loads((tmp_path / "out" / "arms.json").read_text())["facts"]["exact_share"] == 0.78


def test_no_seeds_are_refused(done, capsys):
    assert command("--seeds", "0", "--json") == 2
    assert set(json.loads(capsys.readouterr().out)) == {"error"}
    assert not done


def test_the_terminal_says_what_a_quick_run_is_worth(done, tmp_path, capsys):
    assert command("-o", str(tmp_path / "out"), "--quick") == 0
    printed, progress = capsys.readouterr()
    assert "proves nothing" in printed
    assert f"Report: {tmp_path / 'out' / 'report.html'}\n" in printed
    assert "2 × cross entropy, seed 0: 2.500 / 2.000 bits per byte" in progress


def test_what_was_kept_is_used_and_no_cache_keeps_nothing(done, tmp_path):
    for _ in range(2):
        assert command("-o", str(tmp_path / "out"), "--no-cache") == 0
    assert done["prepare"] == done["score"] == 2
    assert not (cache_dir() / "demo").exists()
    for _ in range(2):
        assert command("-o", str(tmp_path / "out")) == 0
    assert done["prepare"] == done["score"] == 3
    (kept,) = (cache_dir() / "demo").iterdir()
    assert {path.name for path in kept.iterdir()} == {
        "tokenizer-8k",
        "tokenizer-2k",
        "swapped",
        "teacher-cache",
        "student-corpus.jsonl",
        "prepared.json",
    }


def another_text(monkeypatch, tmp_path):
    """Help pages of another CPython."""
    monkeypatch.setattr(run, "builtin_documents", lambda name: [f"other pages of {name}"])


def another_scale(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "FULL", replace(run.FULL, teacher_documents=41))


def another_teacher(monkeypatch, tmp_path):
    file = tmp_path / run.smollm2_gguf().name
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(run, "smollm2_gguf", lambda: file)


def another_version(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "__version__", "99.0")


@pytest.mark.parametrize("change", [another_text, another_scale, another_teacher, another_version])
def test_what_was_made_from_something_else_is_made_anew_and_replaced(change, done, tmp_path, monkeypatch):
    assert command("-o", str(tmp_path / "out")) == 0
    assert command("-o", str(tmp_path / "out"), "--quick") == 0
    (before,) = (cache_dir() / "demo").glob("full-*")
    change(monkeypatch, tmp_path)
    assert command("-o", str(tmp_path / "out")) == 0
    assert done["prepare"] == 3
    (after,) = (cache_dir() / "demo").glob("full-*")
    assert after != before
    assert len(list((cache_dir() / "demo").glob("quick-*"))) == 1
