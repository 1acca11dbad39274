"""Teachers outside the student's memory: what they cost on disk, in time and in memory, and what truncation loses.

SmolLM2-135M teaches a small student with a tokenizer of its own through prefix KL.

- bytes per token, mean k and tail mass of caches, over k;
- reading speed of a cache against the tokens that training consumes;
- the teacher's share of a step, and the student process's memory, with the teacher local, cached, served, in a process;
- held-out bits per byte of the trained student from caches of several k, against the live teacher.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
import yaml

TEACHER = "builtin:smollm2"
FORMS = ("local", "cached", "served", "process")
STEPS_TIMED = 5


def write_inputs(folder: Path, windows: int, steps: int) -> Path:
    """The text and the recipe that every figure uses."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    pieces = [text[start : start + 400] for start in range(0, 400 * windows, 400)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    held_out = text[400 * windows : 400 * windows + 8_000]
    (folder / "eval.jsonl").write_text(json.dumps({"text": held_out}) + "\n")
    from spanwise.train.student import train_byte_bpe

    train_byte_bpe(pieces, 1024).save_pretrained(folder / "student")
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    recipe = {
        "task": "distill",
        "output": str(folder / "run"),
        "student": {"model": {"model_type": "llama", **sizes}, "tokenizer": str(folder / "student")},
        "teachers": [{"model": TEACHER, "dtype": "bfloat16", "loss": "prefix_kl"}],
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "context_length": 256},
        "loss": {"kd_weight": 1.0, "ce_weight": 0.0},
        "train": {
            "max_steps": steps,
            "per_device_train_batch_size": 4,
            "learning_rate": 2e-3,
            "lr_scheduler_type": "cosine",
            "use_cpu": True,
            "logging_steps": 1_000,
            "save_strategy": "no",
            "report_to": [],
        },
        "cache": {"floor": 64, "cap": 64, "mass": 1.0},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def from_source(**source: str) -> list[str]:
    """The overrides that replace the local teacher."""
    ((key, value),) = source.items()
    return ["teachers.0.model=null", f"teachers.0.{key}={value}", f"teachers.0.tokenizer={TEACHER}"]


def recut(recipe: Path, wide: Path, cuts: dict[str, tuple[int, int, float]]) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Caches with fewer entries, made from a wider one without the teacher."""
    from spanwise.teachers.cache_build import build_cache
    from spanwise.teachers.cache_frame import TopK
    from spanwise.teachers.cached import CachedTeacher

    requests = teacher_requests(recipe, wide)
    made = {}
    for place, (name, rule) in enumerate(cuts.items()):
        source = CachedTeacher(wide)
        identity = replace(source.identity, k=TopK(*rule), fields=("entropy",))
        path = recipe.parent / f"cut{place}"
        made[name] = path, build_cache(source, requests, path, identity=identity)
        source.close()
    return made


def teacher_requests(recipe: Path, cache: Path) -> list[Any]:
    """The teacher's side of all training rows, four at a time."""
    from spanwise.train import distill
    from spanwise.train.recipe import load_recipe

    task = distill.build(load_recipe(recipe, from_source(cache=str(cache))), recipe.parent)
    term, count = task.terms["kd/0"], len(task.train_rows)
    requests = [
        term.request(task.collator([task.train_rows[row] for row in range(start, min(start + 4, count))]))
        for start in range(0, count, 4)
    ]
    task.close()
    return requests


def one_form(recipe: Path, overrides: list[str]) -> None:
    """In a process of its own: time some steps and print the teacher's share and this process's peak memory."""
    from spanwise.batch import model_inputs
    from spanwise.train import distill
    from spanwise.train.recipe import load_recipe

    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = distill.build(load_recipe(recipe, overrides), recipe.parent)
    term = task.terms["kd/0"]
    shares, seconds, tokens = [], [], []
    for step in range(STEPS_TIMED + 1):
        batch = task.collator([task.train_rows[4 * step + row] for row in range(4)])
        request = term.request(batch)
        begin = time.perf_counter()
        scores = term.teacher.score(request)
        scored = time.perf_counter()
        logits = task.model(**model_inputs(batch), use_cache=False).logits
        term.loss(logits, scores, batch, 1.0).total.backward()
        end = time.perf_counter()
        shares.append((scored - begin) / (end - begin))
        seconds.append(end - begin)
        tokens.append(int(request.token_mask.sum()))
    task.close()
    # Not getrusage's figure, which a child process inherits from its parent.
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    # The first step pays for what is set up once.
    speed = sum(tokens[1:]) / sum(seconds[1:])
    print(json.dumps({"share": sorted(shares[1:])[STEPS_TIMED // 2], "peak": peak, "tokens_per_second": speed}))


def measure_forms(recipe: Path, cache: Path) -> dict[str, dict[str, float]]:
    """Each form in its own process, one after the other."""
    command = [sys.executable, "-c", "from spanwise.cli import main; main()", "serve", TEACHER]
    found = {}
    with subprocess.Popen(
        [*command, "--dtype", "bfloat16", "--port", "0", "--json"], stdout=subprocess.PIPE, text=True
    ) as server:
        url = json.loads(server.stdout.readline())["url"] if server.stdout else ""
        sources = {
            "local": [],
            "cached": from_source(cache=str(cache)),
            "served": [*from_source(url=url), "teachers.0.options.top_k=64"],
            "process": from_source(process=TEACHER),
        }
        for form in FORMS:
            child = [sys.executable, __file__, "--form", str(recipe), *sources[form]]
            result = subprocess.run(child, capture_output=True, text=True, check=True)
            found[form] = json.loads(result.stdout.splitlines()[-1])
        server.kill()
    return found


def reading_speed(recipe: Path, cache: Path) -> float:
    """Tokens a second that a cache gives, batch by batch, on one core."""
    from spanwise.teachers.cached import CachedTeacher

    requests = teacher_requests(recipe, cache)
    teacher = CachedTeacher(cache)
    tokens = sum(int(request.token_mask.sum()) for request in requests)
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        for request in requests:
            teacher.score(request)
        best = max(best, tokens / (time.perf_counter() - begin))
    teacher.close()
    return best


def bits_per_byte(recipe: Path, name: str, overrides: list[str]) -> float:
    """Held-out bits per byte of a student trained with these overrides."""
    from spanwise.train.recipe import load_recipe
    from spanwise.train.run import train

    result = train(load_recipe(recipe, [f"output={recipe.parent / name}", *overrides]))
    return float(result["bits_per_byte"])


def main() -> None:
    """Measure everything and record it."""
    from record import record

    from spanwise.train.cache_run import cache_teachers
    from spanwise.train.recipe import load_recipe

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer windows and steps")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    windows, steps = (48, 20) if quick else (80, 40)
    rows: list[dict[str, Any]] = []

    def row(figure: str, value: float, unit: str, target: str = "", reached: str = "-", context: str = "") -> None:
        rows.append(
            {"figure": figure, "value": value, "unit": unit, "target": target, "reached": reached, "context": context}
        )

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        recipe = write_inputs(folder, windows, steps)
        built = cache_teachers(load_recipe(recipe))
        wide = Path(built["path"])
        rules = {f"k = {k}": (k, k, 1.0) for k in (1, 2, 4, 8, 16, 32, 64)}
        rules |= {f"k = 4..64 for mass {mass}": (4, 64, mass) for mass in (0.8, 0.9, 0.95)}
        caches = recut(recipe, wide, rules)
        for name, (_, header) in caches.items():
            detail = f"mean k {header['mean_k']:.1f}, mean tail mass {header['mean_tail_mass']:.3f}"
            row(f"cache size, {name}", header["bytes_per_token"], "bytes/token", context=detail)
        found = measure_forms(recipe, wide)
        read = reading_speed(recipe, wide)
        consumed = found["cached"]["tokens_per_second"]
        row("reading a cache, k = 64", read, "tokens/s", context="one core, batches of 4 rows of 400 bytes")
        reached = "yes" if read >= 10 * consumed else "no"
        row("reading / training consumption", read / consumed, "x", ">= 10", reached, "2-layer student, width 128")
        local = found["local"]
        for form in FORMS:
            row(f"teacher's share of a step, {form}", found[form]["share"], "", context="SmolLM2-135M, bf16, one core")
        for form in FORMS:
            less = local["peak"] - found[form]["peak"]
            context = "" if form == "local" else f"{less:.0f} MiB less than local"
            target, fits = ("", "-") if form == "local" else ("< local", "yes" if less > 0 else "no")
            row(f"peak memory of the student's process, {form}", found[form]["peak"], "MiB", target, fits, context)
        live = bits_per_byte(recipe, "live", [])
        row("held-out bits per byte, live teacher", live, "bits/byte", context=f"{steps} steps, KD alone")
        for name in ("k = 1", "k = 4", "k = 16", "k = 64", "k = 4..64 for mass 0.9"):
            off = bits_per_byte(recipe, f"run {name}", from_source(cache=str(caches[name][0]))) - live
            last = name == "k = 64"
            fits = ("yes" if abs(off) <= 0.01 else "no") if last else "-"
            row(f"bits per byte against live, {name}", off, "bits/byte", "<= 0.01" if last else "", fits)
    record("teachers", rows)


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "--form":
        one_form(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
