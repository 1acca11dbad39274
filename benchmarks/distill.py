"""One distillation step, ours against the same step written the plain way.

    python benchmarks/distill.py [--quick]

The plain side is what one would write from the definitions: dense logits in float32, a dense [Vs, Vt] projection,
one-hot chunk averages, full softmax. Ours is what the trainer runs. Same student, teacher scores, batch and optimizer;
interleaved in one process for time, each in a process of its own for peak memory. One thread.
Vocabularies: SmolLM2's 49,152 for the teacher; the student's is 2,048, or 8,192 without --quick.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peer_sides.memory import peak, reset_peak
from benchmarks.record import record
from spanwise import CrossTokenizerCollator, TokenAligner, load_tokenizer, model_inputs
from spanwise.teachers.scores import TeacherScores
from spanwise.train.builtin import builtin_documents
from spanwise.train.data import text_windows
from spanwise.train.student import train_byte_bpe
from spanwise.xtoken.loss_utils import alignment_from_flat_batch, chunk_average_log_probs
from spanwise.xtoken.losses import chunk_plan_of_batch, next_token_ce, projected_kl, token_plan_of_batch
from spanwise.xtoken.projection_build import build_projection

torch.set_num_threads(1)
ROWS, WINDOW_BYTES = 4, 500


class Step:
    """Everything a step needs but the loss."""

    def __init__(self, vocabulary: int) -> None:
        texts = [w for page in builtin_documents("builtin:python-docs")[:12] for w in text_windows(page, WINDOW_BYTES)]
        teacher_tokenizer = load_tokenizer("builtin:smollm2")
        tokenizer = train_byte_bpe(builtin_documents("builtin:python-docs"), vocabulary)
        collate = CrossTokenizerCollator(
            student_tokenizer=tokenizer,
            teacher_tokenizer=teacher_tokenizer,
            aligner=TokenAligner(tokenizer, teacher_tokenizer),
            ctx_length_student=512,
            ctx_length_teacher=512,
            padding="longest",
        )
        self.batch = collate([{"text": text, "idx": i, "loss_multiplier": 1.0} for i, text in enumerate(texts[:ROWS])])
        self.projection = build_projection(tokenizer, teacher_tokenizer, top_k=4)
        torch.manual_seed(0)
        shape = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 6}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        teacher_shape = (ROWS, self.batch["teacher_input_ids"].shape[1], len(teacher_tokenizer))
        self.teacher_logits = torch.randn(teacher_shape, generator=torch.Generator().manual_seed(1)) * 3

    def run(self, side: str) -> float:
        """One whole step; returns the loss."""
        logits = self.model(**model_inputs(self.batch)).logits
        loss = (self.ours if side == "ours" else self.plain)(logits)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def ours(self, logits: torch.Tensor) -> torch.Tensor:
        scores = TeacherScores(logits=self.teacher_logits)
        kd = projected_kl(logits, scores, None, self.projection, plan=chunk_plan_of_batch(self.batch))
        return kd.mean() + next_token_ce(logits, plan=token_plan_of_batch(self.batch)).mean()

    def plain(self, logits: torch.Tensor) -> torch.Tensor:
        """Sections of the definition, one after another, nothing tiled."""
        alignment = alignment_from_flat_batch(self.batch)
        chunks = alignment.pair_valid.shape[1]
        dense = torch.zeros(logits.shape[-1], self.teacher_logits.shape[-1])
        rows = torch.arange(len(self.projection.indices))[:, None].expand_as(self.projection.indices)
        kept = self.projection.indices >= 0
        dense.index_put_(
            (rows[kept], self.projection.indices[kept]), self.projection.likelihoods[kept], accumulate=True
        )
        student_ids, teacher_ids = (
            torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1)
            for ids in (alignment.student_chunk_id, alignment.teacher_chunk_id)
        )
        first = [ids[:, :1] for ids in (alignment.student_chunk_id, alignment.teacher_chunk_id)]
        orphan = torch.zeros_like(alignment.pair_valid)
        for ids in first:
            orphan.scatter_(1, ids.clamp(min=0), ids >= 0)
        projected = torch.softmax(logits, -1) @ dense
        teacher_logp = torch.log_softmax(self.teacher_logits, -1)
        q, q_sizes = chunk_average_log_probs(projected, student_ids, chunks)
        t, t_sizes = chunk_average_log_probs(teacher_logp, teacher_ids, chunks)
        valid = (q_sizes > 0) & (t_sizes > 0) & alignment.pair_valid & ~orphan
        top = teacher_logp.amax((0, 1)).topk(min(8_192, t.shape[-1])).indices
        t_in = t[..., top] - torch.logsumexp(t[..., top], -1, keepdim=True)
        q_in = q[..., top]
        log_q = (q_in / (q_in.sum(-1, keepdim=True) + 1e-10) + 1e-10).log()
        kd = ((t_in.exp() * (t_in - log_q)).sum(-1) * valid).sum() / valid.sum().clamp(min=1)
        labels = self.batch["input_ids"].masked_fill(self.batch["token_mask"] == 0, -100)
        ce = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return kd + ce


def peak_of(side: str, vocabulary: int) -> float:
    """Peak resident megabytes beyond everything a step needs, in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--vocabulary", str(vocabulary)]
    return float(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["mb"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--side", choices=["ours", "plain"])
    parser.add_argument("--vocabulary", type=int, default=8_192)
    words = parser.parse_args()
    vocabulary = 2_048 if words.quick else words.vocabulary
    step = Step(vocabulary)
    if words.side:
        before = reset_peak()
        step.run(words.side)
        print(json.dumps({"mb": peak() - before}))
        return
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    for turn in range(2 if words.quick else 5):
        for side in ("ours", "plain"):
            began = time.process_time()
            step.run(side)
            if turn:
                seconds[side].append(time.process_time() - began)
    ours, plain = (statistics.median(seconds[side]) for side in ("ours", "plain"))
    memory = {side: peak_of(side, vocabulary) for side in ("ours", "plain")}
    shape = f"{ROWS} rows, Vs {vocabulary}, Vt {step.teacher_logits.shape[-1]}, P-KL + CE, one thread"
    record(
        "distill-quick" if words.quick else "distill",
        [
            {
                "figure": "step time, ours / plain",
                "value": ours / plain,
                "unit": "×",
                "context": f"{ours:.2f} s, {shape}",
            },
            {
                "figure": "peak memory of the step, ours / plain",
                "value": memory["ours"] / memory["plain"],
                "unit": "×",
                "context": f"{memory['ours']:.0f} MB against {memory['plain']:.0f} MB, {shape}",
            },
        ],
    )


if __name__ == "__main__":
    main()
