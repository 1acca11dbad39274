"""The state of one generation: rows, what is still hidden in them, and the part that is being filled.

Everything is kept per row, random numbers included (they are counted by seed, row key, step and position), so a row's
result does not depend on its neighbours. O(B·S).

Shapes: B rows, S width, M positions in row-major order.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.mlm.cache import KeyValueCache
from spanwise.mlm.masking import counter_uniform
from spanwise.mlm.model import count_positions

ORDER_STREAM, TOKEN_STREAM, REVEAL_STREAM, REMASK_STREAM = 3, 4, 5, 6


class Generation:
    """Rows while they are being filled.

    Attributes:
        x: int64 [B, S]; filled in place.
        attended: bool [B, S]; MASK is always attended.
        positions: int64 [B, S].
        asked: bool [B, S]; what was hidden at the start.
        steps_taken: int64 [B]; forwards each row took part in.
        limit: int64 [B]; the most forwards each row may take: min(max_steps, hidden).
        block: bool [B, S]; the positions being filled; nothing without blocks.
        stale: bool [B]; rows that have just begun a block, whose cache must be computed.
        cache: keys and values, where they are kept.
    """

    def __init__(self, x: Tensor, attended: Tensor, mask: int, keys: Tensor, seed: int, max_steps: int) -> None:
        self.x, self.mask, self.seed, self.keys = x, mask, seed, keys.to(x.device)
        self.asked = x == mask
        self.attended = attended | self.asked
        self.positions = count_positions(self.attended)
        self.steps_taken = torch.zeros(len(x), dtype=torch.long, device=x.device)
        self.limit = self.asked.sum(1).clamp(max=max_steps)
        self.block = torch.zeros_like(self.asked)
        self.stale = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        self.cache: KeyValueCache | None = None

    @property
    def hidden(self) -> Bool[Tensor, "B S"]:
        """What is still to fill."""
        return self.x == self.mask

    @property
    def steps_left(self) -> Int[Tensor, " B"]:
        """How many forwards each row may still take."""
        return self.limit - self.steps_taken

    def quota(self) -> Int[Tensor, " B"]:
        """Hidden positions over steps left, rounded up: with it no row needs more steps than it has."""
        left = self.steps_left.clamp(min=1)
        return (self.hidden.sum(1) + left - 1) // left

    def uniform(self, stream: int, *, by_step: bool = True) -> Float[Tensor, "B S"]:
        """One number in [0, 1) per position; the same for a row wherever it stands, whatever its padding."""
        step = self.steps_taken if by_step else torch.zeros_like(self.steps_taken)
        return counter_uniform(self.seed, self.keys[:, None], stream, step[:, None], self.positions)

    def next_blocks(self, block_size: int, least: Int[Tensor, " B"]) -> None:
        """Begin a new block in rows whose block holds fewer than ``least`` hidden positions.

        A block is the next ``block_size`` hidden positions, or ``least`` where that is more.
        """
        hidden = self.hidden
        ended = (hidden & self.block).sum(1) < least
        size = least.clamp(min=block_size)
        begun = hidden & (hidden.long().cumsum(1) <= size[:, None])
        self.block = torch.where(ended[:, None], begun, self.block)
        self.stale = ended

    def fill(self, where: Bool[Tensor, "B S"], tokens: Int[Tensor, " M"]) -> None:
        """Write ``tokens`` to ``where``, in row-major order."""
        self.x[where] = tokens
