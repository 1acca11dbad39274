"""What a generation looked like after every step, on disk: rows, likeliest tokens and their probabilities.

One folder per row, three small tensors per step; they are read back with weights_only, so a shared folder runs no code.
O(new tokens · k) per step and row on disk; while it runs O(B · new tokens · V) in memory.

Shapes: B rows, S width, W watched columns (the new tokens), V vocabulary, k kept tokens.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class HistoryPluginBase:
    """What the predictor tells of: override :meth:`update_history`.

    Attributes:
        max_new_tokens: how many columns at the end are watched; None watches whole rows.
    """

    max_new_tokens: int | None = None

    def __init__(self) -> None:
        self._probabilities: Tensor | None = None

    def observe(
        self,
        x: Int[Tensor, "B S"],
        scored: tuple[Bool[Tensor, "B S"], Float[Tensor, "M V"]] | None,
        step: int,
        max_new_tokens: int | None,
    ) -> None:
        """Called by the predictor before the first step (0, ``scored`` None) and after every step.

        Distributions of positions that a step did not score stay as they were last seen, 0 before that.
        """
        if scored is None:
            self._probabilities = None
        watched = self.max_new_tokens if self.max_new_tokens is not None else max_new_tokens
        begin = 0 if watched is None else max(0, x.shape[1] - watched)
        seen = x[:, begin:].cpu()
        if scored is not None:
            where, logits = scored
            if self._probabilities is None:
                self._probabilities = torch.zeros(*seen.shape, logits.shape[-1])
            inside = where.nonzero()[:, 1] >= begin
            self._probabilities[where[:, begin:].cpu()] = logits[inside].float().softmax(-1).cpu()
        self.update_history({"x": seen, "p": self._probabilities, "current_step": step})

    def update_history(self, step_results: Mapping[str, Any]) -> None:
        """Take note of one step: ``x`` [B, W], ``p`` [B, W, V] or None, ``current_step``."""

    def reset(self) -> None:
        """Start anew."""
        self._probabilities = None

    def to_dict(self) -> list[dict[str, Any]]:
        """What to note of each row in a log."""
        return []


class HistoryTopKPlugin(HistoryPluginBase):
    """Writes, per row, a folder ``<uuid hex>_<row>`` with ``<step>_x.pt``, ``<step>_p.pt`` and ``<step>_pids.pt``.

    Args:
        output_dir: where the folders go.
        k: how many tokens are kept per position; None keeps the whole vocabulary.
        max_new_tokens: how many columns at the end are watched; None is what the predictor appends, else whole rows.

    ``x`` is int64 [W], ``p`` float32 and ``pids`` int64 [W, k], falling. Before the first step there are no
    probabilities and no such files.
    """

    def __init__(
        self, output_dir: str | os.PathLike[str], k: int | None = None, max_new_tokens: int | None = None
    ) -> None:
        super().__init__()
        self.output_dir = Path(output_dir)
        self.k = k
        self.max_new_tokens = max_new_tokens
        self.unique_id: str | None = None
        self.rows = 0
        self.full_id: str | None = None

    @classmethod
    def from_serialized(cls, output_dir: str | os.PathLike[str], full_id: str) -> HistoryTopKPlugin:
        """A plugin that reads the row ``full_id`` back."""
        plugin = cls(output_dir)
        plugin.full_id = full_id
        plugin._folder()
        return plugin

    def update_history(self, step_results: Mapping[str, Any]) -> None:
        """Write one step. A step 0 begins a new history; else the rows must be as many as before."""
        x, p, step = step_results["x"], step_results.get("p"), int(step_results["current_step"])
        if self.unique_id is None or step == 0:
            self.unique_id, self.rows = uuid.uuid4().hex, len(x)
        elif self.rows != len(x):
            raise ValueError(
                f"a step of {len(x)} rows came after steps of {self.rows}; expected one number for a history. Two "
                "batches were probably mixed. Fix: call reset() between batches."
            )
        top = None if p is None else p.topk(p.shape[-1] if self.k is None else min(self.k, p.shape[-1]), dim=-1)
        for row, tokens in enumerate(x):
            folder = self.output_dir / f"{self.unique_id}_{row}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(tokens.clone(), folder / f"{step}_x.pt")
            if top is not None:
                torch.save(top.values[row].clone(), folder / f"{step}_p.pt")
                torch.save(top.indices[row].clone(), folder / f"{step}_pids.pt")

    def reset(self) -> None:
        """Forget the current history; the files stay."""
        super().reset()
        self.unique_id, self.rows = None, 0

    def to_dict(self) -> list[dict[str, Any]]:
        """One ``{"fid": …}`` per row of the current history."""
        if self.unique_id is None:
            raise ValueError(
                "the history was asked for its rows and holds none; expected a prediction before. It was "
                "probably reset. Fix: call to_dict() after predict() and before reset()."
            )
        return [{"fid": f"{self.unique_id}_{row}"} for row in range(self.rows)]

    def get_num_steps(self) -> int:
        """The number of the last step; 0 where nothing was filled."""
        return max((int(path.name.removesuffix("_x.pt")) for path in self._folder().glob("*_x.pt")), default=0)

    def get(self, step: int) -> dict[str, Tensor | None]:
        """``p``, ``pids`` and ``x`` of a step; None for what was not written."""
        folder = self._folder()
        found: dict[str, Tensor | None] = {}
        for name in ("p", "pids", "x"):
            path = folder / f"{step}_{name}.pt"
            found[name] = torch.load(path, weights_only=True) if path.is_file() else None
        return found

    def _folder(self) -> Path:
        folder = self.output_dir / (self.full_id or "")
        if self.full_id is None or not folder.is_dir():
            raise ValueError(
                f"there is no history {self.full_id!r} under '{self.output_dir}'; expected a folder named by "
                "to_dict(). The plugin was probably made for writing. Fix: "
                "HistoryTopKPlugin.from_serialized(output_dir, fid)."
            )
        return folder


class HistoryInMemory(HistoryPluginBase):
    """Keeps every step in memory, for a page that shows how a text came about.

    Attributes:
        steps: ids [B, W] after each step; the first is what was given.
        probabilities: the probability each filled token had when it was last scored, [B, W]; 0 where never scored.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Tensor] = []
        self.probabilities: list[Tensor] = []

    def update_history(self, step_results: Mapping[str, Any]) -> None:
        """Copy the step; step 0 begins anew."""
        x, p = step_results["x"], step_results["p"]
        if int(step_results["current_step"]) == 0:
            self.steps, self.probabilities = [], []
        self.steps.append(x.clone())
        self.probabilities.append(torch.zeros(x.shape) if p is None else p.gather(-1, x[..., None]).squeeze(-1))
