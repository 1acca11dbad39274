"""A teacher of 8B and a student of 1B parameters on a GPU: what a token costs each of them, in time and in memory.

Random weights in bfloat16, since only shapes decide what is measured here. The teacher reads and gives all logits; the
student makes whole steps: forward, P-KL fused with its head against dense scores of the teacher's width, backward and
AdamW. FLOPs are those that torch counts on tensors without data, so they come out the same without a GPU.
"""

from __future__ import annotations

import gc
import statistics
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.losses import TEACHER, make
from spanwise.teachers.scores import TeacherScores
from spanwise.xtoken.losses import Head, fused, plan_chunks, projected_rows

STUDENT, LENGTH, STEPS = 128_256, 4_096, 8
TEACHER_8B: dict[str, Any] = {
    "vocab_size": TEACHER,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
STUDENT_1B: dict[str, Any] = {
    "vocab_size": STUDENT,
    "hidden_size": 2_048,
    "intermediate_size": 8_192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}


def build(shape: dict[str, Any], device: str) -> Any:
    """A model of random weights."""
    config = LlamaConfig(**shape, max_position_embeddings=LENGTH, attn_implementation="sdpa", dtype=torch.bfloat16)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def parameters(model: Any) -> int:
    """Weights of a model, tied ones once."""
    return sum(part.numel() for part in model.parameters())


def flops_per_token(shape: dict[str, Any], *, backward: bool) -> tuple[float, int]:
    """FLOPs per token of a sequence of ``LENGTH`` with all logits, and the parameters; nothing is computed."""
    model = build(shape, "meta")
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
    # A mask that is ready: making one would look at values.
    mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bfloat16, device="meta")
    with FlopCounterMode(display=False) as counted, torch.set_grad_enabled(backward):
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counted.get_total_flops() / LENGTH, parameters(model)


def seconds_per_step(step: Any) -> tuple[float, float]:
    """Median seconds of a step by CUDA events, and the peak GiB that were allocated."""
    times = []
    torch.cuda.reset_peak_memory_stats()
    for turn in range(STEPS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        if turn >= 2:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times), torch.cuda.max_memory_allocated() / 2**30


def teacher_pass() -> tuple[float, float]:
    """Seconds and GiB of the teacher's forward pass over one sequence, all logits kept."""
    model = build(TEACHER_8B, "cuda").eval()
    ids = torch.randint(TEACHER, (1, LENGTH), device="cuda")

    @torch.inference_mode()
    def step() -> None:
        model(ids, use_cache=False)

    return seconds_per_step(step)


def student_step() -> tuple[float, float]:
    """Seconds and GiB of a whole training step of the student over one sequence."""
    model = build(STUDENT_1B, "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    _, y, alignment, projection = make(LENGTH - 1, STUDENT)
    plan = plan_chunks(alignment).to("cuda")
    scores, projection = TeacherScores(logits=y.bfloat16().cuda()), projection.to("cuda")
    ids = torch.randint(STUDENT, (1, LENGTH), device="cuda")

    def step() -> None:
        hidden = model.model(ids, use_cache=False).last_hidden_state
        rows = projected_rows(plan, scores, projection)
        (fused(hidden, Head(model.lm_head.weight), rows) / plan.count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return seconds_per_step(step)


def model_rows() -> tuple[list[dict[str, Any]], float]:
    """The rows, and the milliseconds of a student's step."""
    rows, took = [], 0.0
    for name, measure, shape, backward in (
        ("8B teacher", teacher_pass, TEACHER_8B, False),
        ("1B student", student_step, STUDENT_1B, True),
    ):
        took, memory = measure()
        gc.collect()
        torch.cuda.empty_cache()
        flops, count = flops_per_token(shape, backward=backward)
        what = "a training step, P-KL fused with the head" if backward else "forward, all logits"
        what += "; FLOPs are those of the model with all logits"
        context = f"{what}, {count / 1e9:.2f}B parameters, 1 row of {LENGTH:,} tokens, bfloat16"
        for figure, value, unit in (
            ("tokens per second", LENGTH / took, "tokens/s"),
            ("speed", flops * LENGTH / took / 1e12, "TFLOP/s"),
            ("peak memory", memory, "GiB"),
        ):
            rows.append({"figure": f"{name}: {figure}", "value": value, "unit": unit, "context": context})
    return rows, 1e3 * took
