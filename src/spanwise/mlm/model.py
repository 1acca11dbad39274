"""A bidirectional rotary encoder for masked tokens, which computes no more than it is asked for.

``forward`` returns the logits of every position, padded as the input is. With ``where`` it returns logits of the chosen
positions alone: padding is then never computed (rows are laid end to end) and the head, whose width is the vocabulary,
runs on the chosen rows only. For a vocabulary of 30,000 that is most of the work and nearly all of the memory.
Cost with ``where``: O(N·d²) for N real tokens plus O(M·d·V) for M chosen ones.

Shapes: B rows, S width, N real tokens, M chosen positions, d model width, V vocabulary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from spanwise.mlm.cache import KeyValueCache
from spanwise.mlm.layers import RotaryTransformerFinalLayer, RotaryTransformerLayer
from spanwise.mlm.ragged import plan_rows, ragged_attention

MODEL_TYPE = "spanwise_mlm"


class RotaryTransformerMLMModel(nn.Module):
    """Rotary bidirectional transformer for masked language modelling.

    Args:
        num_embeddings: vocabulary size, special tokens included.
        d_model, num_layers, nhead: sizes.
        padding_idx: its embedding is zero and gets no gradient.
        mask_idx: the id of MASK, kept for whoever loads the checkpoint.
        dim_feedforward: 4·d_model when None.
        dropout: of attention weights and both residual branches, in training only.
        activation: ``"relu"`` or ``"gelu"`` (tanh form).
        rotary_emb_dim: how many channels of each head are rotated; at most d_model / nhead.
        max_length: positions run from 0 to max_length - 1.
        force_flash_attn: allow torch no other attention kernel than flash.
        use_flex_attn: accepted for recipes of the reference; segments are exact on every device without it.
        final_layer_without_normalization: leave out the last norm.

    >>> model = RotaryTransformerMLMModel(20, 16, 1, 2, rotary_emb_dim=8).eval()
    >>> model(torch.tensor([[5, 1, 6]])).shape
    torch.Size([1, 3, 20])
    >>> model(torch.tensor([[5, 1, 6]]), where=torch.tensor([[False, True, False]])).shape
    torch.Size([1, 20])
    """

    takes_where = True

    def __init__(
        self,
        num_embeddings: int,
        d_model: int,
        num_layers: int,
        nhead: int,
        padding_idx: int = 0,
        mask_idx: int = 1,
        dim_feedforward: int | None = None,
        dropout: float = 0.1,
        activation: str = "relu",
        layer_norm_eps: float = 1e-5,
        rotary_emb_dim: int = 64,
        max_length: int = 1024,
        force_flash_attn: bool = False,
        use_flex_attn: bool = False,
        final_layer_without_normalization: bool = False,
    ) -> None:
        super().__init__()
        self._build({name: value for name, value in locals().items() if name not in ("self", "__class__")})

    def _build(self, arguments: dict[str, Any]) -> None:
        """Make the modules from the constructor's arguments; also called by the transformers twin of this class."""
        d_model, nhead, rotary = arguments["d_model"], arguments["nhead"], arguments["rotary_emb_dim"]
        _check_sizes(d_model, arguments["num_layers"], nhead, rotary)
        if not 0 <= arguments["padding_idx"] < arguments["num_embeddings"]:
            raise ValueError(
                f"padding_idx={arguments['padding_idx']} was given with num_embeddings={arguments['num_embeddings']}; "
                "expected an id of the vocabulary. Tokens were probably added to the tokenizer and not counted. "
                "Fix: pass num_embeddings=len(tokenizer)."
            )
        self.arguments = dict(arguments)
        self.padding_idx: int = arguments["padding_idx"]
        self.mask_idx: int = arguments["mask_idx"]
        self.max_length: int = arguments["max_length"]
        self.num_embeddings: int = arguments["num_embeddings"]
        self.force_flash_attn: bool = arguments["force_flash_attn"]
        self.embed_tokens = nn.Embedding(self.num_embeddings, d_model, padding_idx=self.padding_idx)
        self.encoder = nn.ModuleList(
            RotaryTransformerLayer(
                d_model,
                nhead,
                arguments["dim_feedforward"] or 4 * d_model,
                arguments["dropout"],
                arguments["activation"],
                arguments["layer_norm_eps"],
                rotary,
            )
            for _ in range(arguments["num_layers"])
        )
        self.output_layer = RotaryTransformerFinalLayer(
            d_model,
            self.num_embeddings,
            arguments["layer_norm_eps"],
            not arguments["final_layer_without_normalization"],
        )

    def forward(
        self,
        x_t: Int[Tensor, "*batch S"],
        attention_mask: Tensor | None = None,
        positions: Int[Tensor, "*batch S"] | None = None,
        token_type_ids: Tensor | None = None,
        *,
        segment_ids: Int[Tensor, "*batch S"] | None = None,
        where: Bool[Tensor, "*batch S"] | None = None,
    ) -> Float[Tensor, "*shape V"]:
        """Logits of every position, [*batch, S, V], or with ``where`` of the chosen ones, [M, V] in row-major order.

        Args:
            x_t: token ids.
            attention_mask: non-zero = attend. [*batch, S] speaks of keys, [*batch, S, S] of query × key. None: all.
            positions: rotary positions; None counts the attended tokens of each row (of each segment) from 0.
            token_type_ids: accepted and unused: this model has no token types.
            segment_ids: packed rows; tokens attend within their segment only, 0 is padding.
            where: choose positions. All of them must be attended where the mask is per key, since others are not run.
        """
        batch_shape, width = x_t.shape[:-1], x_t.shape[-1]
        ids = x_t.reshape(-1, width)
        mask = (
            None
            if attention_mask is None
            else attention_mask.reshape(len(ids), *attention_mask.shape[len(batch_shape) :])
        )
        segments = None if segment_ids is None else segment_ids.reshape(-1, width)
        real = real_tokens(ids, mask, segments)
        place = count_positions(real, segments) if positions is None else positions.reshape(-1, width)
        check_ids(ids, self.num_embeddings)
        if positions is not None or width > self.max_length:
            check_positions(place, self.max_length)
        if where is not None and (mask is None or mask.ndim == 2):
            return self._ragged(ids, real, place, segments, where.reshape(-1, width))
        logits = self._dense(ids, mask, place, segments, where)
        return logits if where is not None else logits.reshape(*batch_shape, *logits.shape[1:])

    def _ragged(self, ids: Tensor, real: Tensor, place: Tensor, segments: Tensor | None, where: Tensor) -> Tensor:
        if bool((where & ~real).any()):
            raise ValueError(
                f"{int((where & ~real).sum())} of the positions asked for are padding (attention_mask is 0 there); "
                "expected attended positions only, since padding is not computed. The batch was probably collated with "
                "targets on padding. Fix: collate with loss_on_padding=False, or MLMLoss(loss_on_padding=True)."
            )
        plan = plan_rows(real, segments)
        dropout = self._attention_dropout()

        def attend(layer: int, qkv: Tensor) -> Tensor:
            return ragged_attention(qkv, plan, dropout)

        laid = torch.empty(ids.numel(), dtype=torch.long, device=ids.device)
        laid[plan.source] = torch.arange(len(plan.source), device=ids.device)
        chosen = laid[where.flatten().nonzero().squeeze(1)]
        return self._logits(ids.flatten()[plan.source], place.flatten()[plan.source], attend, chosen)

    def _dense(
        self, ids: Tensor, mask: Tensor | None, place: Tensor, segments: Tensor | None, where: Tensor | None
    ) -> Tensor:
        attend_mask = _dense_mask(mask, segments)
        dropout = self._attention_dropout()

        def attend(layer: int, qkv: Tensor) -> Tensor:
            return _padded_attention(qkv, attend_mask, dropout)

        return self._logits(ids, place, attend, None if where is None else where.reshape(ids.shape))

    def refresh(
        self,
        ids: Int[Tensor, "b S"],
        positions: Int[Tensor, "b S"],
        where: Bool[Tensor, "b S"],
        cache: KeyValueCache,
        rows: Int[Tensor, " b"],
    ) -> Float[Tensor, "M V"]:
        """Run ``rows`` whole, keep their keys and values, and return the logits of ``where``."""
        mask = None if cache.whole else _dense_mask(cache.attention_mask[rows, :-1], None)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            cache.store(layer, rows, qkv)
            return _padded_attention(qkv, mask, 0.0)

        return self._logits(ids, positions, attend, where)

    def continue_block(
        self,
        ids: Int[Tensor, "b k"],
        positions: Int[Tensor, "b k"],
        columns: Int[Tensor, "b k"],
        where: Bool[Tensor, "b k"],
        cache: KeyValueCache,
        rows: Int[Tensor, " b"],
    ) -> Float[Tensor, "M V"]:
        """Run only ``columns`` of ``rows`` against what ``cache`` keeps; the logits of ``where`` among them."""

        def attend(layer: int, qkv: Tensor) -> Tensor:
            return cache.attend(layer, rows, columns, qkv)

        return self._logits(ids, positions, attend, where)

    def _logits(
        self, ids: Tensor, positions: Tensor, attend: Callable[[int, Tensor], Tensor], chosen: Tensor | None
    ) -> Tensor:
        """The layers and the head. Nobody reads the last layer but where logits are asked for: there alone it ends."""
        x, rotation = self.embed_tokens(ids), self._rotation(positions)
        last = len(self.encoder) - 1
        with self._kernel():
            for index, layer in enumerate(self.encoder):
                x = layer(x, rotation, partial(attend, index), chosen if index == last else None)
        logits: Tensor = self.output_layer(x)
        return logits

    def get_named_params_for_weight_decay(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter but biases and norms."""
        return ((name, p) for name, p in self.named_parameters() if "bias" not in name and "norm" not in name)

    def get_named_params_for_no_weight_decay(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Biases and norms."""
        return ((name, p) for name, p in self.named_parameters() if "bias" in name or "norm" in name)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write ``config.json`` and ``model.safetensors``; the folder is made when missing."""
        from safetensors.torch import save_file

        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        config = {"model_type": MODEL_TYPE, "architectures": ["RotaryTransformerForMaskedLM"], **self.arguments}
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> RotaryTransformerMLMModel:
        """The model saved in ``folder``, in evaluation mode. ValueError where it is no such checkpoint."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = Path(folder)
        if not (path / "config.json").is_file() or not (path / "model.safetensors").is_file():
            raise ValueError(
                f"'{folder}' holds no config.json with model.safetensors; expected a folder made by save_pretrained. "
                "The path is probably misspelt or names the run instead of its checkpoint. Fix: check it with ls."
            )
        config = json.loads((path / "config.json").read_text())
        if config.get("model_type") != MODEL_TYPE:
            raise ValueError(
                f"'{folder}' is a checkpoint of type {config.get('model_type')!r}; expected {MODEL_TYPE!r}. It was "
                "probably made by another model. Fix: load it with spanwise.mlm.load_masked_lm."
            )
        names = set(RotaryTransformerMLMModel.__init__.__annotations__) - {"return"}
        try:
            model = cls(**{name: value for name, value in config.items() if name in names})
            model.load_state_dict(load_file(path / "model.safetensors"))
        except (RuntimeError, TypeError, SafetensorError) as error:
            raise ValueError(
                f"the weights in '{folder}' do not fit its config.json ({str(error).splitlines()[-1].strip()}); "
                "expected the two to be saved together. The checkpoint is probably of another vocabulary or size, or "
                "was not copied whole. Fix: use the config.json that was saved with these weights, or copy it again."
            ) from error
        return model.eval()

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        first: Any = self.encoder[0]  # ModuleList yields plain Modules
        cos, sin = first.rotary_emb(positions)
        return cos, sin

    def _attention_dropout(self) -> float:
        return float(self.arguments["dropout"]) if self.training else 0.0

    def _kernel(self) -> Any:
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION]) if self.force_flash_attn else nullcontext()


def check_ids(ids: Int[Tensor, "..."], num_embeddings: int) -> None:
    """Refuse ids that have no embedding. Not asked on a GPU, where the answer would have to be waited for."""
    if ids.is_cuda or ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= num_embeddings:
        raise ValueError(
            f"token ids run from {low} to {high}; expected 0 to {num_embeddings - 1} (the model has {num_embeddings} "
            "embeddings). The rows were probably made with another tokenizer. Fix: tokenize them with the tokenizer "
            "that was saved with the model."
        )


def check_positions(positions: Int[Tensor, "..."], max_length: int) -> None:
    """Refuse positions that the model does not know."""
    if positions.numel() == 0:
        return
    low, high = int(positions.min()), int(positions.max())
    if low < 0 or high >= max_length:
        raise ValueError(
            f"positions run from {low} to {high}; expected 0 to {max_length - 1} (max_length is {max_length}). The "
            "rows, or prompt plus new tokens, are probably longer than the model. Fix: shorten them, or use a model "
            "with a larger max_length."
        )


def count_positions(real: Bool[Tensor, "B S"], segment_ids: Int[Tensor, "B S"] | None = None) -> Int[Tensor, "B S"]:
    """The place of each attended token among the attended ones of its row (of its segment); 0 on padding.

    >>> count_positions(torch.tensor([[False, True, True]])).tolist()
    [[0, 0, 1]]
    """
    count = (real.long().cumsum(1) - 1).clamp(min=0)
    if segment_ids is not None:
        starts = torch.ones_like(real)
        starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
        count = count - torch.where(starts, count, 0).cummax(1).values
    return count * real


def real_tokens(ids: Int[Tensor, "B S"], mask: Tensor | None, segments: Tensor | None) -> Bool[Tensor, "B S"]:
    """Which tokens are attended by any other, as mask ([B, S] or [B, S, S]) and segments (0 is padding) say."""
    if mask is None:
        real = torch.ones_like(ids, dtype=torch.bool) if segments is None else segments > 0
    elif mask.ndim == 2:
        real = mask != 0
    elif mask.ndim == 3:
        real = (mask != 0).any(1)
    else:
        raise ValueError(
            f"attention_mask has {mask.ndim} dimensions after flattening the batch; expected 2 (keys) or 3 (query × "
            "key). It was probably made for a model that takes [B, 1, S, S]. Fix: drop the dimension of heads."
        )
    return real if segments is None else real & (segments > 0)


def _dense_mask(mask: Tensor | None, segments: Tensor | None) -> Tensor | None:
    """[B, 1, S or 1, S], True = attend. A query with nothing to see sees everything, which keeps its row finite."""
    allowed = None if mask is None else (mask != 0)
    if allowed is not None and allowed.ndim == 2:
        allowed = allowed[:, None, :]
    if segments is not None:
        same = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, None, :]
        allowed = same if allowed is None else same & allowed
    if allowed is None or bool(allowed.all()):
        return None
    return (allowed | ~allowed.any(-1, keepdim=True)).unsqueeze(1)


def _padded_attention(qkv: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """[B, S, 3, H, D] → [B, S, H, D]."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout).transpose(1, 2)


def _check_sizes(d_model: int, num_layers: int, nhead: int, rotary_emb_dim: int) -> None:
    if num_layers < 1:
        raise ValueError(
            f"num_layers={num_layers} was given; expected at least 1, since without a layer no token sees another. "
            "The number was probably lost in a configuration. Fix: pass num_layers=4."
        )
    if nhead < 1 or d_model % nhead:
        raise ValueError(
            f"d_model={d_model} does not divide into nhead={nhead} heads; expected a multiple. One of the two was "
            "probably changed alone. Fix: choose d_model as a multiple of nhead."
        )
    if rotary_emb_dim > d_model // nhead or rotary_emb_dim % 2:
        raise ValueError(
            f"rotary_emb_dim={rotary_emb_dim} was given for heads of {d_model // nhead} channels; expected an even "
            "number of at most that many. The default of 64 probably met small heads. "
            f"Fix: pass rotary_emb_dim={d_model // nhead // 2 * 2}."
        )
