"""Collators for one sequence per row: pre-training, infilling, packed rows.

Layout: BOS x EOS, padded on the right. BOS and EOS are added before the width is computed, so EOS is lost only to an
explicit block cut. O(B·S).

Shapes: B rows, S width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spanwise.batch import BatchedDataDict
from spanwise.mlm.layout import Layout, MaskingCollator, Rows, field, width_of
from spanwise.mlm.noise import NoiseSchedule
from spanwise.spans.pack import segment_positions


class DefaultMLMCollator(MaskingCollator):
    """BOS x EOS, padded on the right; any token may be hidden.

    Args:
        tokenizer: with PAD and MASK (and BOS, EOS, or [CLS], [SEP], as far as they are added).
        block_size: the width; None means the longest row of the batch.
        noise_schedule: see :mod:`spanwise.mlm.noise`.
        loss_on_padding: PAD is a token like others: attended, hidden, trained on. Else it is none of these.
        truncate: ``"block"`` pads or cuts to block_size, None pads to the longest row, ``"max"`` to the larger.
        options: ``masking``, ``t_sampling``, ``seed``, ``generator``; see :class:`MaskingCollator`.

    Returns (when called with rows that hold ``input_ids``): :class:`MLMBatch` keys in a BatchedDataDict.

    >>> from types import SimpleNamespace
    >>> tokenizer = SimpleNamespace(pad_token_id=0, mask_token_id=1, bos_token_id=2, eos_token_id=3)
    >>> collator = DefaultMLMCollator(tokenizer, 6, None, loss_on_padding=False)
    >>> collator([{"input_ids": [7, 8]}])["target_ids"].tolist()
    [[2, 7, 8, 3, -100, -100]]
    """

    def __init__(
        self,
        tokenizer: Any,
        block_size: int | None,
        noise_schedule: NoiseSchedule | None = None,
        loss_on_padding: bool = True,
        truncate: str | None = "block",
        add_bos: bool = True,
        add_eos: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, noise_schedule, add_bos=add_bos, add_eos=add_eos, **options)
        self.block_size = block_size
        self.loss_on_padding = loss_on_padding
        self.truncate: str | None = truncate

    def __call__(self, rows: Rows) -> BatchedDataDict:
        """Collate rows with ``input_ids``."""
        return self.hide(rows, self.lay([self.with_ends(field(row, "input_ids")) for row in rows]))

    def lay(self, sequences: list[list[int]]) -> Layout:
        """Pad or cut whole sequences; everything that is attended may be hidden."""
        width = width_of([len(tokens) for tokens in sequences], self.block_size, self.truncate)
        layout = Layout.empty(len(sequences), width, self.special.pad)
        for row, tokens in enumerate(sequences):
            layout.put(row, 0, tokens[:width], eligible=True)
        if self.loss_on_padding:
            layout.attended.fill_(True)
            layout.eligible.fill_(True)
        return layout


class DefaultInfillMLMCollator(DefaultMLMCollator):
    """As :class:`DefaultMLMCollator`, but only where ``prompt_ids`` holds MASK (and BOS, EOS, PAD) may be hidden.

    Rows hold ``input_ids`` (the answer) and ``prompt_ids`` (the same length, MASK where it may be asked). The batch
    says in ``fixed_positions_mask`` which tokens are given.
    """

    def __call__(self, rows: Rows) -> BatchedDataDict:
        """Collate rows with ``input_ids`` and ``prompt_ids``."""
        answers = [field(row, "input_ids") for row in rows]
        prompts = [field(row, "prompt_ids") for row in rows]
        same_lengths(prompts, answers)
        layout = self.lay([self.with_ends(answer) for answer in answers])
        layout.fixed = torch.zeros_like(layout.attended)
        begin = int(self.special.bos is not None)
        for row, prompt in enumerate(prompts):
            given = torch.tensor([token != self.special.mask for token in prompt], dtype=torch.bool)
            room = layout.ids.shape[1] - begin
            layout.fixed[row, begin : begin + len(prompt)] = given[:room]
        layout.eligible &= ~layout.fixed
        return self.hide(rows, layout)


class MLMInfillWithExactTargetPredCollator(DefaultMLMCollator):
    """For prediction: ``prompt_ids`` already holds its masks, none is added; the target comes from ``input_ids``.

    ``target_ids`` keeps PAD, so that exact match compares whole rows.
    """

    def __call__(self, rows: Rows) -> BatchedDataDict:
        """Collate rows with ``prompt_ids`` and ``input_ids``."""
        prompts = [field(row, "prompt_ids") for row in rows]
        answers = [field(row, "input_ids") for row in rows]
        same_lengths(prompts, answers)
        batch = self.finish(rows, self.lay([self.with_ends(prompt) for prompt in prompts]), None)
        batch["target_ids"] = self.lay([self.with_ends(answer) for answer in answers]).ids
        return batch


class PackedMLMCollator(MaskingCollator):
    """Rows that hold several sequences, each closed by EOS: positions restart and attention stays within a sequence.

    ``segment_ids`` count from 1; 0 is padding, which appears where a row is shorter than ``block_size``.
    ``use_flex_attn`` is accepted for recipes of the reference; segments are exact without it.
    """

    def __init__(
        self,
        tokenizer: Any,
        block_size: int,
        noise_schedule: NoiseSchedule | None = None,
        use_flex_attn: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, noise_schedule, add_bos=False, add_eos=True, **options)
        self.eos = int(self.with_ends([])[-1])
        self.block_size = block_size
        self.use_flex_attn = use_flex_attn

    def __call__(self, rows: Rows) -> BatchedDataDict:
        """Collate rows with ``input_ids`` of at most ``block_size`` tokens."""
        sequences = [field(row, "input_ids") for row in rows]
        width = width_of([len(tokens) for tokens in sequences], self.block_size, "block")
        longest = max(len(tokens) for tokens in sequences)
        if longest > width:
            raise ValueError(
                f"a packed row holds {longest} tokens; expected at most block_size={width}. The rows were probably "
                f"packed for another block size. Fix: pack to {width} tokens, or pass block_size={longest}."
            )
        layout = Layout.empty(len(sequences), width, self.special.pad)
        for row, tokens in enumerate(sequences):
            layout.put(row, 0, tokens, eligible=True)
        batch = self.hide(rows, layout)
        batch["segment_ids"] = self._segments(layout)
        batch["positions"] = segment_positions(batch["segment_ids"])
        return batch

    def _segments(self, layout: Layout) -> Tensor:
        closes = torch.eq(layout.ids, self.eos).long().cumsum(1)
        segments = torch.ones_like(layout.ids)
        segments[:, 1:] += closes[:, :-1]
        return segments * layout.attended


def same_lengths(prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Refuse rows whose prompt and answer differ in length."""
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if len(prompt) != len(answer):
            raise ValueError(
                f"row {row} has {len(prompt)} prompt_ids and {len(answer)} input_ids; expected as many of each, one "
                "MASK or given token per token of the answer. One side was probably cut or given special tokens. "
                "Fix: tokenize both the same way."
            )
