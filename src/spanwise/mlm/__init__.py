"""Masked and masked-diffusion language models: train, sample, measure."""

from spanwise.mlm.backbones import BidirectionalCausalLM, LogitsShiftBy1, MaskedLMBackbone, as_mlm_model, load_masked_lm
from spanwise.mlm.collators import (
    DefaultInfillMLMCollator,
    DefaultMLMCollator,
    MLMInfillWithExactTargetPredCollator,
    PackedMLMCollator,
)
from spanwise.mlm.datasets import (
    MLMEmptyDataset,
    MLMEmptyDatasetFromLengthRef,
    PaplUnconditionalCollator,
    PaplUnconditionalMLMDataset,
)
from spanwise.mlm.history import HistoryInMemory, HistoryPluginBase, HistoryTopKPlugin
from spanwise.mlm.likelihood import GenerativePerplexity, LikelihoodBound, generative_perplexity, nelbo
from spanwise.mlm.loss import MLMLoss
from spanwise.mlm.metrics import exact_match, seq2seq_exact_match, seq2seq_token_accuracy, token_accuracy
from spanwise.mlm.model import RotaryTransformerMLMModel
from spanwise.mlm.noise import CosineNoiseSchedule, DummyNoiseSchedule, LogLinearNoiseSchedule, NoiseSchedule
from spanwise.mlm.predictor import MLMPredictor
from spanwise.mlm.register import register_when_imported
from spanwise.mlm.seq2seq import MLMSeq2SeqCollator, MLMSeq2SeqPredCollator, MLMSeq2SeqTrainCollator
from spanwise.mlm.types import (
    MLMBatch,
    MLMLossDict,
    MLMModel,
    MLMPredictionDict,
    MLMSeq2SeqPredictionBatch,
    MLMStepResults,
    MLMUnconditionalPredictionBatch,
    MLMUncondtionalPredictionBatch,
    PackedFlexMLMBatch,
)

__all__ = [
    "BidirectionalCausalLM",
    "CosineNoiseSchedule",
    "DefaultInfillMLMCollator",
    "DefaultMLMCollator",
    "DummyNoiseSchedule",
    "GenerativePerplexity",
    "HistoryInMemory",
    "HistoryPluginBase",
    "HistoryTopKPlugin",
    "LikelihoodBound",
    "LogLinearNoiseSchedule",
    "LogitsShiftBy1",
    "MLMBatch",
    "MLMEmptyDataset",
    "MLMEmptyDatasetFromLengthRef",
    "MLMInfillWithExactTargetPredCollator",
    "MLMLoss",
    "MLMLossDict",
    "MLMModel",
    "MLMPredictionDict",
    "MLMPredictor",
    "MLMSeq2SeqCollator",
    "MLMSeq2SeqPredCollator",
    "MLMSeq2SeqPredictionBatch",
    "MLMSeq2SeqTrainCollator",
    "MLMStepResults",
    "MLMUnconditionalPredictionBatch",
    "MLMUncondtionalPredictionBatch",
    "MaskedLMBackbone",
    "NoiseSchedule",
    "PackedFlexMLMBatch",
    "PackedMLMCollator",
    "PaplUnconditionalCollator",
    "PaplUnconditionalMLMDataset",
    "RotaryTransformerMLMModel",
    "as_mlm_model",
    "exact_match",
    "generative_perplexity",
    "load_masked_lm",
    "nelbo",
    "seq2seq_exact_match",
    "seq2seq_token_accuracy",
    "token_accuracy",
]

register_when_imported()
