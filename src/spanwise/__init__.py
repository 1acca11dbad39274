"""Spanwise trains language models on things that do not match: tokenizers, lengths, modalities.

The names below are the ones most programs need; each room says the rest:

- ``spanwise.xtoken``: align two tokenizers, collate, project, and the losses
- ``spanwise.teachers``: scores from a model here, a cache on disk, a server, another process
- ``spanwise.dataplane``: ragged batches between threads, processes and machines
- ``spanwise.vlm``: vision-language collation · ``spanwise.mlm``: masked and masked-diffusion models
- ``spanwise.train``: recipes, the trainer, evaluation

Importing this package loads torch and numpy; everything heavier is imported where it is used.
"""

from __future__ import annotations

from spanwise.batch import BatchedDataDict, for_trainer, model_inputs
from spanwise.loading import load_model, load_tokenizer
from spanwise.loss_parts import LossParts, Ratio
from spanwise.teachers.scores import TeacherScores
from spanwise.xtoken import AlignmentBatch, CrossTokenizerCollator, TokenAligner

__version__ = "0.1.0"

__all__ = [
    "AlignmentBatch",
    "BatchedDataDict",
    "CrossTokenizerCollator",
    "LossParts",
    "Ratio",
    "TeacherScores",
    "TokenAligner",
    "__version__",
    "for_trainer",
    "load_model",
    "load_tokenizer",
    "model_inputs",
]
