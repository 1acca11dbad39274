"""Recipes: one YAML file is one run.

A recipe is a tree of frozen pydantic models without room for unknown keys. Everything that is wrong with one is said at
once, each with the nearest valid key, before anything is loaded. ``a.b=c`` on the command line overrides a value. The
task decides which class reads the file; each task adds its own sections to :class:`Recipe`. What is written down of a
recipe holds no secrets: keys and tokens stay with whoever runs it.
"""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from spanwise.train.nearest import did_you_mean
from spanwise.train.train_section import wrong_arguments

# Where each task's recipe class and builder live; imported when a recipe asks for them.
TASK_MODULES = {"distill": "spanwise.train.distill", "vlm": "spanwise.train.vlm", "mlm": "spanwise.train.mlm"}

# Keys whose text is a secret. Names of special tokens (bos_token, image_token) and counts of tokens are none.
SECRET_KEY = re.compile(
    r"^(?:.*[_-])?(?:(?:hub|hf|auth|access|api|bearer|session|refresh)[_-]?token|api[_-]?key|(?:access|secret)[_-]?key"
    r"|secret|password|passwd|passphrase|credentials?|authorization|cookie)$|^token$",
    re.IGNORECASE,
)
# The user and password of an address, as in https://user:password@host.
USER_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")
SECRETS_LEFT_OUT = (
    "# Tokens and passwords were left out. Give them again where no login or environment variable does.\n"
)


class RecipeError(ValueError):
    """A recipe that cannot be run; the message lists everything that is wrong with it."""


class Section(BaseModel):
    """A part of a recipe: frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class TokenizerFromCorpus(Section):
    """A byte-level BPE trained on the training text before the run, saved with the student."""

    vocab_size: int = Field(ge=260, description="Size of the vocabulary, special tokens included.")


class Student(Section):
    """What is trained."""

    model: str | dict[str, Any] = Field(
        description="Hub name, folder or GGUF file; or the fields of a model configuration (with model_type) to start "
        "from random weights."
    )
    tokenizer: str | TokenizerFromCorpus | None = Field(
        None,
        description="Hub name, folder, tokenizer.json or GGUF file; or {vocab_size: N} to train one. Default: model.",
    )
    peft: dict[str, Any] | None = Field(None, description="Fields of a peft.LoraConfig; default: full training.")
    merge: bool = Field(False, description="Save the model with its adapters merged in at the end.")
    embedding_learning_rate: float | None = Field(
        None, gt=0, description="Of the token embeddings and the head; with adapters, also trains them."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("float32", description="Type of the weights.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="More arguments of from_pretrained (attn_implementation, device_map, …)."
    )


class Data(Section):
    """What is trained on and what is held out."""

    train: str | list[str] = Field(description="Files (.jsonl .json .parquet .arrow .txt), folders or a hub data set.")
    eval: str | list[str] | None = Field(None, description="Held-out text; whole documents that are never trained on.")
    columns: dict[str, str] = Field(default_factory=dict, description="Our name → the column's name in the data.")
    stream: bool = Field(False, description="Read the corpus as a stream instead of indexing it first.")
    shuffle_buffer: int = Field(1_000, ge=1, description="Rows among which a stream is shuffled.")
    packing: bool = Field(False, description="Lay documents end to end, attention and loss kept apart.")
    context_length: int = Field(1_024, ge=2, description="Tokens per row.")
    window_bytes: int | None = Field(
        None, ge=16, description="Cut text documents into windows of at most this many bytes, at characters."
    )


class Evaluation(Section):
    """How the student is measured."""

    window_bytes: int = Field(2_048, ge=16, description="Bytes of context and score per window.")
    stride_bytes: int = Field(1_024, ge=1, description="Bytes by which windows advance.")
    batch_size: int = Field(8, ge=1, description="Windows per forward.")
    documents: int | None = Field(None, ge=1, description="Measure the first N documents only.")

    @model_validator(mode="after")
    def _windows_leave_nothing_out(self) -> Evaluation:
        if self.stride_bytes > self.window_bytes:
            raise ValueError(
                f"stride_bytes is {self.stride_bytes} and window_bytes {self.window_bytes}; expected a stride of at "
                "most the window"
            )
        return self


class RaySection(Section):
    """How many Ray workers run the job, and where."""

    workers: int = Field(0, ge=0, description="0 runs in this process.")
    teachers: int = Field(
        0, ge=0, description="Actors for each teacher that is a model; 0: every worker holds the teachers itself."
    )
    address: str | None = Field(None, description="Address of a running cluster; default: a local one is started.")

    @model_validator(mode="after")
    def _teachers_need_workers(self) -> RaySection:
        if self.teachers and not self.workers:
            raise ValueError(f"teachers is {self.teachers} and workers 0; expected workers of at least 1")
        return self


class Recipe(Section):
    """The keys that every task shares."""

    task: str
    seed: int = Field(0, ge=0, lt=2**32)
    output: str = Field(description="Folder of the run: checkpoints, model, log.jsonl, report.html.")
    student: Student
    data: Data
    train: dict[str, Any] = Field(default_factory=dict, description="Names of transformers.TrainingArguments.")
    eval: Evaluation = Evaluation()
    ray: RaySection = RaySection()

    @field_validator("train")
    @classmethod
    def _names_are_training_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        wrong = wrong_arguments(arguments)
        if wrong:
            raise ValueError("\n".join(wrong))
        return arguments

    @model_validator(mode="after")
    def _actors_have_a_teacher(self) -> Recipe:
        if self.ray.teachers and self.task != "distill":
            raise ValueError(f"ray.teachers is set and the task '{self.task}' has no teachers; take it out")
        return self


def load_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
    """Read a YAML file, apply ``a.b=c`` overrides, validate everything.

    Raises:
        RecipeError: with every mistake in the file, each with where it is and the nearest valid key.
    """
    file = Path(path)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "is not there"
        raise FileNotFoundError(
            f"the recipe '{file}' {what}; expected a YAML file. The path is probably misspelt, or a name from the "
            "list was given. Fix: spanwise recipes list names the ones that come with Spanwise, and spanwise recipes "
            "show NAME > my.yaml copies one."
        )
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"'{file}' holds bytes that are no UTF-8 (byte {error.start}); expected a YAML recipe. It is probably "
            "another kind of file. Fix: name the recipe."
        ) from None
    return parse_recipe(read_yaml(text, name=str(file)), overrides, name=str(file))


def parse_recipe(content: Mapping[str, Any], overrides: Iterable[str] = (), *, name: str = "recipe") -> Recipe:
    """Validate a recipe that is already a mapping."""
    merged = _copy(content)
    for override in overrides:
        _apply(merged, override)
    kind = recipe_class(merged.get("task"), name=name)
    try:
        return kind.model_validate(merged)
    except ValidationError as error:
        raise RecipeError(_explain(error, kind, name)) from None


def recipe_class(task: object, *, name: str = "recipe") -> type[Recipe]:
    """The recipe class of a task."""
    if not isinstance(task, str) or task not in TASK_MODULES:
        raise RecipeError(
            f"{name}: task is {task!r}; expected one of {', '.join(TASK_MODULES)}"
            f"{did_you_mean(task, TASK_MODULES) or '.'} The key was probably left out or misspelt. "
            "Fix: begin the file with 'task: distill'."
        )
    module: Any = importlib.import_module(TASK_MODULES[task])
    kind: type[Recipe] = module.TaskRecipe
    return kind


def without_secrets(content: Any) -> Any:
    """The same content without tokens and passwords, for files that are kept and shared.

    >>> without_secrets({"train": {"hub_token": "hf_x", "bf16": True}, "url": "https://me:word@host/v1"})
    {'train': {'bf16': True}, 'url': 'https://host/v1'}
    """
    if isinstance(content, Mapping):
        return {
            key: without_secrets(value)
            for key, value in content.items()
            if not (isinstance(value, str) and SECRET_KEY.match(str(key)))
        }
    if isinstance(content, list):
        return [without_secrets(value) for value in content]
    return USER_IN_ADDRESS.sub("", content) if isinstance(content, str) else content


def public_content(recipe: Recipe) -> dict[str, Any]:
    """A resolved recipe as plain values, without its secrets."""
    content: dict[str, Any] = without_secrets(recipe.model_dump(mode="json"))
    return content


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe without its secrets, complete or not at all; it can be run as it stands."""
    content = public_content(recipe)
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    if content != recipe.model_dump(mode="json"):
        text = SECRETS_LEFT_OUT + text
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as staging:
        staging.write(text)
    Path(staging.name).chmod(0o644)
    Path(staging.name).replace(path)


class _RecipeYaml(yaml.SafeLoader):
    """Safe YAML that reads 1e-3 as a number and ``no`` as a word, and refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise RecipeError(
                f"line {node.start_mark.line + 1}: {', '.join(twice)} stands more than once in one section; expected "
                "each key once. A block was probably copied. Fix: keep one of them."
            )
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 reads no, off, yes and on as booleans, which turns "eval_strategy: no" into something else.
_RecipeYaml.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_RecipeYaml.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_RecipeYaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*)(?:\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def read_yaml(text: str, *, name: str) -> dict[str, Any]:
    """Parse YAML text that must hold a mapping."""
    loader = _RecipeYaml(text)
    try:
        content = loader.get_single_data()
    except yaml.YAMLError as error:
        raise RecipeError(
            f"{name} is not valid YAML ({' '.join(str(error).split())}); expected keys and values. The indentation or "
            "a colon is probably off there. Fix: correct that line."
        ) from None
    finally:
        loader.dispose()
    if not isinstance(content, dict):
        raise RecipeError(
            f"{name} holds {type(content).__name__} at the top; expected a mapping of sections. The file is probably "
            "empty or a list. Fix: begin it with 'task: distill'."
        )
    return content


def _apply(content: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise RecipeError(
            f"the override '{override}' has no '='; expected a.b=c. A space was probably put around it. "
            "Fix: write for example train.learning_rate=1e-4."
        )
    value = read_yaml(f"value: {text}" if text else "value:", name=f"override '{override}'")["value"]
    place: Any = content
    *parents, last = path.split(".")
    for depth, part in enumerate(parents):
        place = _step(place, part, ".".join(parents[: depth + 1]), override)
    if isinstance(place, list):
        _step(place, last, path, override)
        place[int(last)] = value
    else:
        place[last] = value


def _step(place: Any, part: str, where: str, override: str) -> Any:
    if isinstance(place, list):
        if not part.isdigit() or int(part) >= len(place):
            raise RecipeError(
                f"the override '{override}' asks for '{where}', but that list has {len(place)} entries; expected a "
                "number from 0. Fix: name an entry that exists."
            )
        return place[int(part)]
    if place.get(part) is None:
        place[part] = {}
    if not isinstance(place[part], (dict, list)):
        raise RecipeError(
            f"the override '{override}' goes through '{where}', which holds the value {place[part]!r}; expected a "
            "section. The path is probably one step too long. Fix: override the value itself."
        )
    return place[part]


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_copy(entry) for entry in value]
    return value


def _explain(error: ValidationError, kind: type[Recipe], name: str) -> str:
    lines = []
    places = [_where(entry["loc"]) for entry in error.errors()]
    for entry, where in zip(error.errors(), places, strict=True):
        if entry["type"] == "string_type" and any(other.startswith(f"{where}.") for other in places):
            continue  # the other branch of "a name or a section" says what is wrong
        if entry["type"] == "extra_forbidden":
            known = _keys_at(kind, entry["loc"][:-1])
            nearest = did_you_mean(str(entry["loc"][-1]), known) or f"; expected one of {', '.join(sorted(known))}"
            lines.append(f"{where}: unknown key{nearest}")
        elif entry["type"] == "missing":
            lines.append(f"{where}: missing")
        elif where == "train" and entry["type"] == "value_error":  # one line each, which names its own value
            lines += [f"train: {line}" for line in str(entry["ctx"]["error"]).splitlines()]
        elif entry["type"] == "literal_error":
            nearest = did_you_mean(entry["input"], re.findall(r"'([^']+)'", entry["ctx"]["expected"]))
            lines.append(f"{where} is {entry['input']!r}; expected one of {entry['ctx']['expected']}{nearest}")
        elif not where:  # of several sections together; the message names them
            lines.append(entry["msg"].removeprefix("Value error, "))
        else:
            given = repr(without_secrets(entry["input"]))
            shown = given if len(given) <= 60 else f"{given[:57]}…"
            lines.append(f"{where}: {entry['msg'].removeprefix('Value error, ')} (given: {shown})")
    several = f"{len(lines)} mistakes" if len(lines) > 1 else "1 mistake"
    listed = "\n".join(f"  {line}" for line in dict.fromkeys(lines))
    schema = f"spanwise recipes schema {kind.model_fields['task'].default}"
    fix = f"Something was probably mistyped or left out. Fix: correct it there; {schema} prints every key."
    return f"{name} has {several}:\n{listed}\n{fix}"


def _where(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location if not _is_union_branch(part))


def _is_union_branch(part: object) -> bool:
    return isinstance(part, str) and (part in ("str", "int", "TokenizerFromCorpus") or "[" in part)


def _keys_at(kind: type[BaseModel], location: tuple[int | str, ...]) -> set[str]:
    """The keys that a section knows, found by walking the field types along an error's location."""
    current: Any = kind
    for part in location:
        if isinstance(part, int) or _is_union_branch(part):
            continue
        field = current.model_fields.get(part)
        inner = _section_in(field.annotation) if field else None
        if inner is None:
            return set()
        current = inner
    return set(current.model_fields)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _section_in(inner)
        if found is not None:
            return found
    return None
