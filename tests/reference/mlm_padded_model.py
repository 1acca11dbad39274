"""The rotary encoder written out in plain tensor code from a state dict: padded, every position, nothing clever."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional


def padded_logits(
    weights: Mapping[str, Tensor],
    ids: Tensor,
    allowed: Tensor,
    positions: Tensor,
    *,
    heads: int,
    rotated: int,
    activation: str,
) -> Tensor:
    """Logits [B, S, V]; ``allowed`` is bool [B, S, S], query × key, with at least one key per query."""
    x = weights["embed_tokens.weight"][ids]
    layer = 0
    while f"encoder.{layer}.norm1.weight" in weights:
        name = f"encoder.{layer}."
        normed = _norm(x, weights, f"{name}norm1")
        x = x + _attention(normed, weights, name, allowed, positions, heads, rotated)
        hidden = _norm(x, weights, f"{name}norm2") @ weights[f"{name}mlp.0.weight"].T + weights[f"{name}mlp.0.bias"]
        hidden = functional.relu(hidden) if activation == "relu" else functional.gelu(hidden, approximate="tanh")
        x = x + hidden @ weights[f"{name}mlp.2.weight"].T + weights[f"{name}mlp.2.bias"]
        layer += 1
    if "output_layer.norm_final.weight" in weights:
        x = _norm(x, weights, "output_layer.norm_final")
    return x @ weights["output_layer.linear.weight"].T


def _norm(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _attention(
    x: Tensor, weights: Mapping[str, Tensor], name: str, allowed: Tensor, positions: Tensor, heads: int, rotated: int
) -> Tensor:
    query, key, value = (x @ weights[f"{name}attn_qkv.weight"].T).chunk(3, dim=-1)
    size = x.shape[-1] // heads
    out = []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        q, k = (_rotate(side[..., part], positions, rotated) for side in (query, key))
        scores = q @ k.transpose(1, 2) / math.sqrt(size)
        scores = scores.masked_fill(~allowed, float("-inf"))
        out.append(scores.softmax(-1) @ value[..., part])
    return torch.cat(out, -1) @ weights[f"{name}o_proj.weight"].T


def _rotate(x: Tensor, positions: Tensor, rotated: int) -> Tensor:
    half = rotated // 2
    out = x.clone()
    for channel in range(half):
        angle = positions.float() * 10000.0 ** (-2 * channel / rotated)
        first, second = x[..., channel], x[..., channel + half]
        out[..., channel] = first * angle.cos() - second * angle.sin()
        out[..., channel + half] = second * angle.cos() + first * angle.sin()
    return out
