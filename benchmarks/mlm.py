"""Masked language models against the reference (xlm-core, xlm-models 0.3.1) and transformers' BERT and ModernBERT.

Run: .venv/bin/python benchmarks/mlm.py [--quick]

Both sides run interleaved with one thread, timed in seconds of CPU; the reference lives in a process and a virtual
environment of its own, made once under the cache folder. Memory is the peak of resident memory beyond weights and
gradients. --quick leaves out generation and sudoku.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.mlm_reference import HEADS, LAYERS, MASK, VOCABULARY, WIDTH, measured_step, seeded_batch
from benchmarks.peer_process import Side, peer_python
from benchmarks.record import record
from spanwise.mlm import DefaultMLMCollator, MLMLoss, MLMPredictor, RotaryTransformerMLMModel, nelbo

PINNED = ["torch==2.13.0", "xlm-core==0.3.1", "xlm-models==0.3.1"]
STEPS, REPEATS = 3, 3


class IdTokenizer:
    """What loss and predictor ask of a tokenizer."""

    mask_token_id, pad_token_id = MASK, 0

    def __init__(self, size: int = VOCABULARY) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def batch_decode(self, ids: torch.Tensor, **_: object) -> list[str]:
        return [""] * len(ids)


def our_model(dropout: float = 0.0) -> RotaryTransformerMLMModel:
    torch.manual_seed(0)
    return RotaryTransformerMLMModel(VOCABULARY, WIDTH, LAYERS, HEADS, max_length=192, dropout=dropout)


def hugging_face_models() -> dict[str, Any]:
    from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "pad_token_id": 0,
    }  # fmt: skip
    special = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    modern = ModernBertConfig(**sizes, **special, attn_implementation="sdpa")
    return {"BERT": BertForMaskedLM(BertConfig(**sizes)), "ModernBERT": ModernBertForMaskedLM(modern)}


def our_step(loss: MLMLoss, batch: dict[str, Any]) -> torch.Tensor:
    return loss(batch)["loss"]


def their_step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return model(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")}).loss


def training(reference: Side) -> list[dict[str, Any]]:
    """Seconds and memory of a training step, all sides in turn."""
    model, plain = our_model(dropout=0.1).train(), our_model().train()
    losses = {0.1: MLMLoss(model=model, tokenizer=IdTokenizer()), 0.0: MLMLoss(model=plain, tokenizer=IdTokenizer())}
    others = {name: other.train() for name, other in hugging_face_models().items()}
    seconds: dict[str, list[float]] = {}
    megabytes: dict[str, list[float]] = {}

    def note(name: str, found: tuple[float, float], step: int) -> None:
        if step:  # the first of each side warms up
            seconds.setdefault(name, []).append(found[0])
            megabytes.setdefault(name, []).append(found[1])

    for step in range(STEPS + 1):
        ids, targets, real = seeded_batch(step)
        batch = {"input_ids": ids, "target_ids": targets, "attention_mask": real.long()}
        for dropout, loss in losses.items():
            answer = reference.ask("train", seed=step, dropout=dropout)
            note(f"reference {dropout}", (answer["seconds"], answer["megabytes"]), step)
            note(f"ours {dropout}", measured_step(loss.model, partial(our_step, loss, batch)), step)
        labels = targets.masked_fill(ids != MASK, -100)
        for name, other in others.items():
            found = measured_step(other, partial(their_step, other, batch | {"labels": labels}))
            note(name, found, step)

    def ratio(values: dict[str, list[float]], other: str, ours: str) -> float:
        return statistics.median(values[other]) / statistics.median(values[ours])

    context = "V=30522 d=384 L=4, 8 rows of 16-128 tokens, fp32, 1 thread"
    rows = []
    for dropout in losses:
        theirs, name = f"reference {dropout}", f"ours {dropout}"
        own, size = statistics.median(seconds[name]), statistics.median(megabytes[name])
        told = f"{context}, dropout {dropout}; ours {own:.2f} s of CPU, {size:.0f} MB"
        rows.append(row(f"training step, reference / ours, dropout {dropout}", ratio(seconds, theirs, name), "x",
                        ">= 3.0", told))  # fmt: skip
        rows.append(row(f"activation and logits peak, ours / reference, dropout {dropout}",
                        1 / ratio(megabytes, theirs, name), "x", "<= 0.35", told))  # fmt: skip
    return rows + [
        row(
            f"training step, {name} / ours",
            ratio(seconds, name, "ours 0.1"),
            "x",
            "",
            f"{context}, its own loss",
        )
        for name in others
    ]


def same_weights(reference: Side) -> dict[str, Any]:
    """Load the reference's weights under their own names and compare logits, padding and all."""
    with tempfile.TemporaryDirectory() as folder:
        reference.ask("weights", path=f"{folder}/weights.pt")
        found = torch.load(f"{folder}/weights.pt", weights_only=True)
    model = our_model()
    model.load_state_dict(found["weights"])
    with torch.no_grad():
        logits = model.eval()(found["ids"], found["real"])
    difference = float((logits - found["logits"])[found["real"]].abs().max())
    return row("largest difference of logits with the reference's own weights", difference, "", "<= 0.001",
               "load_state_dict(strict), 2 ragged rows")  # fmt: skip


def generation(reference: Side) -> list[dict[str, Any]]:
    """Prompt 128 and 32 new tokens in 32 steps, all sides in turn."""
    model = our_model().eval()
    prompt = torch.randint(4, VOCABULARY, (8, 128), generator=torch.Generator().manual_seed(0))
    sides = {
        "full": MLMPredictor(32, 32, IdTokenizer(), model),
        "dual": MLMPredictor(32, 32, IdTokenizer(), model, block_size=8, cache="dual"),
        "prefix": MLMPredictor(32, 32, IdTokenizer(), model, block_size=8, cache="prefix"),
    }
    took: dict[str, list[float]] = {name: [] for name in ("reference", *sides)}
    for repeat in range(REPEATS):
        took["reference"].append(reference.ask("generate", seed=repeat)["seconds"])
        for name, predictor in sides.items():
            began = time.process_time()
            predictor.predict({"input_ids": prompt})
            took[name].append(time.process_time() - began)
    middle = {name: statistics.median(values) for name, values in took.items()}
    context = f"prompt 128 + 32 new, 32 steps, batch 8, uniform order, 1 thread, median of {REPEATS}"
    rows = []
    for name, called, target in (("full", "full forward", ">= 2"), ("dual", "dual cache", ">= 5"),
                                 ("prefix", "prefix cache", "")):  # fmt: skip
        told = f"{context}; reference {middle['reference']:.1f} s of CPU, ours {middle[name]:.1f} s"
        told += "" if name == "full" else ", block 8"
        rows.append(row(f"generation, {called}, reference / ours", middle["reference"] / middle[name], "x", target,
                        told))  # fmt: skip
    return rows


def sudoku() -> list[dict[str, Any]]:
    """Exact match on held-out grids, what the cache costs in it, and the spread of the bound."""
    import mlm_sudoku

    from spanwise.mlm.sudoku import CELLS, puzzle_rows, sudoku_puzzles, sudoku_tokenizer

    began = time.process_time()
    model = mlm_sudoku.train(400).eval()
    seconds = time.process_time() - began
    puzzles, tokenizer = 512, sudoku_tokenizer()
    sure = mlm_sudoku.evaluate(model, "top_prob", puzzles)
    random_order = mlm_sudoku.evaluate(model, None, puzzles)
    context = f"4x4, 10 blanks, 64 held-out grids, {puzzles} puzzles, 400 steps in {seconds:.0f} s"
    rows = [
        row("sudoku exact match, surest first", sure, "", ">= 0.75", context),
        row("sudoku exact match, random order", random_order, "", "", context),
    ]
    batch = puzzle_rows(sudoku_puzzles(puzzles))
    ids = torch.tensor([line["prompt_ids"] for line in batch])
    answers = torch.tensor([line["input_ids"] for line in batch])
    found = {}
    for cache in (None, "prefix", "dual"):
        options: dict[str, Any] = {"confidence": "top_prob", "temperature": 0.0, "block_size": 8, "cache": cache}
        filled = MLMPredictor(CELLS, tokenizer=tokenizer, model=model, **options).predict({"input_ids": ids})["ids"]
        found[cache] = float((filled == answers).all(1).float().mean())
        rows.append(row(f"sudoku exact match, blocks of 8, {cache or 'no'} cache", found[cache], "", "",
                        f"{puzzles} puzzles"))  # fmt: skip
    told = "clues lie behind the block, and the dual cache keeps them as they were"
    return [*rows, cache_cost("sudoku", found, puzzles, told), spread(model, tokenizer)]


def cache_cost(task: str, found: dict[str | None, float], rows: int, told: str) -> dict[str, Any]:
    """How far exact match with the dual cache lies from that without, in standard errors of the difference."""
    error = math.sqrt(sum(p * (1 - p) / rows for p in (found["dual"], found[None])))
    return row(f"{task}, exact match, dual cache and none apart, in standard errors",
               abs(found["dual"] - found[None]) / max(error, 1e-9), "se", "<= 2",
               f"{told}; {rows} rows: {found['dual']:.3f} with, {found[None]:.3f} without")  # fmt: skip


def copying(rows: int = 1024, digits: int = 16, steps: int = 250) -> dict[str, Any]:
    """Exact match with the dual cache and without, where neither can reach 1.

    The answer is a word of 8 digits, twice; the prompt is the answer with a tenth of its digits replaced. Where its two
    copies of a digit differ, one must be chosen, and the second block has to repeat the choice of the first.
    """
    torch.manual_seed(0)
    mask, size = 1, 12
    model = RotaryTransformerMLMModel(size, 64, 2, 4, dropout=0.0, activation="gelu", rotary_emb_dim=16, max_length=64)
    tokenizer = IdTokenizer(size)
    loss = MLMLoss(model=model, tokenizer=tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        answer = torch.randint(2, size, (count, digits // 2), generator=generator).repeat(1, 2)
        other = torch.randint(2, size, (count, digits), generator=generator)
        replaced = torch.rand(count, digits, generator=generator) < 0.1
        return answer.where(~replaced, other), answer

    for step in range(steps):
        prompt, answer = drawn(128)
        hidden = torch.rand(128, digits, generator=generator) < torch.rand(128, 1, generator=generator)
        ids = torch.cat([prompt, answer.masked_fill(hidden, mask)], 1)
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (steps - step) / (0.4 * steps))
        loss({"input_ids": ids, "target_ids": torch.cat([prompt, answer], 1)})["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    prompt, answer = drawn(rows)
    found: dict[str | None, float] = {}
    for cache in (None, "dual"):
        options: dict[str, Any] = {"confidence": "top_prob", "temperature": 0.0, "block_size": 8, "cache": cache}
        predictor = MLMPredictor(digits, digits, tokenizer, model.eval(), **options)
        found[cache] = float(
            (predictor.predict({"input_ids": prompt})["ids"][:, digits:] == answer).all(1).float().mean()
        )
    return cache_cost("noisy copy", found, rows, f"{digits} digits behind a prompt with a tenth replaced, blocks of 8")


def spread(model: RotaryTransformerMLMModel, tokenizer: Any) -> dict[str, Any]:
    """Standard deviation of the bound over seeds, independent masking against exact counts and stratified times."""
    from spanwise.mlm.sudoku import split_grids

    rows = [{"input_ids": [digit + 1 for digit in grid]} for grid in split_grids()[1][:16]]
    deviation = []
    for options in ({}, {"masking": "exact", "t_sampling": "stratified"}):
        values = []
        for seed in range(40):
            ends = {"add_bos": False, "add_eos": False}
            collator = DefaultMLMCollator(
                tokenizer, None, loss_on_padding=False, truncate=None, seed=seed, **ends, **options
            )
            values.append(nelbo(model, tokenizer, collator, rows, draws=8, batch_size=128).nats_per_token)
        deviation.append(statistics.stdev(values))
    return row("std of the NELBO estimate, ours / independent", deviation[1] / deviation[0], "x", "<= 0.4",
               "16 rows, 8 draws each, 40 seeds")  # fmt: skip


def row(figure: str, value: float, unit: str, target: str, context: str) -> dict[str, Any]:
    """A row for the results file."""
    reached = "-"
    if target:
        sign, bound = target.split()
        reached = "yes" if (value >= float(bound) if sign == ">=" else value <= float(bound)) else "no"
    return {
        "figure": figure, "value": round(value, 6 if value < 0.01 else 3), "unit": unit, "target": target,
        "reached": reached,
        "context": context,
    }  # fmt: skip


def main() -> None:
    """All figures, or with --quick those of training alone."""
    torch.set_num_threads(1)
    quick = "--quick" in sys.argv
    with Side("mlm_reference.py", peer_python("xlm", PINNED)) as reference:
        rows = [same_weights(reference), *training(reference)]
        if not quick:
            rows += generation(reference)
    if not quick:
        rows += [copying(), *sudoku()]
    record("mlm", rows)


if __name__ == "__main__":
    main()
