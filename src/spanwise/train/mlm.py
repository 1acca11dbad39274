"""The masked task: a masked or masked-diffusion language model, from random weights or from a pre-trained one.

Rows are text (cut into tokens by the collator) or hold ``input_ids``. Noise is keyed on (seed, epoch, place in the
epoch), so a run is the same on any number of processes. An autoregressive checkpoint is made bidirectional and given a
mask token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from spanwise.batch import BatchedDataDict
from spanwise.loss_parts import LossParts
from spanwise.mlm import CosineNoiseSchedule, DefaultMLMCollator, MLMLoss
from spanwise.mlm.backbones import as_mlm_model, is_causal
from spanwise.mlm.generate import has_token
from spanwise.mlm.layout import field
from spanwise.mlm.sudoku import SUDOKU, puzzle_rows, split_grids, sudoku_puzzles, sudoku_tokenizer
from spanwise.train import data as corpus
from spanwise.train.held_out import check_held_out, documents
from spanwise.train.mlm_evaluation import measure_prompts, measure_texts
from spanwise.train.model_config import model_config
from spanwise.train.recipe import Recipe, Section
from spanwise.train.student import DTYPES, corpus_texts, student_tokenizer
from spanwise.train.task import ReportSection
from spanwise.xtoken.texts import checked_text

# Grids of one epoch: the few that there are, many times over, each time with other cells hidden.
SUDOKU_ROWS = 4096
# What a tokenizer is given where it has none.
ADDED = {"mask_token": "<|mask|>", "pad_token": "<|pad|>"}


class LossSection(Section):
    """What is hidden, and what a hidden token counts."""

    weighting: Literal["mlm", "nelbo"] = Field(
        "nelbo", description="Every hidden token alike, or the likelihood bound."
    )
    norm: Literal["masked", "token", "sequence"] | None = Field(None, description="What the sum is divided by.")
    masking: Literal["bernoulli", "exact"] = "exact"
    t_sampling: Literal["iid", "stratified"] = "stratified"
    noise: Literal["linear", "cosine"] = Field("linear", description="With bernoulli masking: p(t).")
    loss_on_padding: Literal[False] = Field(False, description="Padding is not computed, so it cannot be trained on.")

    @model_validator(mode="after")
    def _bound_has_one_norm(self) -> LossSection:
        if self.weighting == "nelbo" and self.norm not in (None, "token"):
            raise ValueError(f"weighting nelbo was given with norm {self.norm}; expected norm token, or weighting mlm")
        return self


class GenerationSection(Section):
    """How rows with gaps are filled when they are measured."""

    steps: int | None = Field(None, ge=1, description="Most forwards per row; default: one per token.")
    confidence: Literal["top_prob", "prob_diff", "entropy"] | None = "top_prob"
    draws: int = Field(4, ge=1, description="How often a text is hidden anew for the likelihood bound.")


class TaskRecipe(Recipe):
    """A masked-language-model run."""

    task: Literal["mlm"] = "mlm"
    loss: LossSection = LossSection()
    generation: GenerationSection = GenerationSection()

    @model_validator(mode="after")
    def _options_fit(self) -> TaskRecipe:
        if self.data.packing:
            raise ValueError("data.packing is on; expected it off, since this task computes no padding anyway")
        if self.data.stream and self.loss.t_sampling == "stratified":
            raise ValueError(
                "loss.t_sampling is stratified and data.stream is on; expected iid, since a streamed row does not know "
                "its place in the epoch"
            )
        return self


class TokenCollator:
    """Tokenizes text rows, cuts what is longer than the context (and counts it), then hides."""

    def __init__(self, inner: DefaultMLMCollator, context_length: int) -> None:
        self.inner = inner
        self.context_length = context_length
        self.ends = len(inner.with_ends([]))

    def __call__(self, rows: list[dict[str, Any]]) -> BatchedDataDict:
        """Collate rows with ``text`` or ``input_ids``."""
        room = self.context_length - self.ends
        tokenized, cut = [], 0
        for place, row in enumerate(rows):
            if "input_ids" not in row and row.get("text") is None:
                raise ValueError(
                    f"a row has the keys {', '.join(row)} and no text; expected text or input_ids, which is what a "
                    "masked model learns from. A chat was probably meant for the task distill. Fix: name a corpus of "
                    "plain text, or set data.columns.text."
                )
            ids = field(row, "input_ids") if "input_ids" in row else self._ids(checked_text(row["text"], place))
            cut += max(0, len(ids) - room)
            tokenized.append({**row, "input_ids": ids[:room]})
        batch = self.inner(tokenized)
        if cut:
            batch["left_out"] = {"tokens beyond context_length": cut}
        return batch

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self.inner.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found


class ListRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows in memory."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.left_out = corpus.LeftOut()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"idx": index, "loss_multiplier": 1.0} | self.rows[index]

    def lengths(self) -> list[int]:
        """Tokens of every row."""
        return [len(row["input_ids"]) for row in self.rows]


def build(recipe: TaskRecipe, folder: Path) -> MaskedTask:
    """Load everything a run needs."""
    if recipe.data.eval != f"{SUDOKU}:eval":
        check_held_out(recipe.data)
    rows, tokenizer = rows_and_tokenizer(recipe, folder)
    task = MaskedTask(recipe, masked_model(recipe, tokenizer), tokenizer, rows)
    check_context(recipe.data.context_length, task.collator.ends, as_mlm_model(task.model).max_length)
    return task


def check_context(context_length: int, ends: int, positions: int | None) -> None:
    """Refuse rows that have no room for text, or more than the model has positions for."""
    if ends < context_length <= (context_length if positions is None else positions):
        return
    most = "" if positions is None else f" to {positions}, the positions of the model"
    raise ValueError(
        f"data.context_length is {context_length}; expected {ends + 1}{most}: rows hold {ends} special tokens and some "
        f"text. It was probably left at its default or copied from another model. Fix: set data.context_length"
        f"{'' if positions is None else f' to {positions} or less, or student.model.max_length higher'}."
    )


def rows_and_tokenizer(recipe: TaskRecipe, folder: Path) -> tuple[Any, Any]:
    """The training rows, and the student's tokenizer with PAD and MASK."""
    section = recipe.data
    rows: Any
    texts: Any = iter(())
    if section.train == SUDOKU:
        grids = split_grids()[0]
        rows = ListRows([{"input_ids": [digit + 1 for digit in grids[i % len(grids)]]} for i in range(SUDOKU_ROWS)])
    else:
        opened: Any = corpus.open_corpus(section.train, stream=section.stream)
        renamed = (corpus.rename_columns(row, section.columns, place) for place, row in enumerate(opened))
        texts = corpus_texts(renamed)
        rows = _text_rows(recipe, opened)
    return rows, sudoku_tokenizer() if recipe.student.tokenizer == SUDOKU else _tokenizer(recipe, folder, texts)


def _text_rows(recipe: TaskRecipe, opened: Any) -> Any:
    section = recipe.data
    if not section.stream:
        return corpus.IndexedRows(opened, columns=section.columns, window_bytes=section.window_bytes)
    return corpus.StreamedRows(
        opened,
        columns=section.columns,
        window_bytes=section.window_bytes,
        shuffle_buffer=section.shuffle_buffer,
        seed=recipe.seed,
    )


def _tokenizer(recipe: TaskRecipe, folder: Path, texts: Any) -> Any:
    """The student's tokenizer, with PAD and MASK added where it has none."""
    tokenizer = student_tokenizer(recipe.student, folder, texts)
    missing = dict(ADDED)
    if tokenizer.mask_token_id is not None:
        del missing["mask_token"]
    if tokenizer.pad_token_id not in (None, tokenizer.eos_token_id):
        del missing["pad_token"]
    if missing:
        tokenizer.add_special_tokens(missing)
    return tokenizer


def masked_model(recipe: TaskRecipe, tokenizer: Any) -> Any:
    """The model to be trained; a pre-trained one gets embeddings for the tokens that were added, and for no others."""
    from transformers import AutoModelForMaskedLM

    student = recipe.student
    if student.peft is not None:
        raise ValueError(
            "student.peft is set for a masked model; expected full training, which is what this task does. The section "
            "was probably copied from a distillation recipe. Fix: take student.peft out."
        )
    if isinstance(student.model, str):
        model = _pretrained(student.model, DTYPES[student.dtype], student.options)
    else:
        own = student.model.get("model_type") == "spanwise_mlm"
        ids = {"padding_idx": tokenizer.pad_token_id, "mask_idx": tokenizer.mask_token_id}
        defaults = ids if own else {"pad_token_id": tokenizer.pad_token_id}
        size = {"num_embeddings" if own else "vocab_size": len(tokenizer)}
        config = model_config(student.model, size | defaults)
        model = AutoModelForMaskedLM.from_config(config, dtype=DTYPES[student.dtype])
    known = model.get_input_embeddings().num_embeddings
    if known + len(ADDED) < len(tokenizer):
        raise ValueError(
            f"the model has {known:,} embeddings and the tokenizer {len(tokenizer):,} tokens; expected no more than "
            "MASK and PAD beyond the model's own. The tokenizer is probably another model's. Fix: leave "
            "student.tokenizer out, or name the one that belongs to the model."
        )
    if known < len(tokenizer):
        model.resize_token_embeddings(len(tokenizer))
    return model


def _pretrained(source: str, dtype: Any, options: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForMaskedLM

    from spanwise.loading import load_auto, load_model

    if source.endswith((".gguf", ":smollm2")):
        return load_model(source, dtype=dtype, **options)
    config: Any = load_auto(AutoConfig, "model configuration", source)
    if any(is_causal(name) for name in config.architectures or []):
        return load_model(source, dtype=dtype, **options)
    return load_auto(AutoModelForMaskedLM, "masked language model", source, dtype=dtype, **options)


class MaskedTask:
    """Model, rows and measure of a masked run; see :class:`~spanwise.train.task.Task`."""

    best_metric = ("nelbo_nats_per_token", False)
    weights = {"masked": 1.0}  # noqa: RUF012  # the protocol wants a dict
    scaled_terms: frozenset[str] = frozenset()

    def __init__(self, recipe: TaskRecipe, model: Any, tokenizer: Any, rows: Any) -> None:
        self.recipe = recipe
        self.model: nn.Module = model
        self.processing_class = tokenizer
        self.train_rows = rows
        self.has_evaluation = recipe.data.eval is not None
        self.embedding_learning_rate = recipe.student.embedding_learning_rate
        inner = DefaultMLMCollator(
            tokenizer,
            None,
            CosineNoiseSchedule() if recipe.loss.noise == "cosine" else None,
            loss_on_padding=False,
            truncate=None,
            add_bos=has_token(tokenizer, "bos", "cls"),
            add_eos=has_token(tokenizer, "eos", "sep"),
            masking=recipe.loss.masking,
            t_sampling=recipe.loss.t_sampling,
            seed=recipe.seed,
        )
        self.collator = TokenCollator(inner, recipe.data.context_length)

    def counts(self, batch: Mapping[str, Any]) -> dict[str, Float[Tensor, ""]]:
        """Hidden tokens, real tokens or rows, as the norm says."""
        return {"masked": self._loss(None).count(batch)}

    def losses(self, model: nn.Module, batch: Mapping[str, Any], scales: Mapping[str, float]) -> dict[str, LossParts]:
        """One term."""
        return {"masked": self._loss(model).parts(batch, scales["masked"])}

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Nothing more."""
        return {}

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The likelihood bound and how often gaps are filled rightly."""
        section, how = self.recipe.data, self.recipe.generation
        inner: Any = getattr(model, "module", model)
        if section.eval is None:
            return {}
        if section.eval == f"{SUDOKU}:eval":
            rows = puzzle_rows(sudoku_puzzles(self.recipe.eval.documents or 256))
            return measure_prompts(inner, self.processing_class, rows, steps=how.steps, confidence=how.confidence)
        texts = list(documents(section.eval, columns=section.columns, most=self.recipe.eval.documents))
        return measure_texts(
            inner,
            self.processing_class,
            texts,
            context_length=section.context_length,
            draws=how.draws,
            batch_size=self.recipe.eval.batch_size,
        )

    def left_out(self) -> dict[str, int]:
        """Rows without text."""
        return dict(self.train_rows.left_out.reasons)

    def report_sections(self) -> list[ReportSection]:
        """None."""
        return []

    def close(self) -> None:
        """Nothing is held."""

    def _loss(self, model: nn.Module | None) -> MLMLoss:
        section = self.recipe.loss
        return MLMLoss(model=model, tokenizer=self.processing_class, weighting=section.weighting, norm=section.norm)
