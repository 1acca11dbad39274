"""Spanwise trains language models on things that do not match: tokenizers, lengths, modalities.

The names below are the ones most programs need; each room (``spanwise.xtoken``, ``spanwise.dataplane``, …) says the rest.
Importing this package loads torch and numpy; everything heavier is imported by the room that uses it.
"""

from __future__ import annotations

from spanwise.batch import BatchedDataDict, for_trainer
from spanwise.loading import load_model, load_tokenizer
from spanwise.loss_parts import LossParts, Ratio

__version__ = "0.1.0"

__all__ = ["BatchedDataDict", "LossParts", "Ratio", "__version__", "for_trainer", "load_model", "load_tokenizer"]
