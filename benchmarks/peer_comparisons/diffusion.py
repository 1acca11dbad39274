"""Masked diffusion: training and generation by xlm-core and xlm-models beside ours, with the same weights' shapes.

The work is that of ``benchmarks/mlm.py``: 8 ragged rows, a rotary transformer of 4 layers, the full vocabulary's loss;
generation fills 32 tokens behind a prompt of 128 in 32 steps. Memory leaves out weights and their gradients.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from benchmarks.peer_comparisons.row import Row, middle, ratio, releases
from benchmarks.peer_process import Side, peer_python


def compare(quick: bool) -> list[Row]:
    """Training steps, and without ``quick`` generation."""
    import torch

    from benchmarks.mlm import PINNED

    torch.set_num_threads(1)
    with Side("mlm_reference.py", peer_python("xlm", PINNED)) as theirs:
        said = releases(theirs.ask("versions", packages=["xlm-core", "xlm-models", "torch"]))
        return training(theirs, said, 2 if quick else 5) + ([] if quick else generation(theirs, said))


def training(theirs: Side, said: str, steps: int) -> list[Row]:
    """Seconds and memory of forward and backward, both sides in turn, the first step left out."""
    from benchmarks.mlm import IdTokenizer, our_model, our_step
    from benchmarks.mlm_reference import measured_step, seeded_batch
    from spanwise.mlm import MLMLoss

    loss = MLMLoss(model=our_model(dropout=0.1).train(), tokenizer=IdTokenizer())
    own: list[dict[str, float]] = []
    other: list[dict[str, float]] = []
    for step in range(steps + 1):
        other.append(theirs.ask("train", seed=step, dropout=0.1))
        ids, targets, real = seeded_batch(step)
        batch = {"input_ids": ids, "target_ids": targets, "attention_mask": real.long()}
        seconds, megabytes = measured_step(loss.model, partial(our_step, loss, batch))
        own.append({"seconds": seconds, "megabytes": megabytes})
    context = f"V 30,522, width 384, 4 layers, 8 rows of 16 to 128 tokens, dropout 0.1, float32; {said}"
    return [
        ratio(
            f"training step, {word}, ours / xlm", *(middle(side[1:], quantity) for side in (own, other)), unit, context
        )
        for quantity, unit, word in (("seconds", "s of CPU", "time"), ("megabytes", "MB", "peak memory"))
    ]


def generation(theirs: Side, said: str) -> list[Row]:
    """Seconds of a batch of 8: the whole forward at every step as theirs, and with a cache, which theirs has not."""
    import torch

    from benchmarks.mlm import IdTokenizer, our_model
    from benchmarks.mlm_reference import VOCABULARY
    from spanwise.mlm import MLMPredictor

    model = our_model().eval()
    prompt = torch.randint(4, VOCABULARY, (8, 128), generator=torch.Generator().manual_seed(0))
    options: dict[str, dict[str, Any]] = {"whole forwards": {}, "dual cache": {"block_size": 8, "cache": "dual"}}
    own: dict[str, list[dict[str, float]]] = {name: [] for name in options}
    other: list[dict[str, float]] = []
    for repeat in range(3):
        other.append(theirs.ask("generate", seed=repeat))
        for name, more in options.items():
            predictor = MLMPredictor(32, 32, IdTokenizer(), model, **more)
            began = time.process_time()
            predictor.predict({"input_ids": prompt})
            own[name].append({"seconds": time.process_time() - began})
    context = f"prompt 128, 32 new tokens in 32 steps, 8 rows; {said}"
    return [
        ratio(
            f"generation, ours ({name}) / xlm", middle(found, "seconds"), middle(other, "seconds"), "s of CPU", context
        )
        for name, found in own.items()
    ]
