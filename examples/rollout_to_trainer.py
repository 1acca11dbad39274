"""Two producers write ragged rollouts, a trainer claims them padded and writes a column back, a third task reads that.

Run: .venv/bin/python examples/rollout_to_trainer.py [--transport memory|shm|tq] [--samples 64]

What to see: the same code over threads (memory), processes (shm) or a Ray cluster (tq; needs `pip install
spanwise[ray]`), and how many bytes travelled against what padded rectangles would have taken.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from spanwise.dataplane import (
    DataPlaneClient,
    Field,
    PartitionExhausted,
    kv_first_write,
    open_client,
    read_columns,
    write_columns,
)

PARTITION = "rollouts"
FIELDS = [
    Field("input_ids", torch.int64, (), ragged=True),
    Field("logprobs", torch.float32, (), ragged=True),
    "reward",
    "prompt",
]
BATCH = 8
WIDEST = 256


def produce(url: str, producer: int, samples: int) -> None:
    """Write ``samples`` rollouts of random lengths, a batch at a time."""
    client = open_client(url)
    generator = torch.Generator().manual_seed(producer)
    for start in range(0, samples, BATCH):
        count = min(BATCH, samples - start)
        lengths = torch.randint(8, WIDEST, (count,), generator=generator)
        padded = torch.randint(1, 32_000, (count, int(lengths.max())), generator=generator)
        prompts = np.array([{"producer": producer, "number": start + row} for row in range(count)], dtype=object)
        kv_first_write(
            client,
            PARTITION,
            {"input_ids": padded, "reward": torch.rand(count, generator=generator), "prompt": prompts},
            lengths=lengths,
            token_aligned_fields={"input_ids"},
        )
    client.close()


def claim_all(client: DataPlaneClient, task: str, fields: list[str], use: Callable[[Any], None]) -> int:
    """Claim batches until the task has had every sample."""
    seen = 0
    while True:
        try:
            meta = client.claim_meta(PARTITION, task, fields, BATCH, timeout_s=120)
        except PartitionExhausted:
            return seen
        if meta is not None:
            use(meta)
            seen += meta.size


def report(url: str, samples: int) -> None:
    """The third task: read what the trainer wrote back."""
    client = open_client(url)
    totals: list[float] = []

    def read(meta: Any) -> None:
        totals.extend(float(row.sum()) for row in client.get_data(meta)["logprobs"].unbind())

    claim_all(client, "report", ["logprobs"], read)
    print(f"report: {len(totals)} of {samples} samples scored, mean log-probability {np.mean(totals):.1f}")
    client.close()


def train(client: DataPlaneClient, samples: int) -> None:
    """Claim, read padded, score, write one column back."""
    moved = {"tokens": 0, "rectangle": 0}

    def step(meta: Any) -> None:
        batch = read_columns(
            client, meta, ["input_ids", "reward"], pad_value_dict={"input_ids": 0}, pad_to_seqlen=WIDEST
        )
        ids = batch["input_ids"]
        scores = -(ids % 7).float() * batch["reward"][:, None]
        write_columns(client, meta, {"logprobs": scores}, token_aligned_fields={"logprobs"})
        moved["tokens"] += sum(meta.lengths)
        moved["rectangle"] += ids.numel()

    seen = claim_all(client, "train", ["input_ids", "reward"], step)
    ragged, padded = 12 * moved["tokens"], 12 * moved["rectangle"]
    print(f"trainer: {seen} of {samples} samples, {moved['tokens']:,} tokens")
    print(f"moved {ragged / 1e3:.1f} kB of ids and log-probabilities; padded to {WIDEST} it were {padded / 1e3:.1f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=["memory", "shm", "tq"], default="memory")
    parser.add_argument("--samples", type=int, default=64)
    arguments = parser.parse_args()
    name = f"rollouts-{uuid.uuid4().hex[:8]}"
    url = {"memory": f"memory://{name}", "shm": f"shm://{name}", "tq": "tq://auto"}[arguments.transport]
    client = open_client(url)
    client.register_partition(PARTITION, FIELDS, arguments.samples, ["train", "report"])
    if arguments.transport == "tq":
        import ray

        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # the others join this cluster
    half = arguments.samples // 2
    jobs: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (produce, (url, 0, half)),
        (produce, (url, 1, arguments.samples - half)),
        (report, (url, arguments.samples)),
    ]
    # The fork server imports everything once; its children begin in milliseconds.
    start: Any = (
        threading.Thread if arguments.transport == "memory" else multiprocessing.get_context("forkserver").Process
    )
    parties = [start(target=function, args=args) for function, args in jobs]
    for party in parties:
        party.start()
    train(client, arguments.samples)
    for party in parties:
        party.join()
    everything = client.check_consumption_status(PARTITION, ["train", "report"])
    print(f"transport: {arguments.transport}, every sample consumed by both tasks: {everything}")
    client.close()


if __name__ == "__main__":
    main()
