"""The student: any causal language model, from anywhere, ready to be trained and saved.

A GGUF file is dequantised by a clone (``loading``); a mapping of configuration fields gives random weights; a PEFT
section puts adapters on. The tokenizer's size and the head's are compared before anything else happens.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from spanwise.loading import load_model, load_tokenizer
from spanwise.teachers.local import most_positions
from spanwise.train.data import readable, row_kind, turn_text
from spanwise.train.model_config import model_config
from spanwise.train.recipe import Student, TokenizerFromCorpus

logger = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
TOKENIZER_FOLDER = "tokenizer"


def student_tokenizer(student: Student, folder: Path, texts: Iterable[str]) -> Any:
    """The student's tokenizer; one that is trained from the corpus is kept in the run's folder and reused on resume."""
    if isinstance(student.tokenizer, TokenizerFromCorpus):
        kept = folder / TOKENIZER_FOLDER
        if kept.is_dir():
            return load_tokenizer(kept)
        return _trained_tokenizer(texts, student.tokenizer.vocab_size, kept)
    source = student.tokenizer or student.model
    if not isinstance(source, str):
        raise ValueError(
            "student.model is a configuration and student.tokenizer is not given; expected a tokenizer, since a "
            "configuration brings none. Fix: set student.tokenizer to a name or a folder, or to {vocab_size: 2048} to "
            "train one on the corpus."
        )
    return load_tokenizer(source)


def _trained_tokenizer(texts: Iterable[str], vocab_size: int, kept: Path) -> Any:
    """Train one; the first rank keeps it, complete or not at all. The others make the same one and write nothing."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    first = int(os.environ.get("RANK", "0")) == 0
    with tempfile.TemporaryDirectory(dir=kept.parent if first else None, prefix=".tokenizer-") as staging:
        complete = Path(staging, kept.name)
        train_byte_bpe(texts, vocab_size).save_pretrained(complete)
        return load_tokenizer(complete.rename(kept) if first else complete)


def train_byte_bpe(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE trained on texts: GPT-2's kind, with an end-of-text token that also pads.

    >>> len(train_byte_bpe(["a b a b a b"], 300)) <= 300
    True
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


def student_model(student: Student, tokenizer: Any) -> Any:
    """The model to be trained, adapters on where the recipe says so."""
    if isinstance(student.model, str):
        model: Any = load_model(student.model, dtype=DTYPES[student.dtype], **student.options)
    else:
        model = fresh_model(student.model, tokenizer, student.dtype)
    check_head(model, tokenizer)
    if student.peft is None:
        return model
    fields = dict(student.peft)
    if student.embedding_learning_rate is not None:
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        trained = [model.get_input_embeddings()] + ([] if tied else [model.get_output_embeddings()])
        names = [name.split(".")[-1] for name, part in model.named_modules() if any(part is one for one in trained)]
        fields |= {"modules_to_save": names, "ensure_weight_tying": tied}
    return with_adapters(model, fields)


def fresh_model(fields: dict[str, Any], tokenizer: Any, dtype: str = "float32") -> Any:
    """Random weights from configuration fields; vocabulary and special ids default to the tokenizer's."""
    from transformers import AutoModelForCausalLM

    defaults = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return AutoModelForCausalLM.from_config(model_config(fields, defaults), dtype=DTYPES[dtype])


def check_head(model: Any, tokenizer: Any, whose: str = "the student") -> None:
    """Refuse a head narrower than the tokenizer; say once that a wider one is cut."""
    width, size = int(model.get_output_embeddings().weight.shape[0]), len(tokenizer)
    if width < size:
        raise ValueError(
            f"{whose}'s head scores {width:,} tokens and its tokenizer has {size:,}; expected a head at least as "
            "wide. The tokenizer is probably another model's. Fix: use the model's own tokenizer, or move the model "
            "onto this one first: spanwise swap MODEL TOKENIZER -o OUT."
        )
    if width > size:
        logger.info("%s's head scores %d tokens and is cut to the tokenizer's %d", whose, width, size)


def check_context(model: Any, length: int) -> None:
    """Refuse rows that are longer than the model has positions for."""
    most = most_positions(model)
    if most is not None and length > most:
        raise ValueError(
            f"data.context_length is {length:,} and the student has {most:,} positions; expected rows that fit. One of "
            f"them was probably left at its default. Fix: set data.context_length to {most} or less, or give the "
            "student more positions (student.options.max_position_embeddings, student.model.max_position_embeddings)."
        )


def with_adapters(model: Any, fields: dict[str, Any]) -> Any:
    """Put LoRA adapters on a model."""
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "student.peft is set and the package peft is not installed. Fix: pip install 'spanwise[peft]'."
        ) from error
    try:
        config = LoraConfig(task_type="CAUSAL_LM", **fields)
    except TypeError as error:
        raise ValueError(
            f"student.peft has a field that peft.LoraConfig does not know ({error}); expected its fields, as r, "
            "lora_alpha, target_modules. Fix: see the documentation of peft.LoraConfig."
        ) from error
    try:
        adapted: Any = get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(
            f"student.peft does not fit the student ({str(error).splitlines()[0]}); expected modules that it has. The "
            "names are probably another family's. Fix: target_modules: all-linear, or names of its linear layers."
        ) from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            # Half-precision weights lose small updates; what is trained is kept in float32 (autocast computes in half).
            parameter.data = parameter.data.float()
    return adapted


def merged(model: Any) -> Any:
    """A model with its adapters merged in, computed in float32; the model itself when it has none."""
    return model.float().merge_and_unload() if hasattr(model, "merge_and_unload") else model


def corpus_texts(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The text of rows of any kind, for training a tokenizer."""
    for place, row in enumerate(readable(rows)):
        kind = row_kind(row, place)
        if kind == "text":
            yield row["text"]
        elif kind in ("messages", "message_log"):
            yield from map(turn_text, row[kind])
        elif kind == "prompt":
            yield row["prompt"] + row["completion"]
