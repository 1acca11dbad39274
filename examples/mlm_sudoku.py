"""Train a masked model on 4×4 sudoku in a plain loop and fill puzzles it has never seen.

Run: .venv/bin/python examples/mlm_sudoku.py [steps]

What to see: exact match of puzzles with 10 blanks on held-out grids, filled at random and surest-first by the same
weights. Order matters more than the number of steps.
"""

from __future__ import annotations

import sys
import time

import torch

from spanwise.mlm import (
    DefaultMLMCollator,
    MLMInfillWithExactTargetPredCollator,
    MLMLoss,
    MLMPredictor,
    RotaryTransformerMLMModel,
    exact_match,
)
from spanwise.mlm.sudoku import CELLS, make_puzzles, puzzle_rows, split_grids, sudoku_tokenizer

BATCH = 256
LEARNING_RATE = 1e-3


def train(steps: int, seed: int = 0) -> RotaryTransformerMLMModel:
    """Train on all but the held-out grids; every row hides an exact, evenly spread number of cells."""
    torch.manual_seed(seed)
    tokenizer = sudoku_tokenizer()
    model = RotaryTransformerMLMModel(
        len(tokenizer), 96, 4, 4, dropout=0.0, activation="gelu", rotary_emb_dim=24, max_length=CELLS
    )
    loss = MLMLoss(model=model, tokenizer=tokenizer, norm="sequence")
    collator = DefaultMLMCollator(
        tokenizer, CELLS, loss_on_padding=False, add_bos=False, add_eos=False, masking="exact", t_sampling="stratified"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20, (steps - step) / (0.3 * steps))
    )
    grids, _ = split_grids()
    order = torch.Generator().manual_seed(seed)
    for step in range(steps):
        chosen = torch.randint(len(grids), (BATCH,), generator=order).tolist()
        rows = [
            {"input_ids": [digit + 1 for digit in grids[grid]], "epoch": 0, "position": step * BATCH + place}
            for place, grid in enumerate(chosen)
        ]
        value = loss(collator(rows))["loss"]
        value.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step:4d}  loss {value.item():.3f}", flush=True)
    return model


def evaluate(model: RotaryTransformerMLMModel, confidence: str | None, puzzles: int = 512) -> float:
    """Exact match on puzzles of held-out grids, one cell per step."""
    tokenizer = sudoku_tokenizer()
    rows = puzzle_rows(make_puzzles(split_grids()[1], puzzles, blanks=10))
    batch = MLMInfillWithExactTargetPredCollator(tokenizer, CELLS, add_bos=False, add_eos=False)(rows)
    predictor = MLMPredictor(CELLS, tokenizer=tokenizer, model=model, temperature=0.0, confidence=confidence)
    return exact_match(predictor.predict(batch)["ids"], batch["target_ids"]).value


def main() -> None:
    """Train, then compare the two orders."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    model = train(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
    print(f"trained in {time.perf_counter() - began:.0f} s")
    for confidence in (None, "top_prob"):
        print(f"{confidence or 'at random':>10}: exact match {evaluate(model, confidence):.3f}")


if __name__ == "__main__":
    main()
