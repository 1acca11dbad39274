"""Where tokens lie in a padded batch before anything is hidden, and the step that hides them.

A collator describes its batch as a :class:`Layout`; :class:`MaskingCollator` draws the noise, hides tokens and returns
the batch. Collators hold no state but their generator, which is used only for rows that do not say where they stand in
the epoch. O(B·S).

Shapes: B rows, S width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.data import get_worker_info

from spanwise.batch import IGNORE_INDEX, BatchedDataDict
from spanwise.mlm.masking import Hidden, RowNoise, choose_hidden, row_noise
from spanwise.mlm.noise import NoiseSchedule
from spanwise.mlm.special_tokens import mask_token_id, special_ids

Rows = Sequence[Mapping[str, Any]]


@dataclass
class Layout:
    """A batch before hiding.

    Attributes:
        ids: token ids, PAD where there is none.
        attended: what the model sees.
        eligible: what may be hidden.
        fixed: real tokens that are never hidden (prompts), or None where there are none.
    """

    ids: Int[Tensor, "B S"]
    attended: Bool[Tensor, "B S"]
    eligible: Bool[Tensor, "B S"]
    fixed: Bool[Tensor, "B S"] | None = None

    @classmethod
    def empty(cls, rows: int, width: int, pad: int, *, with_fixed: bool = False) -> Layout:
        """All padding, nothing attended."""
        attended = torch.zeros(rows, width, dtype=torch.bool)
        fixed = attended.clone() if with_fixed else None
        return cls(torch.full((rows, width), pad, dtype=torch.long), attended, attended.clone(), fixed)

    def put(self, row: int, column: int, tokens: Sequence[int], *, eligible: bool) -> None:
        """Lay ``tokens`` into ``row`` from ``column`` on and attend to them; what is not eligible is fixed."""
        span = slice(column, column + len(tokens))
        self.ids[row, span] = torch.tensor(tokens, dtype=torch.long)
        self.attended[row, span] = True
        self.eligible[row, span] = eligible
        if self.fixed is not None:
            self.fixed[row, span] = not eligible

    def batch(self, mask: int | None, hidden: Hidden | None) -> dict[str, Any]:
        """The columns of a training batch; with ``hidden`` None nothing is replaced."""
        columns: dict[str, Any] = {
            "input_ids": self.ids,
            "attention_mask": self.attended.long(),
            "target_ids": self.ids.masked_fill(~self.attended, IGNORE_INDEX),
        }
        if hidden is not None and mask is not None:
            columns["input_ids"] = self.ids.masked_fill(hidden.mask, mask)
            columns |= {"noise_t": hidden.noise_t, "noise_weight": hidden.noise_weight}
        if self.fixed is not None:
            columns["fixed_positions_mask"] = self.fixed
        return columns


class MaskingCollator:
    """What every collator that hides tokens shares.

    Args:
        tokenizer: must have PAD and MASK.
        noise_schedule: how much is hidden at a time; None hides each token with probability t.
        masking: ``"bernoulli"`` or ``"exact"``.
        t_sampling: ``"iid"`` or ``"stratified"``; the latter needs ``epoch`` and ``position`` in every row.
        seed: of the counter-based noise, and of the generator when none is given.
        generator: for rows without ``epoch`` and ``position``. In DataLoader workers each worker derives its own.
    """

    def __init__(
        self,
        tokenizer: Any,
        noise_schedule: NoiseSchedule | None,
        *,
        add_bos: bool,
        add_eos: bool,
        masking: str = "bernoulli",
        t_sampling: str = "iid",
        seed: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        one_of("masking", masking, ("bernoulli", "exact"))
        one_of("t_sampling", t_sampling, ("iid", "stratified"))
        self.tokenizer = tokenizer
        self.noise_schedule = noise_schedule
        self.add_bos, self.add_eos = add_bos, add_eos
        self.special = special_ids(tokenizer, add_bos=add_bos, add_eos=add_eos)
        self.masking, self.t_sampling, self.seed = masking, t_sampling, seed
        self.generator = torch.Generator().manual_seed(seed) if generator is None else generator
        self._worker_seed: int | None = None

    @property
    def mask_token_id(self) -> int:
        """The id that stands for a hidden token."""
        return mask_token_id(self.tokenizer)

    def hide(self, rows: Rows, layout: Layout) -> BatchedDataDict:
        """Draw noise, hide tokens, and return the batch with what rows say about themselves."""
        noise = row_noise(
            rows, layout.ids.shape[1], seed=self.seed, t_sampling=self.t_sampling, generator=self._generator_here()
        )
        return self.finish(rows, layout, self.choose(layout, noise))

    def choose(self, layout: Layout, noise: RowNoise) -> Hidden:
        """Which tokens are hidden; token noise counts from the first attended token, so left padding changes
        nothing."""
        first = layout.attended.long().argmax(1, keepdim=True)
        place = (torch.arange(layout.ids.shape[1])[None] - first).clamp(min=0)
        return choose_hidden(layout.eligible, noise, place, self.noise_schedule, self.masking)

    def finish(self, rows: Rows, layout: Layout, hidden: Hidden | None) -> BatchedDataDict:
        """The batch, with ``idx`` and ``sample_mask`` of the rows where every row has them."""
        return BatchedDataDict(layout.batch(self.special.mask, hidden) | row_columns(rows) | {"labels_shifted": False})

    def with_ends(self, tokens: Sequence[int]) -> list[int]:
        """BOS tokens EOS, as far as they are asked for."""
        bos, eos = self.special.bos, self.special.eos
        return [*([] if bos is None else [bos]), *tokens, *([] if eos is None else [eos])]

    def _generator_here(self) -> torch.Generator:
        worker = get_worker_info()
        if worker is not None and worker.seed != self._worker_seed:
            # Every worker holds a copy of the same generator: without this, all would hide the same places.
            self.generator = torch.Generator().manual_seed((self.generator.initial_seed() + worker.seed) % 2**63)
            self._worker_seed = worker.seed
        return self.generator


def row_columns(rows: Rows) -> dict[str, Any]:
    """``idx`` (int64) and ``sample_mask`` (float32, also from ``loss_multiplier``) where every row has them."""
    columns: dict[str, Any] = {}
    known = (("idx", "idx", torch.long), ("sample_mask", "sample_mask", torch.float32))
    for source, name, dtype in (*known, ("loss_multiplier", "sample_mask", torch.float32)):
        if rows and name not in columns and all(source in row for row in rows):
            columns[name] = torch.tensor([row[source] for row in rows], dtype=dtype)
    return columns


def field(row: Mapping[str, Any], name: str) -> list[int]:
    """The ids under ``name`` as a list; ValueError where the row has no such field."""
    if name not in row:
        raise ValueError(
            f"a row has no field {name!r} (it has {sorted(row)}); expected token ids there. The data was probably made "
            f"for another collator. Fix: rename the column to {name!r}, or tokenize first."
        )
    value = row[name]
    try:
        return list(map(index, value.tolist() if hasattr(value, "tolist") else value))
    except TypeError as error:
        raise ValueError(
            f"a row holds {str(value)[:60]!r} under {name!r} ({type(value).__name__}); expected a flat list of token "
            "ids, whole numbers. Text was probably not tokenized, or rows were batched already. "
            f"Fix: {name} = tokenizer(text)['input_ids'], one list for each row."
        ) from error


def width_of(lengths: Sequence[int], block_size: int | None, truncate: str | None) -> int:
    """How wide a batch becomes: ``block`` as given, None the longest row, ``max`` the larger of the two.

    Without a block size the longest row decides in every mode, and rows of nothing are one column of padding. An empty
    batch is an error.
    """
    if not lengths:
        raise ValueError(
            "a collator was given no rows; expected at least one. The data set or the shard of this rank is probably "
            "empty. Fix: check the length of the data before training."
        )
    one_of("truncate", truncate, ("block", "max", None))
    if block_size is not None and block_size < 1:
        raise ValueError(
            f"a block size of {block_size} was given; expected at least 1, or None for the longest row. 0 was probably "
            "meant as no limit. Fix: pass None."
        )
    if block_size is None or truncate is None:
        return max(1, *lengths)
    return block_size if truncate == "block" else max(block_size, *lengths)


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuse a value that is not among ``allowed``."""
    if value not in allowed:
        raise ValueError(
            f"{name}={value!r} was given; expected one of {list(allowed)}. It is probably misspelt. "
            f"Fix: pass {name}={allowed[0]!r}."
        )
