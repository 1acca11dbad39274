"""The parts of the rotary encoder, named so that checkpoints of the reference load key for key.

A layer works on any leading shape: [B, S, d] with padding or [N, d] without. Who attends to whom is a function that the
model passes in, so the same weights serve padded, ragged and cached attention. Cost per token: 12·d² multiplications
with the default feed-forward width, plus attention.

Shapes: "..." leading dimensions (B S, or N), d model width, H heads, D head width, R rotated part of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import dropout as drop

Rotation = tuple[Tensor, Tensor]
Attend = Callable[[Tensor], Tensor]
ROTARY_BASE = 10000.0


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions, computed where they are needed: nothing to store but the frequencies."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", 1.0 / ROTARY_BASE ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, positions: Int[Tensor, "..."]) -> Rotation:
        """Cosines and sines, each [..., 1, R/2], ready to broadcast over heads."""
        angles = positions[..., None, None].to(self.inv_freq.dtype) * self.inv_freq
        return angles.cos(), angles.sin()


def rotate(x: Float[Tensor, "... D"], rotation: Rotation) -> Float[Tensor, "... D"]:
    """Rotate the first R of D channels by halves (not interleaved); the rest passes."""
    cos, sin = (part.to(x.dtype) for part in rotation)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def activation_module(name: str) -> nn.Module:
    """``relu``, or ``gelu`` in its tanh form."""
    if name == "relu":
        return nn.ReLU(inplace=True)  # its backward reads the result alone
    if name == "gelu":
        return nn.GELU(approximate="tanh")
    raise ValueError(
        f"activation={name!r} was given; expected 'relu' or 'gelu' (the tanh form). The name is probably of another "
        "library. Fix: pass one of the two."
    )


class RotaryTransformerLayer(nn.Module):
    """Pre-norm: attention with rotary positions, then two linear layers; both with residuals."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int,
        dropout: float,
        activation: str,
        layer_norm_eps: float,
        rotary_emb_dim: int,
    ) -> None:
        super().__init__()
        self.heads = nhead
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps)
        self.attn_qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, dim_feedforward), activation_module(activation), nn.Linear(dim_feedforward, d_model)
        )
        self.rotary_emb = RotaryEmbedding(rotary_emb_dim)

    def forward(
        self, x: Float[Tensor, "... d"], rotation: Rotation, attend: Attend, keep: Tensor | None = None
    ) -> Float[Tensor, "*kept d"]:
        """``attend`` maps qkv [..., 3, H, D] (rotated) to [..., H, D].

        ``keep`` indexes the leading dimensions: everything is attended to, and only these positions go on.
        """
        qkv = self.attn_qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        cos, sin = rotation
        turned = rotate(qkv[..., :2, :, :], (cos.unsqueeze(-3), sin.unsqueeze(-3)))
        attended = attend(torch.cat([turned, qkv[..., 2:, :, :]], dim=-3)).flatten(-2)
        if keep is not None:
            x, attended = x[keep], attended[keep]
        x = x + self._drop(self.o_proj(attended))
        return x + self._drop(self.mlp(self.norm2(x)))

    def _drop(self, x: Tensor) -> Tensor:
        # In place: x is what a projection returned, and its backward does not read that.
        return drop(x, self.dropout, training=self.training, inplace=True) if self.dropout else x


class RotaryTransformerFinalLayer(nn.Module):
    """An optional norm and the untied head."""

    def __init__(self, d_model: int, num_embeddings: int, layer_norm_eps: float, use_final_layer_norm: bool) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(d_model, eps=layer_norm_eps) if use_final_layer_norm else None
        self.linear = nn.Linear(d_model, num_embeddings, bias=False)

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... V"]:
        """Logits."""
        logits: Tensor = self.linear(x if self.norm_final is None else self.norm_final(x))
        return logits
