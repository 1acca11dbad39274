"""The loss, alignment and collate figures on a GPU, where there is one, and what models of full size take there.

    python benchmarks/gpu.py [--quick] [--rows N]

Losses: P-KL, gold and cross entropy against the dense form of the same losses (and torch's own cross entropy), float32
and bfloat16 logits, Vs = 128,256, Vt = 151,936, time by CUDA events and peak memory by torch's allocator, both sides in
one run, interleaved. Models: a teacher of 8B and a student of 1B (``gpu_models.py``). Alignment and collation run on
the CPU of the machine, as they do in training; here they are measured beside the tokenizing that they follow and the
student's step that waits for them. The last rows say what was never measured on a GPU. Without one the script says so
and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.gpu_models import model_rows
from benchmarks.losses import HIDDEN, TOPK, dense_gold, dense_projected, make
from benchmarks.record import record
from spanwise import CrossTokenizerCollator, TokenAligner
from spanwise.teachers.scores import TeacherScores
from spanwise.train.builtin import builtin_documents
from spanwise.train.data import text_windows
from spanwise.train.student import train_byte_bpe
from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.exact_map import exact_token_map
from spanwise.xtoken.losses import Head, fused, gold, next_token_ce, plan_chunks, projected_kl, projected_rows

STUDENT, REPEATS = 128_256, 7
ROWS_COLLATED, WINDOW_BYTES, CONTEXT = 4, 6_000, 2_048
NEVER_MEASURED = {
    "more than one GPU": "DDP ran on gloo and CPUs only; FSDP2 there and on one GPU (tests)",
    "scores between machines": "the streamed teacher and the queue ran on one machine without a GPU",
    "images and text": "a small model trains on a GPU (tests); never timed there",
    "masked models": "a small model trains on a GPU (tests); never timed there",
    "ALM, prefix KL, ULD": "equal to the CPU's values on a GPU (tests), never timed there",
    "real tokenizers": "collation was timed with tokenizers trained on the spot",
}


def on_gpu(value):
    """Tensors, alignments and projections on the GPU."""
    if isinstance(value, AlignmentBatch):
        return AlignmentBatch(**{k: v if v is None else v.cuda() for k, v in vars(value).items()})
    return value.to("cuda") if hasattr(value, "to") else value


def timed(sides: dict[str, Callable[[], torch.Tensor]], leaves: list[torch.Tensor]) -> dict[str, tuple[float, float]]:
    """Median milliseconds and peak MiB beyond what was there, per side, forward and backward, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    peaks: dict[str, float] = {}
    for turn in range(REPEATS + 1):
        for name, side in sides.items():
            for leaf in leaves:
                leaf.grad = None
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            side().backward()
            end.record()
            torch.cuda.synchronize()
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            if turn:
                times[name].append(begin.elapsed_time(end))
    return {name: (statistics.median(times[name]), peaks[name]) for name in sides}


def compared(figure: str, found: dict[str, tuple[float, float]], context: str) -> list[dict]:
    """Ratios of ours to the other side."""
    (ours_ms, ours_mb), (other_ms, other_mb) = found["ours"], found["other"]
    return [
        {
            "figure": f"{figure}: time / other side",
            "value": ours_ms / other_ms,
            "unit": "×",
            "context": f"{ours_ms:.1f} ms against {other_ms:.1f} ms, {context}",
        },
        {
            "figure": f"{figure}: peak memory / other side",
            "value": ours_mb / other_mb,
            "unit": "×",
            "context": f"{ours_mb:,.0f} MiB against {other_mb:,.0f} MiB, {context}",
        },
    ]


def loss_rows(rows: int, dtype: torch.dtype) -> list[dict]:
    z, y, alignment, projection = (on_gpu(part) for part in make(rows, STUDENT))
    z, y = z.detach().to(dtype).requires_grad_(), y.to(dtype)
    entries = projection.entries()
    at = torch.stack([entries.teacher, entries.student])
    matrix = torch.sparse_coo_tensor(at, entries.weight, (y.shape[-1], STUDENT)).coalesce()
    plan = plan_chunks(alignment)
    scores = TeacherScores(logits=y)
    token_map = exact_token_map(
        projection.indices, projection.likelihoods, xtoken_loss=False, teacher_vocab_size=y.shape[-1]
    )
    context = f"{rows} rows, Vs {STUDENT:,}, Vt {y.shape[-1]:,}, k {TOPK:,}, {str(dtype).removeprefix('torch.')}"
    found = []
    pkl = {
        "ours": lambda: projected_kl(z, scores, None, projection, plan=plan).total,
        "other": lambda: dense_projected(z.float(), y.float(), alignment, projection, matrix),
    }
    found += compared("P-KL", timed(pkl, [z]), f"dense form, {context}")
    exact = {
        "ours": lambda: gold(z, scores, None, token_map, plan=plan).total,
        "other": lambda: dense_gold(z.float(), y.float(), alignment, projection, token_map),
    }
    found += compared("gold", timed(exact, [z]), f"dense form, {context}")
    ids = torch.randint(STUDENT, (1, z.shape[1]), device="cuda")
    cross = {
        "ours": lambda: next_token_ce(z, ids).mean(),
        "other": lambda: torch.nn.functional.cross_entropy(z[0, :-1].float(), ids[0, 1:]),
    }
    found += compared("cross entropy", timed(cross, [z]), f"torch, {context}")
    return found


def fused_rows(rows: int) -> list[dict]:
    """P-KL inside the head, against the head followed by P-KL on its logits."""
    _, y, alignment, projection = (on_gpu(part) for part in make(rows, STUDENT))
    hidden = torch.randn(1, alignment.student_chunk_id.shape[1], HIDDEN, device="cuda", requires_grad=True)
    weight = (torch.randn(STUDENT, HIDDEN, device="cuda") / HIDDEN**0.5).requires_grad_()
    plan, scores = plan_chunks(alignment), TeacherScores(logits=y)
    sides = {
        "ours": lambda: fused(hidden, Head(weight), projected_rows(plan, scores, projection)) / plan.count,
        "other": lambda: projected_kl(hidden @ weight.T, scores, None, projection, plan=plan).mean(),
    }
    context = f"unfused, {rows} rows, hidden {HIDDEN}, Vs {STUDENT:,}, float32"
    return compared("P-KL fused with the head", timed(sides, [hidden, weight]), context)


def collate_rows(step_ms: float) -> list[dict]:
    """Tokenizing, aligning and collating rows of text, and the batch's way to the GPU; medians of wall time."""
    documents = builtin_documents("builtin:python-docs")
    student, teacher = (train_byte_bpe(documents, size) for size in (8_192, 16_384))
    texts = [window for page in documents for window in text_windows(page, WINDOW_BYTES)]
    texts = sorted(texts, key=len, reverse=True)[:ROWS_COLLATED]
    rows = [{"text": text, "idx": place, "loss_multiplier": 1.0} for place, text in enumerate(texts)]
    aligner = TokenAligner(student, teacher, byte_offsets=True)
    collate = CrossTokenizerCollator(
        student_tokenizer=student,
        teacher_tokenizer=teacher,
        aligner=aligner,
        ctx_length_student=CONTEXT,
        ctx_length_teacher=CONTEXT,
        padding="longest",
    )
    batch = collate(rows)
    masks = {
        "student_attention_mask": batch["token_mask"],
        "teacher_attention_mask": batch["teacher_token_mask"],
    }
    jobs = {
        "tokenizing": lambda: (student(texts), teacher(texts)),
        "aligning": lambda: aligner.align(batch["input_ids"], batch["teacher_input_ids"], **masks),
        "collating": lambda: collate(rows),
        "moving": lambda: moved(batch),
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(3 * REPEATS + 1):
        for name, job in jobs.items():
            begin = time.perf_counter()
            job()
            torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    ms = {name: 1e3 * statistics.median(found) for name, found in seconds.items()}
    tokens = int(batch["token_mask"].sum())
    size = f"{ROWS_COLLATED} rows, {tokens:,} student tokens, one thread of this machine's CPU"

    def beside(figure: str, one: str, other: float, unit: str, name: str) -> dict:
        context = f"{ms[one]:.2f} ms against {other:.1f} ms {name}, {size}"
        return {"figure": figure, "value": ms[one] / other, "unit": unit, "context": context}

    return [
        beside("aligning / tokenizing", "aligning", ms["tokenizing"], "×", "for both tokenizers"),
        beside("collating / tokenizing", "collating", ms["tokenizing"], "×", "for both tokenizers"),
        beside("collating / the 1B student's step", "collating", step_ms * tokens / 4_096, "×", "of a GPU for as many"),
        beside("batch to the GPU / collating", "moving", ms["collating"], "×", "of collating"),
    ]


def moved(batch: dict) -> list[torch.Tensor]:
    """The batch's tensors on the GPU, through pinned memory."""
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    return [value.pin_memory().to("cuda", non_blocking=True) for value in tensors]


def never_measured() -> list[dict]:
    """One row for each thing that a reader might take for measured."""
    return [
        {"figure": f"never measured: {name}", "value": "–", "unit": "", "reached": "-", "context": context}
        for name, context in NEVER_MEASURED.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_024)
    parser.add_argument("--quick", action="store_true", help="fewer rows")
    options = parser.parse_args()
    rows = options.rows // 4 if options.quick else options.rows
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        print("There is no GPU here; nothing was measured and no row was written.")
        return
    found = [row for dtype in (torch.float32, torch.bfloat16) for row in loss_rows(rows, dtype)]
    found += fused_rows(rows)
    models, step_ms = model_rows()
    found += [*models, *collate_rows(step_ms), *never_measured()]
    record("gpu-quick" if options.quick else "gpu", [{"reached": "-"} | row for row in found])


if __name__ == "__main__":
    main()
