"""Cross-tokenizer distillation: align, project, compare."""

from spanwise.xtoken.aligner import TokenAligner
from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.collator import CrossTokenizerCollator

__all__ = ["AlignmentBatch", "CrossTokenizerCollator", "TokenAligner"]
