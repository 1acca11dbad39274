"""``spanwise cache``: run a recipe's teachers once over its training text and keep what they say.

The rows are those that training will collate, with the same tokenizers, windows and context lengths, so that every
document is found again. Afterwards ``teachers.0.cache=PATH teachers.0.model=null`` trains without the teacher's
weights. Memory: the teachers, and one batch of one teacher's logits.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from spanwise.spans.table import TokenTable, token_table, tokenizer_fingerprint
from spanwise.teachers.cache_build import CacheProgress, build_cache
from spanwise.teachers.cache_frame import TopK
from spanwise.teachers.cache_store import CacheIdentity, Manifest
from spanwise.teachers.cache_writer import make_folder
from spanwise.teachers.fingerprint import model_fingerprint
from spanwise.teachers.local import LocalTeacher
from spanwise.teachers.process_teacher import ADDRESS
from spanwise.teachers.served import ServedTeacher
from spanwise.teachers.teacher import ScoreRequest, Teacher
from spanwise.train import data as corpus
from spanwise.train.distill import DistillTask, make_teacher_term, teacher_context
from spanwise.train.distill_recipe import OWN_BASE, TaskRecipe, TeacherSection, scored_at
from spanwise.train.distill_terms import TeacherTerm
from spanwise.train.recipe import Recipe, without_secrets
from spanwise.train.student import corpus_texts, student_tokenizer

SPACE = ord(" ")


def cache_teachers(recipe: Recipe) -> dict[str, Any]:
    """Build the cache of every teacher of a recipe that is not one already.

    Returns:
        tokens, bytes_per_token, path (of the only cache, else of the folder that holds them all), and ``caches``: the
        header's numbers, path, teacher and the teacher's fingerprint of each.
    """
    if not isinstance(recipe, TaskRecipe):
        raise ValueError(
            f"the recipe is of the task '{recipe.task}'; expected distill, the one with teachers. Another recipe was "
            "probably meant. Fix: name a distillation recipe."
        )
    wanted = to_be_cached(recipe)
    folder = Path(recipe.cache.folder or f"{recipe.output}.cache")
    paths = {place: folder / f"teacher-{place}" for place in wanted}
    for path in paths.values():  # before a teacher is loaded
        make_folder(path)
    if recipe.ray.workers:
        ray_cache: Any = importlib.import_module("spanwise.train.ray_cache")
        caches: list[dict[str, Any]] = ray_cache.cache_on_ray(recipe, paths)
    else:
        task = open_task(recipe)
        try:
            caches = [_build(recipe, task, task.terms[f"kd/{place}"], path) for place, path in paths.items()]
        finally:
            task.close()
    for one in caches:
        one["fingerprint"] = Manifest.read(Path(one["path"])).identity.teacher
        teacher = without_secrets(one["teacher"])
        sys.stderr.write(f"{one['path']}: scores of {teacher}, teachers.fingerprint={one['fingerprint']}\n")
    size, tokens = sum(one["bytes"] for one in caches), sum(one["tokens"] for one in caches)
    path = caches[0]["path"] if len(caches) == 1 else str(folder)
    return {"tokens": tokens, "bytes_per_token": size / max(tokens, 1), "path": path, "caches": caches}


def to_be_cached(recipe: TaskRecipe) -> list[int]:
    """The places of the teachers to be cached; one that cannot be is refused."""
    wanted = [place for place, section in enumerate(recipe.teachers) if section.cache is None]
    for place in wanted:
        section = recipe.teachers[place]
        if section.model == OWN_BASE or (section.process or "").startswith(ADDRESS):
            raise ValueError(
                f"teacher {place} is '{section.source}'; expected a model or a server. The student's own base and a "
                "running worker cannot be told apart from their successors. Fix: name the model itself in "
                f"teachers.{place}.model."
            )
    if not wanted:
        raise ValueError(
            "the recipe has no teacher to be cached; expected one with model, url or process. All of them are probably "
            "caches already. Fix: name a model in teachers."
        )
    return wanted


def open_task(recipe: TaskRecipe) -> DistillTask:
    """Rows, collator and teachers as training has them, without a student."""
    here = recipe.model_copy(update={"ray": recipe.ray.model_copy(update={"teachers": 0})})
    with tempfile.TemporaryDirectory() as staging:
        return _task(here, Path(staging))


def _task(recipe: TaskRecipe, staging: Path) -> DistillTask:
    rows: Any = corpus.open_corpus(recipe.data.train, stream=recipe.data.stream)
    named = (corpus.rename_columns(row, recipe.data.columns, place) for place, row in enumerate(rows))
    tokenizer = student_tokenizer(recipe.student, staging, corpus_texts(named))
    sections = [_scored_here(section, recipe) for section in recipe.teachers]
    terms = [make_teacher_term(place, section, recipe, None, tokenizer) for place, section in enumerate(sections)]
    return DistillTask(recipe, None, tokenizer, terms, rows)


def _scored_here(section: TeacherSection, recipe: TaskRecipe) -> TeacherSection:
    """The same teacher in this process: a cache needs no second one. A server is asked for as much as is kept."""
    if section.process is not None:
        return section.model_copy(update={"model": section.process, "process": None})
    if section.url is not None:
        return section.model_copy(update={"options": {"top_k": recipe.cache.cap} | section.options})
    return section


def _build(recipe: TaskRecipe, task: DistillTask, term: TeacherTerm, path: Path) -> dict[str, Any]:
    tokenizer = term.teacher_tokenizer
    identity, asked = identity_of(recipe, term.teacher, tokenizer, recipe.teachers[term.index])
    progress = ProgressLine(term.teacher.name)
    found = build_cache(
        term.teacher,
        requests_of(task, term, recipe.cache.batch_size, asked),
        path,
        identity=identity,
        word_start=word_starts_of(term, identity, asked),
        total=None if recipe.data.stream else len(task.train_rows),
        report=progress,
    )
    progress.end()
    return found | {"path": str(path), "teacher": recipe.teachers[term.index].source}


def identity_of(
    recipe: TaskRecipe, teacher: Teacher, tokenizer: Any, section: TeacherSection
) -> tuple[CacheIdentity, torch.device]:
    """Whose scores a cache will hold, and the device on which the teacher wants its rows."""
    device = torch.device("cpu")
    cap = recipe.cache.cap
    if isinstance(teacher, LocalTeacher):
        device = next(teacher.model.parameters()).device
        fingerprint, fields = model_fingerprint(teacher.model), ("entropy", "next_word_mass")
    elif isinstance(teacher, ServedTeacher):
        fingerprint, fields, cap = teacher.identity.teacher, teacher.identity.fields, min(cap, teacher.top_k)
    else:
        raise ValueError(
            f"the teacher {teacher.name} cannot be cached; expected a model or a server. Fix: set teachers.model."
        )
    identity = CacheIdentity(
        teacher=fingerprint,
        tokenizer=tokenizer_fingerprint(tokenizer),
        vocab_size=teacher.vocab_size,
        temperature=scored_at(section, recipe),
        k=TopK(min(recipe.cache.floor, cap), cap, recipe.cache.mass),
        fields=fields,
        name=without_secrets(section.source),
        context_length=teacher_context(section, recipe, teacher),
    )
    return identity, device


def word_starts_of(term: TeacherTerm, identity: CacheIdentity, device: torch.device) -> Bool[Tensor, " V"] | None:
    """The word starts of a teacher, None where the cache does not keep what needs them."""
    if "next_word_mass" not in identity.fields:
        return None
    tokenizer = term.teacher_tokenizer
    words = word_starts(token_table(tokenizer), tokenizer.eos_token_id)
    return words[: term.teacher.vocab_size].to(device)


def word_starts(table: TokenTable, eos_token_id: int | None) -> Bool[Tensor, " V"]:
    """Which ids start a word (their bytes begin with a space) or end the text."""
    starts = torch.zeros(table.size, dtype=torch.bool)
    filled = table.lengths > 0
    starts[filled] = table.flat[table.offsets[:-1][filled]] == SPACE
    if eos_token_id is not None:
        starts[eos_token_id] = True
    return starts


def requests_of(
    task: DistillTask, term: TeacherTerm, batch_size: int, device: torch.device, places: range | None = None
) -> Iterator[ScoreRequest]:
    """The teacher's side of every batch of the training rows (or of those at ``places``), on its device."""
    rows: list[dict[str, Any]] = []
    for row in _rows(task.train_rows, places):
        rows.append(row)
        if len(rows) == batch_size:
            yield to_device(term.request(task.collator(rows)), device)
            rows = []
    if rows:
        yield to_device(term.request(task.collator(rows)), device)


def _rows(train_rows: Any, places: range | None) -> Iterator[dict[str, Any]]:
    if isinstance(train_rows, torch.utils.data.IterableDataset):
        yield from train_rows
    else:
        for place in range(len(train_rows)) if places is None else places:
            yield train_rows[place]


def to_device(request: ScoreRequest, device: torch.device) -> ScoreRequest:
    """The request's tensors on a teacher's device."""
    segments = request.segment_ids
    return replace(
        request,
        input_ids=request.input_ids.to(device),
        token_mask=request.token_mask.to(device),
        segment_ids=None if segments is None else segments.to(device),
    )


class ProgressLine:
    """Says how far a cache is, on standard error: a line that renews itself on a terminal, else one every 10 s."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._last = -float("inf")
        self._progress: CacheProgress | None = None

    def __call__(self, progress: CacheProgress) -> None:
        self._progress = progress
        now = time.monotonic()
        if now - self._last >= (0.2 if sys.stderr.isatty() else 10.0):
            self._last = now
            self._say("")

    def end(self) -> None:
        """Say the last of it."""
        if self._progress is not None:
            self._say("\n")

    def _say(self, end: str) -> None:
        start, end = ("\r\033[K", end) if sys.stderr.isatty() else ("", "\n")
        sys.stderr.write(f"{start}{self.name}: {self._progress}{end}")
        sys.stderr.flush()
