"""What a teacher costs where it does not share the student's process: bytes, time, memory, and time to resume.

    python benchmarks/scale.py [--quick]

SmolLM2-135M teaches a small student with a tokenizer of its own; one thread per process, real Ray actors.

- bytes per token that a cache keeps and that the queue carries, against dense bfloat16 logits;
- whole runs with the teacher in the student's worker and in an actor of its own, in turns; and single calls of both;
- memory of every process of these runs;
- seconds from the start of ``spanwise train --resume`` to its first step, against a fresh start; and the pause that a
  killed teacher costs.

FLOPs per token of a teacher of 8B and a student of 1B are counted, not timed (``gpu_models.py``). docs/scale.md
multiplies all of it out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import psutil
import torch

from benchmarks.gpu_models import LENGTH, STUDENT_1B, TEACHER_8B, flops_per_token
from benchmarks.record import record
from benchmarks.teachers import recut, write_inputs
from spanwise.dataplane.frames import encode_frame
from spanwise.teachers.teacher import request_from_batch
from spanwise.train import distill
from spanwise.train.cache_run import cache_teachers
from spanwise.train.ray_cluster import joined_cluster
from spanwise.train.ray_teacher import cpus_of, teacher_actors
from spanwise.train.recipe import load_recipe
from spanwise.train.run_log import read_log
from spanwise.train.streamed_teacher import StreamedTeacher, actor_namespace, columns_of, pack_asked
from spanwise.xtoken.losses.plan import chunk_plan_of_batch
from spanwise.xtoken.losses.shared_set import pick_of_plan, share_picked

Row = dict[str, Any]
CUTS = {f"k = {k}": (k, k, 1.0) for k in (1, 4, 16, 64)} | {"k = 4..64 for mass 0.9": (4, 64, 0.9)}
# The processes of a run, by a word of their command line.
PROCESSES = {
    "teacher's actor": "TeacherActor",
    "student's worker": "RayTrainWorker",
    "storage unit of the queue": "SimpleStorageUnit",
    "controller of the queue": "TransferQueueController",
    "the command itself": "",
}
IN_WORKER, STREAMED = ["ray.workers=1"], ["ray.workers=1", "ray.teachers=1"]


def row(figure: str, value: float, unit: str, context: str = "") -> Row:
    return {"figure": figure, "value": value, "unit": unit, "reached": "-", "context": context}


# -- bytes ---------------------------------------------------------------------------------------------------------


def byte_rows(recipe: Path) -> list[Row]:
    """Bytes per teacher token: dense, cached by k, streamed by form."""
    cache = Path(cache_teachers(load_recipe(recipe))["path"])
    task = distill.build(load_recipe(recipe), recipe.parent)
    dense = 2 * task.terms["kd/0"].teacher.vocab_size
    rows = [row("bytes per token: dense logits", dense, "", f"bfloat16, Vt {dense // 2:,}")]

    def beside(figure: str, size: float, context: str) -> None:
        rows.append(row(f"bytes per token: {figure}", size, "", f"{dense / size:,.0f}× less than dense; {context}"))

    for name, (_, header) in recut(recipe, cache, CUTS).items():
        context = f"mean k {header['mean_k']:.1f}, mean tail mass {header['mean_tail_mass']:.3f}"
        beside(f"cached, {name}", header["bytes_per_token"], context)
    for name, (asked, answered) in streamed_bytes(task).items():
        context = f"asked {asked:.1f}, answered {answered:.1f}; a micro-batch of 4 rows, uncompressed"
        beside(f"streamed, {name}", asked + answered, context)
    task.close()
    return rows


def streamed_bytes(task: Any) -> dict[str, tuple[float, float]]:
    """Bytes of a request and of its answer's frame per real token, by what is asked for."""
    term = task.terms["kd/0"]
    batch = task.collator([task.train_rows[place] for place in range(4)])
    plain = request_from_batch(batch, term.prefix)
    tokens = int(plain.token_mask.sum())
    pick = pick_of_plan(chunk_plan_of_batch(batch, teacher_index=term.index), 8_192)
    requests = {f"top {k}": replace(plain, top_k=k, statistics=True) for k in (4, 16, 64)}
    answers = {name: term.teacher.score(request) for name, request in requests.items()}
    shared = "shared set of 8,192 a document"
    requests[shared] = replace(plain, pick=pick)
    answers[shared] = share_picked(term.teacher.score(plain), pick, teacher_vocab_size=term.teacher.vocab_size)
    return {
        name: (
            len(msgspec.msgpack.encode(pack_asked(requests[name]))) / tokens,
            len(encode_frame(columns_of(answer, plain.token_mask))) / tokens,
        )
        for name, answer in answers.items()
    }


# -- one call ------------------------------------------------------------------------------------------------------


def call_rows(recipe: Path, calls: int) -> list[Row]:
    """The same requests to a teacher here and to one in an actor, in turns: what the way there and back adds."""
    streamed = load_recipe(recipe, STREAMED)
    output = str(recipe.parent / "actors")
    with joined_cluster(1, None, cpus_of(streamed)) as cluster, teacher_actors(streamed, cluster, output):
        task = distill.build(load_recipe(recipe), recipe.parent)
        term = task.terms["kd/0"]
        far = StreamedTeacher(0, 1, actor_namespace(output))
        seconds: dict[str, list[float]] = {"here": [], "there": []}
        for turn in range(calls + 1):
            request = term.request(task.collator([task.train_rows[4 * turn + place] for place in range(4)]))
            for name, teacher in (("here", term.teacher), ("there", far)):
                begin = time.perf_counter()
                teacher.score(request)
                if turn:
                    seconds[name].append(time.perf_counter() - begin)
        far.close()
        task.close()
    here, there = (1e3 * statistics.median(seconds[name]) for name in ("here", "there"))
    context = f"{there:.0f} ms against {here:.0f} ms, a request of 4 rows, top 64; nothing asked ahead"
    return [
        row("one call, streamed / in the process", there / here, "×", context),
        row("one call, what the way adds", there - here, "ms", context),
    ]


# -- whole runs ----------------------------------------------------------------------------------------------------


class Run:
    """``spanwise train`` in a process of its own, watched: the time of each step, the peak memory of each process."""

    def __init__(self, recipe: Path, output: Path, overrides: list[str], *, resume: bool = False) -> None:
        self.log = output / "log.jsonl"
        self.peaks: dict[str, float] = {}
        self.began = time.perf_counter()
        words = ["train", str(recipe), f"output={output}", *overrides, "--json", *(["--resume"] if resume else [])]
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from spanwise.cli import main; main()", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def until(self, done: Callable[[], bool]) -> float:
        """Watch until something holds or the run ends; seconds since its start."""
        looked = 0.0
        while self.process.poll() is None and not done():
            # Rarely, since looking costs the run its processor; a peak is a high-water mark.
            if time.perf_counter() - looked > 0.5:
                looked = time.perf_counter()
                for name, found in self.members().items():
                    self.peaks[name] = max(self.peaks.get(name, 0.0), peak_memory(found))
            time.sleep(0.05)
        return time.perf_counter() - self.began

    def members(self) -> dict[str, psutil.Process]:
        """The processes of ``PROCESSES`` that are alive."""
        found = {"the command itself": psutil.Process(self.process.pid)}
        for child in found["the command itself"].children(recursive=True):
            try:
                said = " ".join(child.cmdline())
            except psutil.Error:
                continue
            found |= {name: child for name, word in PROCESSES.items() if word and word in said}
        return found

    def steps(self) -> list[float]:
        """Seconds of each step so far; the log holds their sum."""
        sums = [0.0, *(entry["seconds"] for entry in read_log(self.log) if entry["kind"] == "step")]
        return [after - before for before, after in pairwise(sums)]

    def end(self) -> dict[str, Any]:
        """The run's result."""
        self.until(lambda: False)
        printed = self.process.communicate()[0]
        if self.process.returncode:
            raise RuntimeError(f"the run {self.log.parent} failed: {printed[-1_000:]}")
        result: dict[str, Any] = json.loads(printed)
        return result


def peak_memory(process: psutil.Process) -> float:
    """MiB that a process has had at most; 0 once it is gone."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return 0.0
    return int(status.split("VmHWM:")[1].split()[0]) / 1024 if "VmHWM:" in status else 0.0


def run_rows(recipe: Path, turns: int, steps: int) -> list[Row]:
    """Runs with the teacher in the worker and in an actor, in turns; equal curves, time per step, peak memory."""
    seconds: dict[str, list[float]] = {"in the worker": [], "streamed": []}
    peaks: dict[str, dict[str, float]] = {}
    curves: dict[str, list[float]] = {}
    more = [f"train.max_steps={steps}", "train.gradient_accumulation_steps=4", "train.per_device_train_batch_size=2"]
    for turn in range(turns):
        for name, overrides in (("in the worker", IN_WORKER), ("streamed", STREAMED)):
            run = Run(recipe, recipe.parent / f"run {name} {turn}", [*overrides, *more])
            curves.setdefault(name, []).extend(run.end()["loss_per_step"])
            seconds[name] += run.steps()[1:]
            peaks[name] = run.peaks
    off = max(abs(one - other) / abs(one) for one, other in zip(*curves.values(), strict=True))
    near, far = (statistics.median(seconds[name]) for name in ("in the worker", "streamed"))
    context = (
        f"{far:.2f} s against {near:.2f} s, steps of 4 micro-batches of 2 rows, losses within {off:.1e}; the actor has "
        "a core of its own and works ahead"
    )
    rows = [row("a step, streamed / in the worker", far / near, "×", context)]
    for name, found in peaks.items():
        rows += [
            row(f"peak memory, {name}: {process}", found[process], "MiB", "SmolLM2-135M, bfloat16")
            for process in PROCESSES
            if process in found
        ]
    return rows


# -- after a kill --------------------------------------------------------------------------------------------------


@contextmanager
def ended(run: Run) -> Iterator[Run]:
    """Nothing of a run is left, however it went."""
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
        run.process.wait()
        if run.process.stdout is not None:
            run.process.stdout.close()


def resume_rows(recipe: Path) -> list[Row]:
    """From the start of the command to its first step: fresh, and after a SIGKILL with ``--resume``."""
    output = recipe.parent / "killed"
    saving = ["train.save_strategy=steps", "train.save_steps=4", "train.max_steps=1000"]
    with ended(Run(recipe, output, saving)) as run:
        fresh = run.until(lambda: bool(run.steps()))
        run.until(lambda: len(run.steps()) > 5)
        run.process.send_signal(signal.SIGKILL)
    (checkpoint,) = output.glob("checkpoint-*")
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()) / 2**20
    kept = int(checkpoint.name.split("-")[1])
    with ended(Run(recipe, output, saving, resume=True)) as run:
        # The log is cut back to the checkpoint first; what comes behind it is new.
        run.until(lambda: len(run.steps()) == kept)
        again = run.until(lambda: len(run.steps()) > kept)
    context = f"loading both models, verifying a checkpoint of {size:.1f} MiB, one step"
    return [
        row("start to first step, fresh", fresh, "s", "loading both models, one step"),
        row("start to first step, --resume after a kill", again, "s", context),
    ]


def pause_rows(recipe: Path) -> list[Row]:
    """The longest step of a streamed run whose teacher is killed, beyond a usual one."""
    with ended(Run(recipe, recipe.parent / "paused", [*STREAMED, "train.max_steps=30"])) as run:
        run.until(lambda: len(run.steps()) > 8)
        before = statistics.median(run.steps()[1:])
        run.members()["teacher's actor"].kill()
        run.end()
        longest = max(run.steps()[8:])
    context = (
        f"its longest step took {longest:.1f} s, a usual one {before:.2f} s; the actor is started and loaded again"
    )
    return [row("pause after a killed teacher", longest - before, "s", context)]


def flops_rows() -> list[Row]:
    """Counted on tensors without data."""
    rows = []
    for name, shape, backward in (("8B teacher, forward", TEACHER_8B, False), ("1B student, step", STUDENT_1B, True)):
        flops, parameters = flops_per_token(shape, backward=backward)
        context = f"counted by torch; {parameters / 1e9:.2f}B parameters, rows of {LENGTH:,} tokens, all logits"
        rows.append(row(f"FLOPs per token, {name}", flops / 1e9, "GFLOP", context))
    return rows


def main() -> None:
    """Measure everything and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns and steps")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_inputs(Path(folder), windows=60, steps=12)
        rows = flops_rows()
        rows += byte_rows(recipe)
        rows += call_rows(recipe, 4 if quick else 10)
        rows += run_rows(recipe, 1 if quick else 3, 4 if quick else 6)
        rows += resume_rows(recipe)
        rows += pause_rows(recipe)
    record("scale-quick" if quick else "scale", rows)


if __name__ == "__main__":
    main()
