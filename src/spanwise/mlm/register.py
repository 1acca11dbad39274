"""Make transformers' Auto classes know our checkpoints without importing transformers.

If transformers is already imported, the classes are registered at once. Else a finder waits at the front of
``sys.meta_path`` for the module that holds the Auto models, lets it load as always, registers, and steps aside. O(1).
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

AUTO_MODULE = "transformers.models.auto.modeling_auto"
CONFIG_MODULE = "transformers.models.auto.configuration_auto"


def register_config() -> None:
    """Name our configuration to AutoConfig; transformers' model classes may not exist yet."""
    auto: Any = importlib.import_module(CONFIG_MODULE)
    ours: Any = importlib.import_module("spanwise.mlm.hf_config")
    auto.AutoConfig.register(ours.RotaryTransformerConfig.model_type, ours.RotaryTransformerConfig, exist_ok=True)


def register_model() -> None:
    """Name our model to AutoModelForMaskedLM."""
    auto: Any = importlib.import_module(AUTO_MODULE)
    ours: Any = importlib.import_module("spanwise.mlm.hf")
    auto.AutoModelForMaskedLM.register(ours.RotaryTransformerConfig, ours.RotaryTransformerForMaskedLM, exist_ok=True)


REGISTER = {CONFIG_MODULE: register_config, AUTO_MODULE: register_model}


class _RegisteringLoader(Loader):
    """Loads a module as its own loader would, then registers."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        REGISTER[module.__name__]()


class _AutoFinder(MetaPathFinder):
    """Wraps the loader of the Auto modules, once each."""

    def __init__(self) -> None:
        self.waiting = set(REGISTER)

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        self.waiting.discard(fullname)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


def register_when_imported() -> None:
    """Register now what is loaded already, and the rest when it is."""
    finder = _AutoFinder()
    for name, register in REGISTER.items():
        if name in sys.modules:
            finder.waiting.discard(name)
            register()
    if finder.waiting:
        sys.meta_path.insert(0, finder)
