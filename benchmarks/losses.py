"""P-KL and gold beside the dense form of the same losses: time, peak memory, growth, and the distance to the floors.

Every time is a median over runs of both sides, interleaved in one process. Memory is the growth of the peak resident
set in a fresh process per figure, inputs and imports left out. One thread, float32, Vt = 151,936, K = 4, k = 8,192.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.record import record
from spanwise.teachers.scores import TeacherScores
from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.exact_map import exact_token_map
from spanwise.xtoken.losses import (
    CrossEntropyRows,
    Head,
    fused,
    gold,
    gold_rows,
    plan_chunks,
    plan_tokens,
    projected_kl,
    projected_rows,
    together,
)
from spanwise.xtoken.projection import Projection

TEACHER, K, TOPK, HIDDEN = 151_936, 4, 8_192, 576


def make(rows: int, students: int, *, head: bool = False):
    """One document of ``rows`` predictors: mostly one-to-one chunks, some of two student tokens, some of two teacher
    tokens.
    """
    g = torch.Generator().manual_seed(0)
    kind = torch.rand(rows, generator=g)
    student, teacher, chunk = [-1], [-1], 0
    while len(student) <= rows and len(teacher) <= rows:
        roll = float(kind[chunk])
        student += [chunk] * (2 if roll < 0.1 else 1)
        teacher += [chunk] * (2 if roll > 0.9 else 1)
        chunk += 1
    student = (student + [-1] * rows)[: rows + 1]
    teacher = (teacher + [-1] * rows)[: rows + 1]
    pairs, flags = torch.ones(1, chunk, dtype=torch.bool), torch.zeros(1, rows + 1, dtype=torch.bool)
    alignment = AlignmentBatch(
        pairs, pairs, flags, flags, torch.tensor([student]), torch.tensor([teacher]), torch.tensor([chunk])
    )
    indices = torch.randint(0, TEACHER, (students, K), generator=g)
    likelihoods = torch.rand(students, K, generator=g)
    likelihoods /= likelihoods.sum(-1, keepdim=True)
    exact = torch.rand(students, generator=g) < 0.8
    place = torch.randperm(TEACHER, generator=g)[: int(exact.sum())]
    indices[exact], likelihoods[exact] = -1, 0.0
    indices[exact, 0], likelihoods[exact, 0] = place, 1.0
    projection = Projection(indices, likelihoods, TEACHER)
    y = torch.randn(1, rows + 1, TEACHER, generator=g).mul_(3)
    if head:
        hidden = torch.randn(1, rows + 1, HIDDEN, generator=g)
        weight = torch.randn(students, HIDDEN, generator=g).mul_(0.1)
        return hidden, weight, y, alignment, projection
    return torch.randn(1, rows + 1, students, generator=g).mul_(3), y, alignment, projection


def one_hot_means(values: torch.Tensor, chunk_id: torch.Tensor, chunks: int) -> torch.Tensor:
    member = (torch.roll(chunk_id, -1, 1)[:, :, None] == torch.arange(chunks, device=chunk_id.device)).to(values.dtype)
    return torch.bmm(member.transpose(1, 2), values) / member.sum(1).clamp(min=1)[..., None]


def dense_projected(z, y, alignment, projection, matrix) -> torch.Tensor:
    """The definition step by step: softmax, sparse product over all teacher ids, gather, one-hot bmm."""
    chunks = alignment.pair_valid.shape[1]
    shared = torch.log_softmax(y, -1).amax((0, 1)).topk(TOPK).indices.sort().values
    p = torch.softmax(z, -1)
    q = torch.sparse.mm(matrix, p[0].t()).t()[None][..., shared]
    t = torch.log_softmax(y[..., shared], -1)
    q, t = one_hot_means(q, alignment.student_chunk_id, chunks), one_hot_means(t, alignment.teacher_chunk_id, chunks)
    lq = (q / (q.sum(-1, keepdim=True) + 1e-10) + 1e-10).log()
    valid = valid_chunks(alignment)
    return (t.exp() * (t - lq)).sum(-1)[valid].sum()


def dense_gold(z, y, alignment, projection, token_map) -> torch.Tensor:
    chunks = alignment.pair_valid.shape[1]
    s = one_hot_means(torch.log_softmax(z, -1), alignment.student_chunk_id, chunks)
    t = one_hot_means(torch.log_softmax(y, -1), alignment.teacher_chunk_id, chunks)
    common_s, common_t = s[..., token_map["common_student"]], t[..., token_map["common_teacher"]]
    kl = (common_t.exp() * (common_t - common_s)).sum(-1)
    tails = [
        values[..., token_map[name]].exp().sort(-1, descending=True).values
        for values, name in ((s, "uncommon_student"), (t, "uncommon_teacher"))
    ]
    k = min(tails[0].shape[-1], tails[1].shape[-1], TOPK)
    each = kl + (tails[0][..., :k] - tails[1][..., :k]).abs().sum(-1)
    return each[valid_chunks(alignment)].sum()


def valid_chunks(alignment: AlignmentBatch) -> torch.Tensor:
    chunks = alignment.pair_valid.shape[1]
    sizes = [
        torch.bincount(ids[0][ids[0] >= 0], minlength=chunks)
        for ids in (alignment.student_chunk_id, alignment.teacher_chunk_id)
    ]
    return ((sizes[0] > 0) & (sizes[1] > 0))[None]


def sides(which: str, z, y, alignment, projection, scope: str = "document") -> tuple[Callable, Callable]:
    """(ours, the dense form): each returns the loss with a graph to ``z``."""
    scores = TeacherScores(logits=y)
    if which == "P-KL":
        entries = projection.entries()
        ids = torch.stack([entries.teacher, entries.student])
        matrix = torch.sparse_coo_tensor(ids, entries.weight, (TEACHER, len(projection.indices))).coalesce()
        return (
            lambda: projected_kl(z, scores, alignment, projection, topk_scope=scope).total,
            lambda: dense_projected(z, y, alignment, projection, matrix),
        )
    token_map = exact_token_map(
        projection.indices, projection.likelihoods, xtoken_loss=False, teacher_vocab_size=TEACHER
    )
    return (
        lambda: gold(z, scores, alignment, token_map).total,
        lambda: dense_gold(z, y, alignment, projection, token_map),
    )


def once(side: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> float:
    for leaf in leaves:
        leaf.grad = None
    start = time.perf_counter()
    side().backward()
    return time.perf_counter() - start


def interleaved(every: list[Callable[[], torch.Tensor]], leaves: list[torch.Tensor], repeats: int) -> list[float]:
    """Median seconds of each side; each runs once before counting where there is time for it."""
    times: list[list[float]] = [[] for _ in every]
    for _ in range(repeats):
        for place, side in enumerate(every):
            times[place].append(once(side, leaves))
            gc.collect()
    return [statistics.median(t[1:] or t) for t in times]


def peak_bytes() -> int:
    """Largest resident set so far."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure_memory(which: str, side: str, rows: int, students: int) -> None:
    """In a fresh process: print the growth of the peak by one loss and its gradient, and the gradient's own bytes."""
    torch.set_num_threads(1)
    z, y, alignment, projection = make(rows, students)
    z.requires_grad_()
    ours, dense = sides(which, z, y, alignment, projection)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    (ours if side == "ours" else dense)().backward()
    print(peak_bytes() - before, z.numel() * 4)


def memory(which: str, side: str, rows: int, students: int) -> tuple[int, int]:
    command = [sys.executable, str(Path(__file__).resolve()), "--memory", which, side, str(rows), str(students)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, gradient = result.stdout.split()
    return int(grown), int(gradient)


def row(figure: str, value: float, unit: str, target: float | None, context: str) -> dict:
    reached = "-" if target is None else "yes" if value <= target else "no"
    return {"figure": figure, "value": round(value, 4), "unit": unit, "target": "" if target is None else f"≤ {target}",
            "reached": reached, "context": context}  # fmt: skip


def memory_rows(rows: int, vocabularies: list[int]) -> list[dict]:
    out = []
    for which, target in (("P-KL", 0.33), ("gold", 0.18)):
        beyond_gradient: list[int] = []
        for students in vocabularies:
            ours, gradient = memory(which, "ours", rows, students)
            dense, _ = memory(which, "dense", rows, students)
            context = (
                f"N={rows}, Vs={students:,}; ours {ours >> 20} MiB, dense {dense >> 20}, gradient {gradient >> 20}"
            )
            out.append(row(f"{which} peak memory / dense", ours / dense, "×", target, context))
            out.append(row(f"{which} peak memory / the gradient's own bytes", ours / gradient, "×", None, context))
            beyond_gradient.append(max(ours - gradient, 1))
            small, small_gradient = memory(which, "ours", rows // 4, students)
            growth = max(ours - gradient, 1) / max(small - small_gradient, 1)
            beyond = f"{small - small_gradient >> 20} to {ours - gradient >> 20} MiB"
            context = f"N={rows // 4} to {rows}, Vs={students:,}; {beyond}"
            out.append(row(f"{which} workspace growth", growth, "×", 1.6, context))
        if len(vocabularies) > 1:
            growth, beyond = beyond_gradient[-1] / beyond_gradient[0], [size >> 20 for size in beyond_gradient]
            context = f"N={rows}, Vs={vocabularies[0]:,} to {vocabularies[-1]:,}; {beyond[0]} to {beyond[-1]} MiB"
            out.append(row(f"{which} workspace growth with the vocabulary", growth, "×", None, context))
    return out


def time_rows(rows: int, vocabularies: list[int], repeats: int) -> list[dict]:
    out = []
    for students in vocabularies:
        z, y, alignment, projection = make(rows, students)
        z.requires_grad_()
        for which, target in (("P-KL", 0.30), ("gold", 0.50)):
            ours, dense = sides(which, z, y, alignment, projection)
            every = [ours, dense]
            if which == "P-KL":
                every.append(sides(which, z, y, alignment, projection, "microbatch")[0])
            took = interleaved(every, [z], repeats)
            context = f"N={rows}, Vs={students:,}; {took[0]:.2f} s against {took[1]:.2f} s"
            out.append(row(f"{which} time / dense", took[0] / took[1], "×", target, context))
            if which == "P-KL":
                out.append(row("P-KL (microbatch scope) time / dense", took[2] / took[1], "×", None, context))
    return out


def fused_rows(rows: int, students: int, repeats: int) -> list[dict]:
    """Fused with the head, beside the three matrix products alone."""
    hidden, weight, y, alignment, projection = make(rows, students, head=True)
    hidden.requires_grad_()
    weight.requires_grad_()
    scores, head, plan = TeacherScores(logits=y), Head(weight), plan_chunks(alignment)
    ids = torch.zeros(1, rows + 1, dtype=torch.long)
    token_map = exact_token_map(
        projection.indices, projection.likelihoods, xtoken_loss=False, teacher_vocab_size=TEACHER
    )

    class Products:
        """The three matrix products alone: logits, gradient of hidden states, gradient of the head."""

        def __init__(self) -> None:
            self.logits = hidden.detach()[0] @ weight.detach().t()

        def backward(self) -> None:
            self.to_hidden = self.logits @ weight.detach()
            self.to_weight = self.logits.t() @ hidden.detach()[0]

    def kd() -> torch.Tensor:
        return fused(hidden, head, projected_rows(plan, scores, projection))

    def kd_and_ce() -> torch.Tensor:
        ce = CrossEntropyRows(plan_tokens(ids), students, 1.0)
        return fused(hidden, head, together(projected_rows(plan, scores, projection), ce))

    def gold_kd() -> torch.Tensor:
        return fused(hidden, head, gold_rows(plan, scores, token_map))

    took = interleaved([Products, kd, gold_kd, kd_and_ce], [hidden, weight], repeats)
    context = f"N={rows}, Vs={students:,}, H={HIDDEN}; the products alone {took[0]:.2f} s"
    return [
        row("P-KL fused / three products", took[1] / took[0], "×", 1.3, context),
        row("gold fused / three products", took[2] / took[0], "×", 1.6, context),
        row("P-KL and CE fused / three products", took[3] / took[0], "×", 1.8, context),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="256 rows, the smaller vocabulary")
    parser.add_argument("--memory", nargs=4, metavar=("LOSS", "SIDE", "ROWS", "STUDENTS"))
    options = parser.parse_args()
    if options.memory:
        which, side, rows, students = options.memory
        return measure_memory(which, side, int(rows), int(students))
    torch.set_num_threads(1)
    rows, vocabularies, repeats = (256, [49_152], 2) if options.quick else (1_024, [49_152, 128_256], 3)
    found = memory_rows(rows, vocabularies)
    found += time_rows(rows, vocabularies, repeats)
    found += fused_rows(rows, vocabularies[0], repeats)
    return record("losses", found)


if __name__ == "__main__":
    main()
