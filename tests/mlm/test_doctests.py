"""The examples in the docstrings of this room."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import spanwise.mlm

# hf holds no examples, and doctest would look into the lazy members of its transformers classes.
MODULES = [m.name for m in pkgutil.iter_modules(spanwise.mlm.__path__, "spanwise.mlm.") if not m.name.endswith(".hf")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
