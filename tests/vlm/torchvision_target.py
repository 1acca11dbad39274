"""torchvision beside the CPU build of torch, in a folder of its own and for one process only.

Installed into the environment it would change which image processors transformers takes, for every test. Its compiled
operators do not load beside the CPU wheel; the two schemas that its import asks for are declared instead.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

from spanwise.loading import cache_dir

VERSION = "0.28.0"


def installed() -> Path:
    """The folder with torchvision; installed on first use."""
    target = cache_dir() / "torchvision"
    target.mkdir(parents=True, exist_ok=True)
    with (target.parent / "torchvision.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / f"torchvision-{VERSION}.dist-info").is_dir():
            package = f"torchvision=={VERSION}"
            subprocess.run(
                [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), package],
                check=True,
            )
    return target


def put_first() -> None:
    """Make ``import torchvision`` work in this process; before transformers is imported."""
    import torch

    global _library  # it must outlive this call, or the schemas go with it
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.path.insert(0, str(installed()))
