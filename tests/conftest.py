"""Fixtures that every room uses: real tokenizers, tiny ones trained here, the real teacher."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from jaxtyping import install_import_hook

hook = install_import_hook("spanwise", "beartype.beartype")
hook.__enter__()

from functools import cache

import pytest
import torch
from _pytest.nodeid import coerce_node_id
from hypothesis import HealthCheck, settings
from transformers import PreTrainedTokenizerBase

from spanwise.loading import BUILTIN_SMOLLM2, load_tokenizer
from tests import tiny_tokenizers
from tests.fetch import tokenizer_folder
from tests.ray_cluster import ray_cluster

__all__ = ["ray_cluster"]

torch.set_num_threads(1)
settings.register_profile("spanwise", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("spanwise")


@cache
def real_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A fetched tokenizer by its short name (``qwen3``, ``llama2``, …) or ``smollm2``. Shared: do not mutate."""
    if name == "smollm2":
        return load_tokenizer(BUILTIN_SMOLLM2)
    folder = tokenizer_folder(name)
    if not folder.is_dir():
        pytest.fail(f"tokenizer {name} is not in the cache. Fix: .venv/bin/python tests/fetch.py --all")
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> PreTrainedTokenizerBase:
    return real_tokenizer("smollm2")


@pytest.fixture(scope="session")
def byte_bpe() -> PreTrainedTokenizerBase:
    return tiny_tokenizers.byte_level_bpe()


@pytest.fixture(scope="session")
def sentencepiece_bpe() -> PreTrainedTokenizerBase:
    return tiny_tokenizers.sentencepiece_bpe()


@pytest.fixture(scope="session")
def unigram() -> PreTrainedTokenizerBase:
    return tiny_tokenizers.unigram()


@pytest.fixture(scope="session")
def wordpiece() -> PreTrainedTokenizerBase:
    return tiny_tokenizers.wordpiece()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep ``xdist_group`` working: xdist 3.8 names a group in an attribute that pytest 9.2 no longer reads."""
    if not getattr(config.option, "loadgroup", False):
        return

    for item in items:
        groups = sorted({str(mark.args[0]) for mark in item.iter_markers("xdist_group")})
        if groups and not item.nodeid.endswith(f"@{groups[0]}"):
            item._id = coerce_node_id(f"{item.nodeid}@{'_'.join(groups)}")
