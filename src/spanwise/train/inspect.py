"""``spanwise inspect``: the first batches of a recipe as training will see them, token by token, without any model.

Rows come in the order of the first epoch, through the task's own collator; only tokenizers and processors are loaded.
What is found here is plain data; :mod:`spanwise.report.inspect_page` makes the page. O(tokens of the rows asked for).
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spanwise.loading import load_tokenizer
from spanwise.report.inspect_page import ShownRow, write_inspect_page
from spanwise.train import data as corpus
from spanwise.train import distill, mlm, vlm
from spanwise.train.distill_terms import make_aligner
from spanwise.train.inspect_rows import distill_rows, masked_rows, vision_rows
from spanwise.train.recipe import Recipe
from spanwise.train.sampler import PlacedRows, StepSampler
from spanwise.train.student import corpus_texts, student_tokenizer

ROWS = 8
# transformers.TrainingArguments' own default.
BATCH_SIZE = 8


def inspect_recipe(recipe: Recipe, *, rows: int = ROWS, output: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Write the page of a recipe's first rows.

    Args:
        recipe: of any task.
        rows: how many rows of the data are collated; packing makes fewer rows of them.
        output: the page; by default beside the recipe's output folder.

    Returns:
        rows (of the batches, as shown) and path.
    """
    found = first_rows(recipe, rows)
    path = write_inspect_page(
        output or f"{recipe.output}.inspect.html",
        found,
        title=f"First batches of {Path(recipe.output).name}",
        subtitle=f"Task {recipe.task}, seed {recipe.seed}: {rows} rows of the data in the order of the first epoch.",
    )
    return {"rows": len(found), "path": str(path)}


def first_rows(recipe: Recipe, rows: int) -> list[ShownRow]:
    """The first rows of the first epoch, batch by batch, as the task's collator makes them."""
    task, show = _task_without_models(recipe)
    found: list[ShownRow] = []
    for number, batch in enumerate(_batches(task.train_rows, recipe, rows)):
        for place, row in enumerate(show(task, batch, task.collator(batch))):
            found.append(ShownRow(f"Batch {number}, row {place}", row.counts, row.strips, row.images))
    return found


def _batches(train_rows: Any, recipe: Recipe, most: int) -> Iterator[list[dict[str, Any]]]:
    size = int(recipe.train.get("per_device_train_batch_size", BATCH_SIZE))
    if isinstance(train_rows, torch.utils.data.IterableDataset):
        stream = itertools.islice(iter(train_rows), most)
        while batch := list(itertools.islice(stream, size)):
            yield batch
        return
    strategy = recipe.train.get("train_sampling_strategy", "random")
    sampler = StepSampler(
        len(train_rows),
        batch_size=size,
        seed=recipe.seed,
        shuffle=strategy != "sequential",
        lengths=train_rows.lengths() if strategy == "group_by_length" else None,
        step_size=size * int(recipe.train.get("gradient_accumulation_steps", 1)),
    )
    placed = PlacedRows(train_rows)
    left = min(most, len(train_rows))
    for places in sampler:
        if left <= 0:
            return
        yield [placed[place] for place in places[:left]]
        left -= len(places)


Show = Callable[[Any, list[dict[str, Any]], Any], list[ShownRow]]


def _task_without_models(recipe: Recipe) -> tuple[Any, Show]:
    """The task with its rows and collator, and what turns its batches into rows to be shown."""
    with tempfile.TemporaryDirectory() as staging:
        if isinstance(recipe, vlm.TaskRecipe):
            rows = vlm.ConversationRows(recipe.data.train, recipe.data.columns)
            return vlm.VisionTask(recipe, None, vlm.open_processor(recipe, rows), rows, None), vision_rows
        if isinstance(recipe, mlm.TaskRecipe):
            text_rows, tokenizer = mlm.rows_and_tokenizer(recipe, Path(staging))
            return mlm.MaskedTask(recipe, None, tokenizer, text_rows), masked_rows
        if isinstance(recipe, distill.TaskRecipe):
            return _distillation(recipe, Path(staging)), distill_rows
    raise TypeError(f"a recipe of the task '{recipe.task}' was given; expected distill, vlm or mlm.")


@dataclass(frozen=True)
class Taught:
    """A teacher's tokenizer and aligner; the teacher itself stays closed."""

    index: int
    teacher_tokenizer: Any
    aligner: Any


@dataclass(frozen=True)
class ClosedDistillation:
    """A distillation task as far as its batches go."""

    recipe: distill.TaskRecipe
    processing_class: Any
    taught: list[Taught]
    collator: Any
    train_rows: Any


def _distillation(recipe: distill.TaskRecipe, staging: Path) -> ClosedDistillation:
    rows: Any = corpus.open_corpus(recipe.data.train, stream=recipe.data.stream)
    named = (corpus.rename_columns(row, recipe.data.columns, place) for place, row in enumerate(rows))
    tokenizer = student_tokenizer(recipe.student, staging, corpus_texts(named))
    sections = recipe.teachers if recipe.loss.kd_weight else []
    taught = [_taught(place, section, tokenizer) for place, section in enumerate(sections)]
    lengths = [section.context_length or 4 * recipe.data.context_length for section in sections]
    collator = distill.make_collator(recipe, tokenizer, taught, lengths)
    return ClosedDistillation(recipe, tokenizer, taught, collator, distill.make_rows(recipe, rows))


def _taught(place: int, section: distill.TeacherSection, tokenizer: Any) -> Taught:
    own = section.model == distill.OWN_BASE
    teacher_tokenizer = tokenizer if own else load_tokenizer(section.tokenizer or section.source)
    aligner = make_aligner(place, section.loss, section.source, tokenizer, teacher_tokenizer, section.projection)
    return Taught(place, teacher_tokenizer, aligner)
