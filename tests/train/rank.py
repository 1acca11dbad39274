"""One rank of a run, for ``torch.distributed.run``: trains a recipe, then writes what this rank saw as JSON.

    python -m torch.distributed.run --nproc-per-node 2 rank.py RECIPE FOLDER [sharded] [resume]

``sharded`` turns on FSDP2 on processors. Accelerate reads its FSDP settings for accelerators only and would silently
train with DDP, so its state is told here; the models of the run are asked afterwards what they are made of.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


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


def main(recipe: str, folder: str, *words: str) -> None:
    import torch
    from torch.distributed.tensor import DTensor
    from transformers import TrainerCallback

    from spanwise.train.recipe import load_recipe
    from spanwise.train.run import train

    torch.set_num_threads(1)
    if "sharded" in words:
        shard_on_processors()
    kinds: set[str] = set()

    class Parameters(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            kinds.update("sharded" if isinstance(one, DTensor) else "whole" for one in model.parameters())

    result = train(load_recipe(recipe), resume="resume" in words, callbacks=[Parameters()])
    rank = int(os.environ["RANK"])
    seen = {"rank": rank, "pid": os.getpid(), "world": torch.distributed.get_world_size(), "kinds": sorted(kinds)}
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(seen | result))
    torch.distributed.barrier()  # without it gloo's threads may still run when the process ends
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
