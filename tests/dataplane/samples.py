"""What the suites put on a plane: small ragged samples whose content says which they are."""

from __future__ import annotations

import torch

from spanwise.dataplane import BatchMeta, DataPlaneClient, Field, to_nested_by_length

FIELDS = [Field("ids", torch.int64, (), ragged=True), "reward", "info", "logp"]


def ragged(*rows: list[int]) -> torch.Tensor:
    return to_nested_by_length(
        torch.tensor([row + [0] * (8 - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])
    )


def fill(client: DataPlaneClient, name: str, ids: list[str], start: int = 0) -> BatchMeta:
    """Ids and rewards: sample i has i + 1 tokens of value i."""
    rows = [[start + row] * (start + row + 1) for row in range(len(ids))]
    rewards = torch.arange(start, start + len(ids), dtype=torch.float32)
    return client.put_samples(ids, name, {"ids": ragged(*rows), "reward": rewards}, [{"n": i} for i in ids])
