"""What a distillation recipe may say: its teachers, what is cached of them, how the terms are added."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from spanwise.teachers.process_teacher import ADDRESS
from spanwise.teachers.served_options import checked_options, refuse_several_writers
from spanwise.train.distill_terms import LOSS_NAMES, NEEDS_PROJECTION, LossFamily
from spanwise.train.fused_losses import FUSABLE
from spanwise.train.recipe import Recipe, Section

# The teacher that is the student itself with its adapters off.
OWN_BASE = "base"


def _or_its_name(schema: dict[str, Any]) -> None:
    """Editors read the schema alone, which does not show that a family may be given by its name."""
    schema["anyOf"] = [{"$ref": schema.pop("$ref")}, {"enum": list(LOSS_NAMES)}]


class TeacherSection(Section):
    """One teacher: exactly one of model, cache, url, process."""

    model: str | None = Field(
        None, description="Hub name, folder or GGUF file; 'base' is the student without adapters."
    )
    cache: str | None = Field(None, description="Folder written by spanwise cache.")
    url: str | None = Field(None, description="An OpenAI-compatible server that returns prompt log-probabilities.")
    process: str | None = Field(
        None, description="A model that runs in a process of its own on this machine; or unix:PATH, a running worker."
    )
    tokenizer: str | None = Field(None, description="The teacher's tokenizer; default: the model's.")
    fingerprint: str | None = Field(
        None, description="Of the teacher a cache must be of, as spanwise cache says it; default: any."
    )
    projection: str | None = Field(
        None, description="projected_kl, gold, h_kl: file made by spanwise project build; built when left out."
    )
    loss: LossFamily = Field(
        LossFamily(), description="A name, or a mapping with its options.", json_schema_extra=_or_its_name
    )
    weight: float = Field(1.0, gt=0)
    context_length: int | None = Field(
        None,
        ge=2,
        description="Teacher tokens per row; default: a cache's own, else four times the student's, within what the "
        "teacher can read.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    options: dict[str, Any] = Field(
        default_factory=dict, description="More arguments of from_pretrained or the client."
    )

    @model_validator(mode="before")
    @classmethod
    def _loss_by_name(cls, content: Any) -> Any:
        if isinstance(content, dict) and isinstance(content.get("loss"), str):
            return content | {"loss": {"name": content["loss"]}}
        return content

    @model_validator(mode="after")
    def _one_source(self) -> TeacherSection:
        sources = [name for name in ("model", "cache", "url", "process") if getattr(self, name)]
        if len(sources) != 1:
            raise ValueError(
                f"has {' and '.join(sources) or 'none'} of model, cache, url, process; expected exactly one"
            )
        if self.url is not None:
            checked_options(self.options)
        by_address = self.process is not None and self.process.startswith(ADDRESS)
        if self.options and (self.cache or by_address):
            raise ValueError(f"a {sources[0]} that was made before takes no options; take them out")
        if self.tokenizer is None and (self.cache or self.url or by_address):
            raise ValueError(f"a teacher from a {sources[0]} needs tokenizer; expected the teacher's tokenizer")
        if self.fingerprint is not None and self.cache is None:
            raise ValueError(f"fingerprint is compared with a cache's teacher and this is a {sources[0]}; take it out")
        return self

    @model_validator(mode="after")
    def _projection_is_read(self) -> TeacherSection:
        if self.projection is not None and self.loss.name not in NEEDS_PROJECTION:
            readers = ", ".join(sorted(NEEDS_PROJECTION))
            raise ValueError(f"the loss '{self.loss.name}' has no projection; expected one for {readers} only")
        return self

    @property
    def source(self) -> str:
        """What the teacher is called."""
        return str(self.model or self.cache or self.url or self.process)


class CacheSection(Section):
    """What ``spanwise cache`` keeps of every position: as few tokens as reach the mass, within floor and cap."""

    folder: str | None = Field(None, description="Where caches go, one folder per teacher; default: OUTPUT.cache.")
    floor: int = Field(4, ge=1, description="Tokens kept at least.")
    cap: int = Field(64, ge=1, le=65_535, description="Tokens kept at most.")
    mass: float = Field(0.95, gt=0, le=1, description="Probability that is enough.")
    batch_size: int = Field(8, ge=1, description="Rows per forward of the teacher.")

    @model_validator(mode="after")
    def _floor_below_cap(self) -> CacheSection:
        if self.floor > self.cap:
            raise ValueError(f"floor is {self.floor} and cap {self.cap}; expected floor ≤ cap")
        return self


class LossSection(Section):
    """How the terms are added."""

    kd_weight: float = Field(1.0, ge=0)
    ce_weight: float = Field(1.0, ge=0)
    temperature: float = Field(1.0, gt=0, description="Of every distillation term.")
    dynamic: bool = Field(False, description="Multiply kd with |ce| / |kd| of the step before.")
    fused: bool | None = Field(
        None, description="Compute the losses inside the LM head; default: from 32,768 student tokens on."
    )

    @model_validator(mode="after")
    def _something_is_trained(self) -> LossSection:
        if not self.kd_weight and not self.ce_weight:
            raise ValueError("kd_weight and ce_weight are both 0; expected at least one above 0")
        return self


class TaskRecipe(Recipe):
    """A distillation run."""

    task: Literal["distill"] = "distill"
    teachers: list[TeacherSection] = Field(default_factory=list, description="None: plain cross entropy.")
    loss: LossSection = LossSection()
    cache: CacheSection = CacheSection()

    @model_validator(mode="after")
    def _teachers_fit_the_losses(self) -> TaskRecipe:
        if not self.teachers and not self.loss.ce_weight:
            raise ValueError("loss.ce_weight is 0 and there are no teachers; expected one of the two")
        if self.ray.teachers and not any(is_streamed(section, self) for section in self.teachers):
            raise ValueError("ray.teachers is set and no teacher is a model of its own; expected teachers.model")
        for section in self.teachers:
            if section.url is not None:
                refuse_several_writers(section.options, self.ray.workers)
        plain = sorted({section.loss.name for section in self.teachers} - FUSABLE)
        if self.loss.fused and self.loss.kd_weight and plain:
            raise ValueError(
                f"loss.fused is true and a teacher's loss is {', '.join(plain)}, which reads whole logits; expected "
                f"only {', '.join(sorted(FUSABLE))} then"
            )
        return self


def is_streamed(section: TeacherSection, recipe: Recipe) -> bool:
    """Whether a teacher has Ray actors of its own; a student's own base and what has a home already have none."""
    return recipe.ray.teachers > 0 and section.model is not None and section.model != OWN_BASE


def scored_at(section: TeacherSection, recipe: TaskRecipe) -> float:
    """The temperature of a teacher's scores: the loss's, but ALM reads plain probabilities and applies its own."""
    return 1.0 if section.loss.name == "alm" else recipe.loss.temperature
