"""One rank of some runs, for ``torch.distributed.run``: trains recipes in turn, then writes what this rank saw as JSON.

    python -m torch.distributed.run --nproc-per-node 2 rank.py FOLDER [sharded]

FOLDER holds ``jobs.json``, a list of ``{"recipe": PATH, "again": BOOL, "signalled": BOOL}``; ``again`` takes the newest
checkpoint away afterwards and continues the run from the one before, ``signalled`` sends SIGTERM to the second rank
alone and answers with the exit code. ``sharded`` turns on FSDP2 on processors: accelerate reads its
FSDP settings for accelerators only and would silently train with DDP, so its state is told here; the models of the
runs are asked what they are made of.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock


def shard_on_processors() -> None:
    """Let accelerate's state take up an FSDP plugin although the processes have no GPU."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    stock = AcceleratorState.__init__

    def with_plugin(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        stock(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = with_plugin


def run_job(job: dict[str, Any], rank: int) -> dict[str, Any]:
    import torch
    from torch.distributed.tensor import DTensor
    from transformers import TrainerCallback

    from spanwise.train import distill
    from spanwise.train.fused_losses import fused_losses
    from spanwise.train.recipe import TASK_MODULES, load_recipe
    from spanwise.train.run import train
    from spanwise.train.run_folder import checkpoints

    kinds: set[str] = set()

    class Parameters(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            kinds.update("sharded" if isinstance(one, DTensor) else "whole" for one in model.parameters())

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if job["signalled"] and rank == 1 and state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    fused: list[bool] = []

    def noted(hidden: Any, head: Any, *arguments: Any) -> Any:
        fused.append(isinstance(head.weight, DTensor))
        return fused_losses(hidden, head, *arguments)

    recipe = load_recipe(job["recipe"])
    counted: list[float] = []
    task_module = importlib.import_module(TASK_MODULES[recipe.task])
    with (
        mock.patch.object(distill, "fused_losses", noted),
        mock.patch.object(task_module, "build", counting(task_module.build, counted)),
    ):
        try:
            result = train(recipe, callbacks=[Parameters()])
        except SystemExit as end:
            return {"exit": end.code}
        result["counted"] = list(counted)
        if job["again"]:
            torch.distributed.barrier()
            if rank == 0:
                shutil.rmtree(checkpoints(Path(recipe.output))[-1])
            torch.distributed.barrier()
            result["again"] = train(recipe, resume=True)["loss_per_step"]
    return result | {"kinds": sorted(kinds), "fused": len(fused), "gathered": not any(fused)}


def counting(build: Callable[..., Any], counted: list[float]) -> Callable[..., Any]:
    """A task's ``build`` whose task notes what each micro-batch of this rank counts."""

    def noting(*arguments: Any) -> Any:
        task = build(*arguments)
        counts = task.counts

        def heard(batch: Any) -> Any:
            found = counts(batch)
            counted.append(float(sum(found.values())))
            return found

        task.counts = heard
        return task

    return noting


def main(folder: str, *words: str) -> None:
    import torch

    torch.set_num_threads(1)
    if "sharded" in words:
        shard_on_processors()
    rank = int(os.environ["RANK"])
    results = [run_job(job, rank) for job in json.loads(Path(folder, "jobs.json").read_text())]
    seen = {"rank": rank, "pid": os.getpid(), "world": torch.distributed.get_world_size(), "results": results}
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(seen))
    torch.distributed.barrier()  # without it gloo's threads may still run when the process ends
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
