"""The distillation task: cross entropy on the student's tokens beside one loss term per teacher.

Each teacher has its own tokenizer, loss family and weight. A batch is collated once for the student and all teachers;
every term counts from integers, the teachers score without gradients, the student runs once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from spanwise.batch import model_inputs
from spanwise.loading import load_model, load_tokenizer
from spanwise.loss_parts import LossParts, Ratio
from spanwise.spans.table import token_table, tokenizer_fingerprint
from spanwise.teachers.cached import CachedTeacher
from spanwise.teachers.local import LocalTeacher, most_positions, move_to_gpu
from spanwise.teachers.precision import Truncated
from spanwise.teachers.process_teacher import ADDRESS, ProcessTeacher
from spanwise.teachers.served import ServedTeacher
from spanwise.teachers.served_options import refuse_several_writers
from spanwise.teachers.teacher import Bounded, Teacher
from spanwise.train import data as corpus
from spanwise.train.distill_recipe import OWN_BASE, TaskRecipe, TeacherSection, is_streamed, scored_at
from spanwise.train.distill_terms import TeacherTerm, make_term
from spanwise.train.evaluation import check_windows, measure, windows_of
from spanwise.train.fused_losses import fused_losses, last_hidden, say_unfused, unwrapped, verified_head, wants_fused
from spanwise.train.held_out import documents
from spanwise.train.recipe import without_secrets
from spanwise.train.student import DTYPES, check_context, corpus_texts, student_model, student_tokenizer
from spanwise.train.task import ReportSection


def build(recipe: TaskRecipe, folder: Path) -> DistillTask:
    """Load everything a run needs; what does not fit together is refused here, before the first step."""
    rows_corpus = corpus.open_corpus(recipe.data.train, stream=recipe.data.stream)
    texts = corpus_texts(corpus.rename_columns(row, recipe.data.columns, i) for i, row in enumerate(_rows(rows_corpus)))
    tokenizer = student_tokenizer(recipe.student, folder, texts)
    student = student_model(recipe.student, tokenizer)
    check_context(student, recipe.data.context_length)
    check_measurable(recipe, student, tokenizer)
    taught = list(recipe.teachers) if recipe.loss.kd_weight else []
    terms = [make_teacher_term(i, section, recipe, student, tokenizer) for i, section in enumerate(taught)]
    return DistillTask(recipe, student, tokenizer, terms, rows_corpus)


def check_measurable(recipe: TaskRecipe, student: Any, tokenizer: Any) -> None:
    """Cut held-out text into its windows once, so that what cannot be measured is not found out at step 500."""
    how, most = recipe.eval, most_positions(student)
    if recipe.data.eval is None:
        return
    texts = (text for text in documents(recipe.data.eval, columns=recipe.data.columns, most=how.documents) if text)
    if most is None or most > how.window_bytes + 1:  # tokens have a byte each, so any window fits
        texts = islice(texts, 1)
    check_windows(student, windows_of(texts, tokenizer, window_bytes=how.window_bytes, stride_bytes=how.stride_bytes))


def _rows(rows: Any) -> Iterable[Mapping[str, Any]]:
    return iter(rows)


def make_teacher_term(
    index: int, section: TeacherSection, recipe: TaskRecipe, student: Any, tokenizer: Any
) -> TeacherTerm:
    """Open a teacher and join it with its loss."""
    teacher_tokenizer = tokenizer if section.model == OWN_BASE else load_tokenizer(section.tokenizer or section.source)
    if is_streamed(section, recipe):
        from spanwise.train.streamed_teacher import StreamedTeacher, actor_namespace

        teacher: Teacher = StreamedTeacher(index, recipe.ray.teachers, actor_namespace(recipe.output))
    else:
        teacher = open_teacher(section, student, teacher_tokenizer, temperature=scored_at(section, recipe))
    return make_term(
        index,
        section.loss,
        teacher,
        student_tokenizer=tokenizer,
        teacher_tokenizer=teacher_tokenizer,
        projection=section.projection,
        temperature=recipe.loss.temperature,
    )


def open_teacher(section: TeacherSection, student: Any, tokenizer: Any, *, temperature: float = 1.0) -> Teacher:
    """The source of scores that a recipe names; ``temperature`` is what a server is asked for."""
    if section.cache is not None:
        return CachedTeacher(section.cache, tokenizer=tokenizer_fingerprint(tokenizer), teacher=section.fingerprint)
    if section.url is not None:
        refuse_several_writers(section.options, int(os.environ.get("WORLD_SIZE", "1")))
        options: dict[str, Any] = {"temperature": temperature} | section.options
        return ServedTeacher(section.url, tokenizer, **options)
    if section.process is not None and section.process.startswith(ADDRESS):
        return ProcessTeacher(section.process)
    if section.process is not None:
        return ProcessTeacher.start(
            section.process, tokenizer=section.tokenizer, dtype=section.dtype, options=section.options
        )
    if section.model == OWN_BASE:
        if not hasattr(student, "disable_adapter"):
            raise ValueError(
                "teachers.model is 'base', the student with its adapters off, and the student has none; expected "
                "student.peft. Fix: set student.peft, or name a teacher."
            )
        return LocalTeacher(student, vocab_size=len(tokenizer), name=OWN_BASE, adapters_off=True)
    model: Any = load_model(section.source, dtype=DTYPES[section.dtype], **section.options)
    model.requires_grad_(False)
    move_to_gpu(model, device_map=section.options.get("device_map"))
    return LocalTeacher(model, vocab_size=len(tokenizer), name=section.source)


def teacher_context(section: TeacherSection, recipe: TaskRecipe, teacher: Teacher) -> int:
    """Teacher tokens per row: the recipe's, else four times the student's within what the teacher can read.

    A cache says at how many it was built; its documents are found again only when they are cut alike.
    """
    most = teacher.context_length if isinstance(teacher, Bounded) else None
    wanted = section.context_length
    if most is None or (wanted is not None and wanted <= most):
        return wanted or 4 * recipe.data.context_length
    if wanted is not None:
        raise ValueError(
            f"teachers.context_length is {wanted:,} for {teacher.name}, which takes {most:,} tokens; expected at most "
            f"as many. It was probably set for another teacher. Fix: lower it to {most}, or leave it out."
        )
    return most if section.cache is not None else min(4 * recipe.data.context_length, most)


def make_collator(recipe: TaskRecipe, tokenizer: Any, taught: Sequence[Any], lengths: Sequence[int]) -> Any:
    """The collator of a run. ``taught`` has one entry per teacher, with teacher_tokenizer and aligner; so ``lengths``,
    the teachers' tokens per row."""
    from spanwise.xtoken.collator import CrossTokenizerCollator

    return CrossTokenizerCollator(
        student_tokenizer=tokenizer,
        teacher_tokenizers=[one.teacher_tokenizer for one in taught],
        aligners=[one.aligner for one in taught],
        ctx_length_student=recipe.data.context_length,
        ctx_length_teachers=lengths,
        padding="longest",
        packing=recipe.data.packing,
        byte_offsets=True,
    )


def make_rows(recipe: TaskRecipe, rows: Any) -> Any:
    """The training rows of an opened corpus, streamed or indexed."""
    section = recipe.data
    if not section.stream:
        return corpus.IndexedRows(rows, columns=section.columns, window_bytes=section.window_bytes)
    return corpus.StreamedRows(
        rows,
        columns=section.columns,
        window_bytes=section.window_bytes,
        shuffle_buffer=section.shuffle_buffer,
        seed=recipe.seed,
    )


class DistillTask:
    """Student, teachers, rows and measure of a distillation run; see :class:`~spanwise.train.task.Task`."""

    best_metric = ("bits_per_byte", False)

    def __init__(self, recipe: TaskRecipe, student: Any, tokenizer: Any, terms: list[TeacherTerm], rows: Any) -> None:
        self.recipe = recipe
        self.model: nn.Module = student
        self.processing_class = tokenizer
        self.terms = {f"kd/{term.index}": term for term in terms}
        self.has_evaluation = recipe.data.eval is not None
        sections = recipe.teachers
        self.weights = {"ce": recipe.loss.ce_weight} | {
            name: recipe.loss.kd_weight * sections[term.index].weight for name, term in self.terms.items()
        }
        self.scaled_terms = frozenset(self.terms) if recipe.loss.dynamic else frozenset()
        self.embedding_learning_rate = recipe.student.embedding_learning_rate
        lengths = [teacher_context(sections[term.index], recipe, term.teacher) for term in terms]
        self.collator = make_collator(recipe, tokenizer, terms, lengths)
        self.train_rows = make_rows(recipe, rows)
        self._fused: bool | None = None
        special = torch.tensor(tokenizer.all_special_ids, dtype=torch.long)
        self._byte_lengths = token_table(tokenizer).lengths.index_fill(0, special, 0)

    def counts(self, batch: Mapping[str, Any]) -> dict[str, Float[Tensor, ""]]:
        """Supervised tokens for ce; chunks or positions for each teacher."""
        from spanwise.xtoken.losses.plan import token_plan_of_batch

        counted = {"ce": token_plan_of_batch(batch).count}
        for term in self.terms.values():
            term.announce(batch)
        return counted | {name: term.count(batch) for name, term in self.terms.items()}

    def losses(self, model: nn.Module, batch: Mapping[str, Any], scales: Mapping[str, float]) -> dict[str, LossParts]:
        """One forward of the student, one of each teacher, one term each."""
        from spanwise.xtoken.losses import next_token_ce
        from spanwise.xtoken.losses.head import read_head
        from spanwise.xtoken.losses.plan import token_plan_of_batch

        if self._is_fused(model, batch):
            hidden = last_hidden(model, unwrapped(model), batch)
            head = read_head(unwrapped(model))  # after the forward, which gathers a sharded one
            return self._measured(fused_losses(hidden, head, self.terms, batch, scales), batch)
        logits: Tensor = model(**model_inputs(batch), use_cache=False).logits
        size = len(self.processing_class)
        parts: dict[str, LossParts] = {}
        if "ce" in scales:
            plan = token_plan_of_batch(batch)
            parts["ce"] = next_token_ce(logits, plan=plan, student_vocab_size=size, scale=scales["ce"])
        for name, term in self.terms.items():
            parts[name] = term.loss(logits, term.teacher.score(term.request(batch)), batch, scales[name])
        return self._measured(parts, batch)

    def _measured(self, parts: Mapping[str, LossParts], batch: Mapping[str, Any]) -> dict[str, LossParts]:
        """Each teacher's metrics under its name, its coverage among them; beside ce the bits per byte of what it read.

        The bytes are those of the trained tokens. Special tokens have none and their nats count, so a chat's figure
        lies a little above that of its text.
        """
        from spanwise.xtoken.losses.plan import token_plan_of_batch

        plan = token_plan_of_batch(batch)
        trained = torch.zeros(plan.shape, dtype=torch.long, device=plan.rows.device)
        trained.view(-1)[plan.rows + 1] = 1
        among_trained = {**batch, "token_mask": trained}
        measured: dict[str, LossParts] = {}
        for name, part in parts.items():
            metrics = {f"{name}/{key}": ratio for key, ratio in part.metrics.items()}
            if name == "ce":
                bits = part.metrics["ce"].sum / math.log(2)
                size = (self._byte_lengths.to(plan.targets.device)[plan.targets] * plan.weight).sum()
                metrics = {**part.metrics, "train_bits_per_byte": Ratio(bits, size)}
            else:
                share = self.terms[name].coverage(among_trained)[1]
                tokens = float(len(plan.rows))
                metrics[f"{name}/coverage"] = Ratio((share or 0.0) * tokens, tokens)
            measured[name] = replace(part, metrics=metrics)
        return measured

    def _is_fused(self, model: nn.Module, batch: Mapping[str, Any]) -> bool:
        """Whether the losses can read the head; looked for once."""
        if self._fused is None:
            bare = unwrapped(model)
            wanted = wants_fused(self.recipe.loss.fused, self.terms, len(self.processing_class))
            readable = isinstance(bare, type(self.model))
            if wanted and not readable:
                say_unfused(f"the student is wrapped in {type(bare).__name__}")
            self._fused = wanted and readable and verified_head(bare, batch["input_ids"]) is not None
        return self._fused

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """``kd``: the teachers' terms as they enter the total, before kd_weight."""
        sections = self.recipe.teachers
        if not self.terms:
            return {}
        return {"kd": sum(sections[term.index].weight * means[name] for name, term in self.terms.items())}

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Held-out bits per byte and next-token accuracy."""
        section, how = self.recipe.data, self.recipe.eval
        if section.eval is None:
            return {}
        texts = documents(section.eval, columns=section.columns, most=how.documents)
        return measure(
            model,
            self.processing_class,
            texts,
            window_bytes=how.window_bytes,
            stride_bytes=how.stride_bytes,
            batch_size=how.batch_size,
        ).as_metrics()

    def left_out(self) -> dict[str, int]:
        """Rows without text."""
        return dict(self.train_rows.left_out.reasons)

    def report_sections(self) -> list[ReportSection]:
        """What the teachers' scores left out; how well each teacher's tokens meet the student's on the first rows."""
        from spanwise.report.page import table

        sections = self._precision()
        if not self.terms or self.recipe.data.stream:
            return sections
        rows = [self.train_rows[place] for place in range(min(8, len(self.train_rows)))]
        batch = self.collator(rows)
        found = [
            (without_secrets(section.source), section.loss.name, *term.coverage(batch))
            for term in self.terms.values()
            for section in [self.recipe.teachers[term.index]]
        ]
        columns = ["teacher", "loss", "chunks", "share of student tokens in a correct chunk"]
        return [*sections, ReportSection("Alignment of the first rows", table(columns, found))]

    def _precision(self) -> list[ReportSection]:
        """Of every teacher whose scores came cut to the likeliest tokens: whose they are, and what is missing."""
        from spanwise.report.page import table

        held = [
            (without_secrets(self.recipe.teachers[term.index].source), term.teacher.precision())
            for term in self.terms.values()
            if isinstance(term.teacher, Truncated)
        ]
        found = [
            (source, f"{one.name} ({one.fingerprint})", one.mean_k, one.mean_tail_mass, one.largest_tail_mass)
            for source, one in held
            if one is not None
        ]
        columns = ["scores", "of the teacher", "tokens per position (mean k)", "mean tail mass", "largest tail mass"]
        return [ReportSection("Precision of the teachers' scores", table(columns, found))] if found else []

    def close(self) -> None:
        """Close every teacher."""
        for term in self.terms.values():
            term.teacher.close()
