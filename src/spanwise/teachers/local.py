"""A teacher in this process: any causal language model of transformers, or the student's own base.

One forward without gradients per batch; memory O(B·T·V) for dense scores, O(B·T·k) beyond the forward for top-k. Padded
positions are scored too and mean nothing.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from spanwise.spans.pack import block_causal_mask, segment_positions
from spanwise.teachers.scores import Form, TeacherScores
from spanwise.teachers.summary import summarise
from spanwise.teachers.teacher import ScoreRequest

logger = logging.getLogger(__name__)


def move_to_gpu(model: Any, *, device_map: Any = None) -> None:
    """Move a loaded model to the GPU, where there is one and nothing else has placed the model.

    A ``device_map`` has, and so has a quantiser that loads onto the GPU: what it made may refuse every ``to``, even one
    to where it lies. A quantised model that was left on the CPU is moved like any other.
    """
    if torch.cuda.is_available() and device_map is None and model.device.type == "cpu":
        model.to("cuda")


def most_positions(model: Any) -> int | None:
    """How many tokens of a row a model has positions for; None where it does not say."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    most: int | None = getattr(text, "max_position_embeddings", None)
    return most


class LocalTeacher:
    """Scores rows with a model that lies in this process.

    Args:
        model: a causal language model; it is put into evaluation mode for the forward and left as it was.
        vocab_size: size of its tokenizer. A wider head is cut to it, once said in the log; a narrower one is refused.
        name: for logs and reports.
        adapters_off: the model is a PEFT student and teaches with its adapters off.
    """

    forms: frozenset[Form] = frozenset({"dense", "topk", "shared", "observed"})

    def __init__(self, model: Any, *, vocab_size: int, name: str = "teacher", adapters_off: bool = False) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.name = name
        self.adapters_off = adapters_off
        self.context_length = most_positions(model)
        head = model.get_output_embeddings()
        width = int(head.weight.shape[0]) if head is not None else vocab_size
        if width < vocab_size:
            raise ValueError(
                f"the head of {name} scores {width:,} tokens and its tokenizer has {vocab_size:,}; expected a head at "
                "least as wide. The model and the tokenizer are probably of two families. "
                "Fix: give the teacher the tokenizer it was trained with."
            )
        if width > vocab_size:
            logger.info("%s: the head scores %d tokens and is cut to the tokenizer's %d", name, width, vocab_size)

    @torch.no_grad()
    def score(self, request: ScoreRequest) -> TeacherScores:
        """Run the model once and cut its logits to what was asked for."""
        logits = self.logits(request)[..., : self.vocab_size]
        if request.shared_ids is not None:
            return TeacherScores(logits=logits).share(request.shared_ids, temperature=request.temperature)
        if request.top_k is not None:
            return summarise(logits, request)
        scores = TeacherScores(logits=logits)
        if request.statistics:
            scores = scores.with_statistics(
                request.input_ids, word_start=request.word_start, temperature=request.temperature
            )
        return scores

    def logits(self, request: ScoreRequest) -> torch.Tensor:
        """The model's own logits [B, T, head width], with gradients off and dropout off."""
        device = next(self.model.parameters()).device
        inputs: dict[str, Any] = {"input_ids": request.input_ids.to(device), "use_cache": False}
        if request.segment_ids is None:
            inputs["attention_mask"] = request.token_mask.to(device)
        else:
            inputs["attention_mask"] = block_causal_mask(request.segment_ids).to(device)
            inputs["position_ids"] = segment_positions(request.segment_ids).to(device)
        was_training = self.model.training
        self.model.eval()
        off = self.model.disable_adapter() if self.adapters_off else contextlib.nullcontext()
        try:
            with off, torch.no_grad():
                logits: torch.Tensor = self.model(**inputs).logits
        finally:
            self.model.train(was_training)
        return logits.to(request.input_ids.device)

    def close(self) -> None:
        """Nothing to free: the model belongs to the caller."""
