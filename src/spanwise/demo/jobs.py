"""The demo's pieces of work, each a function that runs in a process of its own on one thread and returns plain data."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from spanwise.demo.arms import (
    DOCS,
    DOCS_HELD_OUT,
    ORIGINAL,
    SWAPPED,
    TALES,
    TALES_HELD_OUT,
    Scale,
    student_recipe,
    swap_recipe,
)
from spanwise.loading import BUILTIN_SMOLLM2, load_model, load_tokenizer

# Held-out text on which the 135M models are measured, per domain; the small students are measured on all of it.
SWAP_HELD_OUT_BYTES = 12_000


def one_thread() -> None:
    """Every job gets one thread, so that arms that run side by side are treated alike."""
    import logging

    import torch
    from transformers.utils import logging as transformers_logging

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("torch").setLevel(logging.ERROR)


def held_out(name: str, most_bytes: int | None = None) -> list[str]:
    """Held-out documents, whole, as many as fit into ``most_bytes`` (at least one)."""
    from spanwise.train.builtin import builtin_documents

    chosen: list[str] = []
    size = 0
    for text in builtin_documents(name):
        size += len(text.encode())
        if most_bytes is not None and chosen and size > most_bytes:
            break
        chosen.append(text)
    return chosen


def bits_per_byte(model: Any, tokenizer: Any, most_bytes: int | None) -> tuple[float, float]:
    """On Python's help and on the tales."""
    from spanwise.train.evaluation import measure

    docs, tales = (
        measure(model, tokenizer, held_out(name, most_bytes), batch_size=8).bits_per_byte
        for name in (DOCS_HELD_OUT, TALES_HELD_OUT)
    )
    return docs, tales


def prepare(work: Path, scale: Scale) -> dict[str, Any]:
    """Train both tokenizers, swap SmolLM2 onto the larger one, write the student's training text."""
    import json

    from spanwise.train.builtin import builtin_documents
    from spanwise.train.student import train_byte_bpe
    from spanwise.train.swap import swap_to_folder

    began = time.monotonic()
    docs, tales = builtin_documents(DOCS), builtin_documents(TALES)
    train_byte_bpe(docs + tales, 8_192).save_pretrained(work / "tokenizer-8k")
    train_byte_bpe(docs, 2_048).save_pretrained(work / "tokenizer-2k")
    chosen = docs if scale.teacher_documents is None else docs[: scale.teacher_documents]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in chosen)
    (work / "student-corpus.jsonl").write_text(lines, encoding="utf-8")
    swapped = swap_to_folder(BUILTIN_SMOLLM2, str(work / "tokenizer-8k"), work / "swapped")
    return {"seconds": time.monotonic() - began, "exact_share": swapped["exact_share"]}


def measure_untrained(name: str, work: Path, scale: Scale) -> dict[str, Any]:
    """The original, or the swap before any training."""
    import torch

    began = time.monotonic()
    source = {ORIGINAL: BUILTIN_SMOLLM2, SWAPPED: str(work / "swapped")}[name]
    tokenizer = load_tokenizer(source)
    model = load_model(source, dtype=torch.bfloat16)
    docs, tales = bits_per_byte(model, tokenizer, swap_bytes(scale))
    return arm(name, None, docs, tales, time.monotonic() - began)


def train_swap(name: str, source: str, seed: int, work: Path, scale: Scale) -> dict[str, Any]:
    """Train the swapped model, or the original in the same way, and measure it."""
    import torch

    from spanwise.train.recipe import parse_recipe
    from spanwise.train.run import train

    folder = work / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    began = time.monotonic()
    result = train(parse_recipe(swap_recipe(source, seed, scale=scale, folder=folder)))
    seconds = time.monotonic() - began
    model, tokenizer = load_model(folder, dtype=torch.bfloat16), load_tokenizer(folder)
    docs, tales = bits_per_byte(model, tokenizer, swap_bytes(scale))
    return arm(name, seed, docs, tales, seconds, loss=result["loss_per_step"])


def train_student(
    name: str, seed: int, rate: float, work: Path, scale: Scale, *, label: str | None = None
) -> dict[str, Any]:
    """Train one arm of the small student and measure it on all held-out text."""
    from spanwise.train.recipe import parse_recipe
    from spanwise.train.run import train
    from spanwise.train.run_log import read_log

    folder = work / f"student-{label or name.replace(' ', '-')}-{seed}"
    recipe = student_recipe(
        name,
        seed,
        scale=scale,
        folder=folder,
        tokenizer=work / "tokenizer-2k",
        cache=work / "teacher-cache" / "teacher-0",
        train=str(work / "student-corpus.jsonl"),
        rate=rate,
    )
    result = train(parse_recipe(recipe))
    log = read_log(folder / "log.jsonl")
    evaluations = [entry for entry in log if entry["kind"] == "evaluation"]
    docs, tales = bits_per_byte(load_model(folder), load_tokenizer(folder), None)
    return arm(
        name,
        seed,
        docs,
        tales,
        max(entry["seconds"] for entry in log),
        loss=result["loss_per_step"],
        curve=[(entry["step"], entry["bits_per_byte"]) for entry in evaluations],
        curve_seconds=[(entry["seconds"], entry["bits_per_byte"]) for entry in evaluations],
        left_out=result["left_out"],
    )


def score_corpus(work: Path, scale: Scale) -> dict[str, Any]:
    """Run the teacher once over the student's training text and keep its scores on disk."""
    from spanwise.demo.arms import DISTILLED, LEARNING_RATE
    from spanwise.train.cache_run import cache_teachers
    from spanwise.train.recipe import parse_recipe

    recipe = student_recipe(
        DISTILLED,
        0,
        scale=scale,
        folder=work / "unused",
        tokenizer=work / "tokenizer-2k",
        cache=work / "teacher-cache" / "teacher-0",
        train=str(work / "student-corpus.jsonl"),
        rate=LEARNING_RATE,
    )
    recipe["teachers"] = [{"model": BUILTIN_SMOLLM2, "dtype": "bfloat16", "loss": "prefix_kl"}]
    recipe["cache"] = {"folder": str(work / "teacher-cache")}
    began = time.monotonic()
    found = cache_teachers(parse_recipe(recipe))
    return {
        "tokens": found["tokens"],
        "bytes_per_token": found["bytes_per_token"],
        "seconds": time.monotonic() - began,
    }


def arm(name: str, seed: int | None, docs: float, tales: float, seconds: float, **more: Any) -> dict[str, Any]:
    """One row of the result."""
    from spanwise.train.trainer import peak_memory_mb

    return {
        "name": name,
        "seed": seed,
        "bits_per_byte": docs,
        "other_domain_bits_per_byte": tales,
        "seconds": seconds,
        "memory_mb": peak_memory_mb(),
        **more,
    }


def swap_bytes(scale: Scale) -> int:
    """How much held-out text of a domain the 135M models are measured on."""
    return SWAP_HELD_OUT_BYTES // 4 if scale.small_student else SWAP_HELD_OUT_BYTES
