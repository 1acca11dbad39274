"""Which model scored: a fingerprint of its architecture and of every weight.

O(weights) time, once per cache (about 1 GB/s); memory of one tensor at a time.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

# What a configuration says about the file it came from, not about the function it describes.
INCIDENTAL = ("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "_attn_implementation")


def model_fingerprint(model: Any) -> str:
    """The same for equal weights and configuration, wherever they were loaded from; another one for any change.

    Args:
        model: any ``torch.nn.Module``; a ``config`` with ``to_dict`` is read too. Dtype counts: a model scores
            differently in bfloat16 than in float32.
    """
    digest = hashlib.sha256()
    config = getattr(model, "config", None)
    if config is not None:
        described = {key: value for key, value in config.to_dict().items() if key not in INCIDENTAL}
        digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:32]
