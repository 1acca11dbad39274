"""What a sharded model (FSDP2) needs beyond accelerate when its ranks do not run the same parts of it.

A vision tower runs where a batch has media, so a tower sharded layer by layer would be gathered by some ranks while
the others wait for it, and its gradients be reduced by some alone. Ours belongs to the root, which every forward
gathers on every rank, and where one rank has media the others give the tower gradients of zero: no row gets an image
that it does not have, and the numbers are those of one process. Costs the tower's weights whole from forward to
backward, and one number reduced per micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP has spread the parameters."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def shard_by_decoder_layers(plugin: Any, model: Any) -> None:
    """Have accelerate shard a model by the layers of its decoder; everything else stays with the root.

    Args:
        plugin: accelerate's FSDP plugin. Classes that the user named are left as they are.
        model: not prepared yet; its decoder may be a part of it.
    """
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    if plugin.transformer_cls_names_to_wrap is not None or not callable(getattr(bare, "get_decoder", None)):
        return
    inside = {type(module).__name__ for module in bare.get_decoder().modules()}
    layers = sorted(inside & set(bare._no_split_modules or ()))
    if layers:
        plugin.transformer_cls_names_to_wrap = layers


def zero_for_all(model: nn.Module, *, has_media: bool) -> Tensor | float:
    """0, to be added to a loss after the forward; every rank must ask in every micro-batch.

    Where any rank has media, it reaches every parameter that the root has gathered, so that all ranks have gradients
    for the same ones. Where none has, it reaches nothing: an optimizer tells zeros from gradients that are not there.
    """
    if not is_sharded(model):
        return 0.0
    gathered = [one for one in model.parameters() if one.requires_grad and not isinstance(one, DTensor)]
    wanted = torch.tensor(float(has_media), device=next(model.parameters()).device)
    torch.distributed.all_reduce(wanted, torch.distributed.ReduceOp.MAX)
    if not wanted or not gathered:
        return 0.0
    # One value each: a sum over all of them could overflow in half precision, and infinity times zero is no zero.
    return torch.stack([one.flatten()[0].float() for one in gathered]).sum() * 0.0
