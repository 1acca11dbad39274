"""Keys and values of one generation, kept per block of positions that are being filled.

At the start of a block the whole row is run once and its keys and values are kept. While the block is filled only its
columns, first to last, (``dual``) or everything from its first column on (``prefix``) are run again, against what was
kept. This is an approximation: kept entries do not see what the block becomes. It costs nothing measurable where the
answer follows a prompt; where given tokens behind the block matter (sudoku), ``dual`` loses rows and ``prefix`` does
not. The predictor owns the object; it lives as long as one call. O(layers · B · S · d) memory.

Shapes: B rows, S width, b rows of one call, k columns, H heads, D head width.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class KeyValueCache:
    """Rotated keys and values of every layer, [B, S + 1, H, D]; the last column swallows what padding writes."""

    def __init__(self, attention_mask: Bool[Tensor, "B S"]) -> None:
        self.layers: list[Tensor] = []
        self.whole = bool(attention_mask.all())
        self.attention_mask = torch.cat([attention_mask, attention_mask.new_zeros(len(attention_mask), 1)], dim=1)

    def store(self, layer: int, rows: Int[Tensor, " b"], qkv: Float[Tensor, "b S 3 H D"]) -> None:
        """Keep what a full pass computed for ``rows``."""
        kept = qkv[:, :, 1:]
        if layer == len(self.layers):
            self.layers.append(kept.new_zeros(len(self.attention_mask), kept.shape[1] + 1, *kept.shape[2:]))
        self.layers[layer][rows, :-1] = kept

    def attend(
        self, layer: int, rows: Int[Tensor, " b"], columns: Int[Tensor, "b k"], qkv: Float[Tensor, "b k 3 H D"]
    ) -> Float[Tensor, "b k H D"]:
        """Put the new keys and values in their columns and attend from them to everything kept."""
        self.layers[layer][rows[:, None], columns] = qkv[:, :, 1:]
        width = -1 if self.whole else None
        key, value = self.layers[layer][rows, :width].permute(2, 0, 3, 1, 4)
        mask = None if self.whole else self.attention_mask[rows][:, None, None, :]
        query = qkv[:, :, 0].transpose(1, 2)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
