"""Cross-tokenizer distillation: align, project, compare."""

from spanwise.xtoken.aligner import TokenAligner
from spanwise.xtoken.alignment import AlignmentBatch

__all__ = ["AlignmentBatch", "TokenAligner"]
