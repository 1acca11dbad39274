"""A process that the fault suite kills: ``python -m tests.dataplane.victim ROLE URL LAYOUT PARTITION``.

It says READY on standard output when it has reached the point, and then dies by its own SIGKILL (writers) or waits for
one (the others): no cleanup runs, as when the kernel's memory killer strikes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch

from spanwise.dataplane import DataPlaneClient, PartitionExhausted, open_client, to_nested_by_length


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def say(word: str) -> None:
    print(word, flush=True)


def rollout() -> dict[str, torch.Tensor]:
    return {
        "ids": to_nested_by_length(torch.ones(2, 3, dtype=torch.int64), torch.tensor([3, 1])),
        "reward": torch.ones(2),
    }


def write_and_die(client: Any, partition: str, point: str) -> None:
    """Put two samples and die at ``point``."""
    if hasattr(client, "plane"):
        plane = client.plane
        if point == "before-data":
            plane.write = die
        elif point == "after-data":
            plane.settle = die
        elif point == "before-publish":
            commit = plane.commit

            def commit_or_die(records: list[Any]) -> None:
                if records[0][0] == "put":
                    plane.log._publish = die
                commit(records)

            plane.commit = commit_or_die
    else:
        queue = client.process.client
        manager = queue.storage_manager
        if point == "before-data":
            manager.put_data = die
        elif point == "before-publish":
            manager.notify_data_update = die
    client.put_samples(["a", "b"], partition, rollout())


def hold_a_view(client: DataPlaneClient, partition: str) -> None:
    batch = client.get_samples(["a", "b"], partition, ["ids"])
    say(f"READY {int(batch['ids'].values().sum())}")
    time.sleep(600)


def hold_a_claim(client: DataPlaneClient, partition: str) -> None:
    meta = client.claim_meta(partition, "train", ["ids"], 2, lease_s=2.0)
    say(f"READY {json.dumps(meta.ids if meta else [])}")
    time.sleep(600)


def hold_the_lock(client: Any, _: str) -> None:
    """Inside a call, with a forked child that lives on for a while."""
    with client.plane.transaction(time.monotonic() + 10, TimeoutError):
        if os.fork() == 0:
            parent = os.getppid()
            os.closerange(0, 3)
            while os.getppid() == parent:
                time.sleep(0.05)
            time.sleep(10)
            os._exit(0)
        say("READY")
        time.sleep(600)


def stay(_: DataPlaneClient, __: str) -> None:
    say("READY")
    time.sleep(600)


def claim_everything(client: DataPlaneClient, partition: str) -> None:
    """Claim in sevens until nothing is left; print what was had."""
    say("READY")
    sys.stdin.readline()
    had: list[str] = []
    while True:
        try:
            meta = client.claim_meta(partition, "train", ["reward"], 7, timeout_s=120)
        except PartitionExhausted:
            break
        had += meta.ids if meta else []
    say(json.dumps(had))


def close_and_leave(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(["w"], partition, {"reward": torch.ones(1)})
    client.close()
    client.close()
    say("READY")


def main() -> None:
    role, url, layout, partition = sys.argv[1:5]
    torch.set_num_threads(1)
    options = {"layout": layout} if layout else {}
    client = open_client(url, **options)
    roles = {
        "hold-view": hold_a_view,
        "hold-claim": hold_a_claim,
        "hold-lock": hold_the_lock,
        "stay": stay,
        "claim": claim_everything,
        "close": close_and_leave,
    }
    if role in roles:
        roles[role](client, partition)
    else:
        write_and_die(client, partition, role)


if __name__ == "__main__":
    main()
