"""The embedded default: a real language model used for what Spanwise is for, against fair controls, in one command.

Two processes of one thread each work through the arms. About five minutes on two cores; ``--quick`` shows the machinery
in less than one and proves nothing.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spanwise import __version__
from spanwise.demo import jobs
from spanwise.demo.arms import (
    CROSS_ENTROPY,
    DISTILLED,
    DOCS,
    DOUBLED,
    FULL,
    LEARNING_RATE,
    ORIGINAL,
    ORIGINAL_TRAINED,
    QUICK,
    SWAPPED,
    SWAPPED_TRAINED,
    TALES,
    Scale,
)
from spanwise.demo.page import write_demo_page
from spanwise.demo.sentence import lead
from spanwise.loading import BUILTIN_SMOLLM2, cache_dir, smollm2_gguf
from spanwise.train.builtin import builtin_documents

STUDENT_ARMS = (CROSS_ENTROPY, DISTILLED, DOUBLED)
PROCESSES = 2


def run_demo(
    output: Path, *, quick: bool = False, seeds: int | None = None, cache: bool = True, swap_seeds: int = 1
) -> dict[str, Any]:
    """Run every arm and write ``report.html``.

    Args:
        output: folder of the report; what was in it is replaced.
        quick: a small version of everything, one seed.
        seeds: of the small student; default 2, with ``quick`` 1.
        cache: keep tokenizers and teacher scores in the user's cache for the next run.
        swap_seeds: of the two trained 135M arms.

    Returns:
        arms, sentence, report.
    """
    smollm2_gguf()  # without the teacher's file there is no demo; this says how to get it
    began = time.monotonic()
    scale = QUICK if quick else FULL
    count = seeds if seeds is not None else (1 if quick else 2)
    kept = cache_dir() / "demo" / f"{'quick' if quick else 'full'}-{content_key(scale)}"
    with tempfile.TemporaryDirectory(prefix="spanwise-demo-") as scratch:
        work = Path(scratch)
        if cache and (kept / "prepared.json").is_file():
            shutil.copytree(kept, work, dirs_exist_ok=True)
        facts, arms = _run_arms(work, scale, count, swap_seeds, began)
        if cache:
            _keep(work, kept)
    result = {"arms": arms, "sentence": lead(arms, quick=quick), "report": str(output / "report.html")}
    output.mkdir(parents=True, exist_ok=True)
    (output / "arms.json").write_text(json.dumps(result | {"facts": facts}, indent=1), encoding="utf-8")
    facts["seconds"] = time.monotonic() - began
    write_demo_page(output / "report.html", arms, facts, quick=quick)
    return result


def content_key(scale: Scale) -> str:
    """Names what is kept by everything it was made from: another text, size, teacher or version begins anew."""
    teacher = smollm2_gguf()
    made_from = {
        "version": __version__,
        "scale": asdict(scale),
        "teacher": [teacher.name, teacher.stat().st_size],
        "corpora": [builtin_documents(name) for name in (DOCS, TALES)],
    }
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]


def _run_arms(
    work: Path, scale: Scale, seeds: int, swap_seeds: int, began: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Prepare, then hand out the arms, the longest first; the student's wait for the teacher's scores."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=context, initializer=jobs.one_thread) as pool:
        say = _Progress(began)
        facts = _prepared(work, pool, scale, say)
        scores = None if facts.get("cache") else pool.submit(jobs.score_corpus, work, scale)
        heavy = [
            pool.submit(jobs.train_swap, name, source, seed, work, scale)
            for seed in range(swap_seeds)
            for name, source in ((SWAPPED_TRAINED, str(work / "swapped")), (ORIGINAL_TRAINED, BUILTIN_SMOLLM2))
        ]
        light = [pool.submit(jobs.measure_untrained, name, work, scale) for name in (ORIGINAL, SWAPPED)]
        for future in [*heavy, *light]:
            future.add_done_callback(say.finished)
        if scores is not None:
            facts["cache"] = scores.result()
            say.line(f"teacher scored the corpus once: {facts['cache']['tokens']:,} tokens")
            (work / "prepared.json").write_text(json.dumps(facts), encoding="utf-8")
        students = [
            pool.submit(jobs.train_student, name, seed, LEARNING_RATE, work, scale)
            for seed in range(seeds)
            for name in STUDENT_ARMS
        ]
        for future in students:
            future.add_done_callback(say.finished)
        return facts, [future.result() for future in [*light, *heavy, *students]]


def _prepared(work: Path, pool: ProcessPoolExecutor, scale: Scale, say: _Progress) -> dict[str, Any]:
    kept = work / "prepared.json"
    if kept.is_file():
        say.line("tokenizers, swapped model and teacher scores were kept from an earlier run")
        facts: dict[str, Any] = json.loads(kept.read_text())
        return facts
    facts = pool.submit(jobs.prepare, work, scale).result()
    say.line(f"two tokenizers trained, SmolLM2 swapped onto one: {facts['exact_share']:.0%} of its tokens copied")
    return facts


def _keep(work: Path, kept: Path) -> None:
    """Copy what the next run can use, complete or absent, in the place of what another text or version had left."""
    if kept.is_dir():
        return
    for stale in kept.parent.glob(f"{kept.name.partition('-')[0]}*"):
        shutil.rmtree(stale, ignore_errors=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=kept.parent))
    for name in ("tokenizer-8k", "tokenizer-2k", "swapped", "teacher-cache"):
        shutil.copytree(work / name, staging / name)
    for name in ("student-corpus.jsonl", "prepared.json"):
        shutil.copy(work / name, staging / name)
    try:
        staging.rename(kept)
    except OSError:  # another demo was faster
        shutil.rmtree(staging, ignore_errors=True)


class _Progress:
    """Plain lines on standard error: what is done, after how many seconds."""

    def __init__(self, began: float) -> None:
        self.began = began

    def line(self, text: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - self.began:5.0f} s] {text}\n")
        sys.stderr.flush()

    @property
    def finished(self) -> Callable[[Future[dict[str, Any]]], None]:
        def say(future: Future[dict[str, Any]]) -> None:
            if future.exception() is None:
                arm = future.result()
                seed = "" if arm["seed"] is None else f", seed {arm['seed']}"
                self.line(
                    f"{arm['name']}{seed}: {arm['bits_per_byte']:.3f} / {arm['other_domain_bits_per_byte']:.3f} "
                    "bits per byte (Python's help / tales)"
                )

        return say
