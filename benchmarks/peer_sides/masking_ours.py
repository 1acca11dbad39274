"""Masking by our collator: each row hides a share of its own, drawn uniformly, half on average."""

from __future__ import annotations

from typing import Any

from benchmarks.peer_sides.masking_work import MaskingSide
from benchmarks.peer_sides.serve import serve
from spanwise.mlm import DefaultMLMCollator


class Ours(MaskingSide):
    """Rows have begin and end, so none is added."""

    def collator(self) -> Any:
        """Pads to the longest row."""
        ends = {"add_bos": False, "add_eos": False}
        return DefaultMLMCollator(self.tokenizer, None, None, loss_on_padding=False, truncate=None, seed=0, **ends)

    def features(self, row: dict[str, Any]) -> dict[str, Any]:
        """Ids, and the place in the epoch."""
        return {"input_ids": row["ids"], "epoch": row["epoch"], "position": row["position"]}


if __name__ == "__main__":
    serve(Ours())
