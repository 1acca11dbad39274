"""Collators for a prompt and what follows it.

A prompt longer than its room is cut on the left, where it is farthest from the answer; the suffix keeps its slot
whatever the prompt's length. O(B·S).

Shapes: B rows, P prompt room (input_block_size), S suffix slot (block_size).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spanwise.batch import BatchedDataDict
from spanwise.mlm.layout import Layout, MaskingCollator, Rows, field, row_columns, width_of
from spanwise.mlm.noise import NoiseSchedule


class _Seq2SeqCollator(MaskingCollator):
    """The arguments that all three share."""

    def __init__(
        self,
        tokenizer: Any,
        noise_schedule: NoiseSchedule | None = None,
        block_size: int | None = None,
        input_block_size: int | None = None,
        add_bos: bool = True,
        add_eos: bool = True,
        truncate: str | None = "block",
        loss_on_padding: bool = True,
        prompt_field: str = "prompt_ids",
        target_field: str = "target_ids",
        pass_through_fields: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, noise_schedule, add_bos=add_bos, add_eos=add_eos, **options)
        self.block_size = block_size
        self.input_block_size = input_block_size
        self.truncate: str | None = truncate
        self.loss_on_padding = loss_on_padding
        self.prompt_field = prompt_field
        self.target_field = target_field
        self.pass_through_fields = ["answer", "target"] if pass_through_fields is None else list(pass_through_fields)

    def _suffix(self, row: Mapping[str, Any]) -> list[int]:
        """target_ids, else input_ids, else empty."""
        for name in (self.target_field, *(("input_ids",) if self.target_field == "target_ids" else ())):
            if name in row:
                return field(row, name)
        return []

    def _prompts(self, rows: Rows, *, with_bos: bool) -> list[list[int]]:
        """Prompts, with BOS behind them if asked, cut on the left to the room there is."""
        bos = [self.special.bos] if with_bos and self.special.bos is not None else []
        prompts = [[*field(row, self.prompt_field), *bos] for row in rows]
        room = self.input_block_size
        return prompts if room is None else [prompt[max(0, len(prompt) - room) :] for prompt in prompts]

    def _prompt_room(self, prompts: list[list[int]]) -> int:
        return width_of([len(prompt) for prompt in prompts], self.input_block_size, "block")

    def _passed_through(self, rows: Rows) -> dict[str, Any]:
        return {
            name: [row[name] for row in rows] for name in self.pass_through_fields if all(name in row for row in rows)
        }


class MLMSeq2SeqTrainCollator(_Seq2SeqCollator):
    """prompt BOS suffix EOS, padded on the right only; only the suffix slot may be hidden, BOS is not part of it.

    The batch is input_block_size + block_size wide, and each row's slot is exactly block_size columns that begin behind
    its BOS; with ``loss_on_padding`` the PAD inside the slot is a token like others. A block size of None is the
    longest of the batch.
    """

    def __call__(self, rows: Rows) -> BatchedDataDict:
        """Collate rows with ``prompt_ids`` and a suffix."""
        prompts = self._prompts(rows, with_bos=True)
        eos = [] if self.special.eos is None else [self.special.eos]
        suffixes = [[*self._suffix(row), *eos] for row in rows]
        slot = width_of([len(suffix) for suffix in suffixes], self.block_size, self.truncate)
        layout = Layout.empty(len(rows), self._prompt_room(prompts) + slot, self.special.pad, with_fixed=True)
        for row, (prompt, suffix) in enumerate(zip(prompts, suffixes, strict=True)):
            begin = len(prompt)
            layout.put(row, 0, prompt, eligible=False)
            layout.put(row, begin, suffix[:slot], eligible=True)
            if self.loss_on_padding:
                layout.attended[row, begin : begin + slot] = True
                layout.eligible[row, begin : begin + slot] = True
        batch = self.hide(rows, layout)
        batch.update(self._passed_through(rows))
        return batch


class MLMSeq2SeqCollator(_Seq2SeqCollator):
    """The prompt padded on the left to input_block_size, then BOS suffix EOS padded on the right to block_size.

    All prefixes end at the same column. The suffix with its BOS and EOS may be hidden (and PAD with loss_on_padding).
    """

    def __call__(self, rows: Rows) -> BatchedDataDict:
        """Collate rows with ``prompt_ids`` and a suffix."""
        prompts = self._prompts(rows, with_bos=False)
        suffixes = [self.with_ends(self._suffix(row)) for row in rows]
        slot = width_of([len(suffix) for suffix in suffixes], self.block_size, self.truncate)
        room = self._prompt_room(prompts)
        layout = Layout.empty(len(rows), room + slot, self.special.pad, with_fixed=True)
        for row, (prompt, suffix) in enumerate(zip(prompts, suffixes, strict=True)):
            layout.put(row, room - len(prompt), prompt, eligible=False)
            layout.put(row, room, suffix[:slot], eligible=True)
        if self.loss_on_padding:
            layout.attended[:, room:] = True
            layout.eligible[:, room:] = True
        batch = self.hide(rows, layout)
        batch.update(self._passed_through(rows))
        return batch


class MLMSeq2SeqPredCollator(MLMSeq2SeqCollator):
    """For prediction: prompt and BOS padded on the left; the target, suffix and EOS padded on the right, apart.

    Without any suffix there is no ``target_ids``. A long prompt is cut on the left, BOS survives.
    """

    def __call__(self, rows: Rows) -> BatchedDataDict:
        """Collate rows with ``prompt_ids`` and, in all or in none, a suffix."""
        prompts = self._prompts(rows, with_bos=True)
        room = self._prompt_room(prompts)
        layout = Layout.empty(len(rows), room, self.special.pad)
        for row, prompt in enumerate(prompts):
            layout.put(row, room - len(prompt), prompt, eligible=False)
        batch = BatchedDataDict(
            {"input_ids": layout.ids, "attention_mask": layout.attended.long(), "labels_shifted": False}
            | row_columns(rows)
            | self._passed_through(rows)
        )
        suffixes = [self._suffix(row) for row in rows]
        if any(suffixes):
            batch["target_ids"] = self._targets(suffixes)
        return batch

    def _targets(self, suffixes: list[list[int]]) -> torch.Tensor:
        empty = [row for row, suffix in enumerate(suffixes) if not suffix]
        if empty:
            raise ValueError(
                f"rows {empty[:5]} have no suffix and the others have one; expected a suffix in all rows or in none. "
                "Data with and without answers was probably mixed. Fix: predict the two kinds in separate batches."
            )
        eos = [] if self.special.eos is None else [self.special.eos]
        targets = [[*suffix, *eos] for suffix in suffixes]
        longest = max(len(target) for target in targets)
        width = longest if self.block_size is None else self.block_size
        if longest > width:
            raise ValueError(
                f"a target holds {longest} tokens with EOS; expected at most block_size={width}. The answers are "
                f"probably longer than what is generated. Fix: pass block_size={longest}, or shorten the targets."
            )
        ids = torch.full((len(targets), width), self.special.pad, dtype=torch.long)
        for row, target in enumerate(targets):
            ids[row, : len(target)] = torch.tensor(target)
        return ids
