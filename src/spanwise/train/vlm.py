"""The vision-language task: cross entropy on what the assistant said, images in the questions.

Held-out rows are measured by exact answers (every labelled token, the stop token included, is the model's first choice,
which is what greedy decoding would write) and once more with another row's image: a model that answers as well then has
not looked.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from spanwise.batch import BatchedDataDict, model_inputs
from spanwise.loading import load_auto
from spanwise.loss_parts import LossParts, Ratio
from spanwise.spans.chat import IGNORE_INDEX
from spanwise.train import data as corpus
from spanwise.train.digits import DIGITS, digit_rows
from spanwise.train.model_config import model_config
from spanwise.train.recipe import Recipe, Section, TokenizerFromCorpus
from spanwise.train.sharding import zero_for_all
from spanwise.train.student import DTYPES, with_adapters
from spanwise.train.task import ReportSection
from spanwise.vlm import VLMCollator
from spanwise.vlm.families import TOKEN_KEYS
from spanwise.vlm.inspect import tokens_of_row
from spanwise.vlm.media import copied_in_rgb, gather, medium_of, parts_of
from spanwise.vlm.tokens import NothingFitsError

ROWS_SHOWN = 3
ROWS_CHECKED = 64
COLOURS = {"label": "#bfe3c0", "media": "#cfd8f5", "padding": "#e6e6e6", "given": "transparent"}


class VisionSection(Section):
    """How conversations become batches."""

    labels: Literal["proven", "template", "search"] = Field("proven", description="See spanwise.vlm.VLMCollator.")
    max_pixels: int | None = Field(None, ge=28 * 28, description="Largest image, in pixels, for a fresh processor.")
    drop_overlong: bool = Field(False, description="Leave out and count rows longer than data.context_length.")
    sanitize: bool = Field(False, description="Break up special tokens that users typed.")


class TaskRecipe(Recipe):
    """A vision-language run."""

    task: Literal["vlm"] = "vlm"
    vision: VisionSection = VisionSection()

    @model_validator(mode="after")
    def _fresh_models_bring_a_tokenizer(self) -> TaskRecipe:
        if not isinstance(self.student.model, str) and not isinstance(self.student.tokenizer, TokenizerFromCorpus):
            raise ValueError(
                "student.model is a configuration; expected student.tokenizer={vocab_size: N}, which makes a processor "
                "too"
            )
        if self.data.stream:
            raise ValueError("data.stream is true; expected false, since images are read row by row anyway")
        return self


class ConversationRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows with "conversation": the built-in digits, or files with that column (image paths relative to here)."""

    def __init__(self, source: str | Sequence[str], columns: Mapping[str, str]) -> None:
        if find_spec("PIL") is None:
            raise ModuleNotFoundError(
                "the task vlm needs Pillow, which is not installed; expected it, since it reads the images. The extra "
                "was probably left out. Fix: pip install 'spanwise[vlm]'."
            )
        built_in = isinstance(source, str) and source.startswith(DIGITS)
        self.rows: Any = digit_rows(str(source)) if built_in else corpus.open_corpus(source)
        self.columns = dict(columns)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = corpus.rename_columns(self.rows[index], self.columns, index)
        if not isinstance(row.get("conversation"), list):
            raise ValueError(
                f"row {index} has the columns {', '.join(row)} and no conversation; expected a list of messages with "
                "role and content under that name. It is probably called otherwise, or this is plain text. Fix: "
                "data.columns.conversation=NAME, or the task distill for text."
            )
        return row | {"conversation": [_without_nones(message) for message in row["conversation"]]}

    def lengths(self) -> list[int]:
        """Characters of every row, for grouping rows of like length."""
        return [corpus.row_length(self[place]) for place in range(len(self))]


def _without_nones(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the empty keys that columnar files give every part."""
    content = message.get("content")
    if isinstance(content, list):
        content = [{key: value for key, value in part.items() if value is not None} for part in content]
    return {**message, "content": content}


def build(recipe: TaskRecipe, folder: Path) -> VisionTask:
    """Load or make processor, model and rows."""
    rows = ConversationRows(recipe.data.train, recipe.data.columns)
    held_out = None if recipe.data.eval is None else ConversationRows(recipe.data.eval, recipe.data.columns)
    for some in (rows, held_out):
        _check_first(some)
    processor = open_processor(recipe, rows)
    model = _model(recipe, processor)
    if recipe.student.peft is not None:
        model = with_adapters(model, recipe.student.peft)
    return VisionTask(recipe, model, processor, rows, held_out)


def _check_first(rows: ConversationRows | None) -> None:
    """Refuse rows that are no conversations, or that teach nothing, before a model is loaded."""
    if rows is None:
        return
    said = [
        message.get("role") for place in range(min(len(rows), ROWS_CHECKED)) for message in rows[place]["conversation"]
    ]
    if "assistant" not in said:
        raise ValueError(
            f"the first conversations have the roles {', '.join(sorted({str(role) for role in said})) or 'none'}; "
            "expected the assistant's turns among them, since they are what is trained on. The roles are probably "
            "called otherwise. Fix: call them user and assistant."
        )


def open_processor(recipe: TaskRecipe, rows: ConversationRows) -> Any:
    """The student's processor, or a small one made from the rows."""
    student = recipe.student
    if isinstance(student.tokenizer, TokenizerFromCorpus):
        from spanwise.train.vlm_processor import small_processor

        texts = [text for place in range(len(rows)) for text in _texts(rows[place])]
        pixels = recipe.vision.max_pixels or 56 * 56
        return small_processor([*texts, "user", "assistant", "system"], student.tokenizer.vocab_size, pixels=pixels)
    from transformers import AutoProcessor

    return load_auto(AutoProcessor, "processor", str(student.tokenizer or student.model))


def _texts(row: Mapping[str, Any]) -> list[str]:
    texts = []
    for message in row["conversation"]:
        content = message.get("content")
        texts += [content] if isinstance(content, str) else [part.get("text", "") for part in parts_of(message)]
    return [text for text in texts if text]


def _model(recipe: TaskRecipe, processor: Any) -> Any:
    from transformers import AutoModelForImageTextToText

    student = recipe.student
    if isinstance(student.model, str):
        options = {"dtype": DTYPES[student.dtype]} | student.options
        return load_auto(AutoModelForImageTextToText, "vision-language model", student.model, **options)
    tokenizer = processor.tokenizer
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{word}|>") for name, word in _MARKS.items()}
    text = {
        "vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    fields = student.model | {"text_config": text | student.model.get("text_config", {})}
    config = model_config(fields, ids)
    return AutoModelForImageTextToText.from_config(config, dtype=DTYPES[student.dtype])


class RunCollator(VLMCollator):
    """A run's collator: a batch whose rows are all too long becomes one that teaches nothing, and is counted.

    Otherwise a run over small batches would end at its first long row.
    """

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> BatchedDataDict:
        """Collate rows."""
        try:
            return super().__call__(rows)
        except NothingFitsError:
            if not self.settings.drop_overlong:
                raise
        said = [{"role": role, "content": [{"type": "text", "text": "."}]} for role in ("user", "assistant")]
        batch = super().__call__([{"conversation": said, "loss_multiplier": 0.0}])
        batch["left_out"] = {"overlong": len(rows)}
        return batch


def _positions_in(model: nn.Module | None) -> Callable[..., Any] | None:
    """The model's function that counts positions of media; an inspection has no model, and shows no positions."""
    if model is None:
        return _positions_of_text
    parts: Any = model.modules()
    return next((part.get_rope_index for part in parts if hasattr(part, "get_rope_index")), None)


def _positions_of_text(input_ids: Tensor) -> tuple[Tensor, None]:
    return torch.arange(input_ids.shape[1]).expand(3, 1, -1), None


def _refuse_other_attention(model: nn.Module) -> None:
    """The mask of a pack is one of bools, which sdpa obeys; eager attention would add it to its scores as 0 and 1."""
    config: Any = model.config
    attention = config.get_text_config()._attn_implementation
    if attention != "sdpa":
        raise ValueError(
            f"data.packing is true and the student's attention is {attention!r}; expected 'sdpa', the only one that "
            "obeys the mask of packed documents here. It was chosen in student.options, or the model has no other. "
            "Fix: student.options.attn_implementation=sdpa, or data.packing=false."
        )


_MARKS = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}


class VisionTask:
    """Model, processor, rows and measure of a vision-language run; see :class:`~spanwise.train.task.Task`."""

    best_metric = ("exact", True)
    scaled_terms: frozenset[str] = frozenset()

    def __init__(
        self, recipe: TaskRecipe, model: Any, processor: Any, rows: ConversationRows, held_out: ConversationRows | None
    ) -> None:
        self.recipe = recipe
        self.model: nn.Module = model
        self.processing_class = processor
        self.train_rows = rows
        self.held_out = held_out
        self.has_evaluation = held_out is not None
        self.weights = {"ce": 1.0}
        self.embedding_learning_rate = recipe.student.embedding_learning_rate
        section = recipe.vision
        options: dict[str, Any] = {
            "labels": section.labels, "max_length": recipe.data.context_length,
            "drop_overlong": section.drop_overlong, "sanitize": section.sanitize, "allow_unlabelled": True,
        }  # fmt: skip
        self.plain_collator = RunCollator(processor, **options)
        self.collator = self.plain_collator
        if recipe.data.packing:
            if model is not None:
                _refuse_other_attention(model)
            self.collator = RunCollator(processor, **options, packing="neat", get_rope_index=_positions_in(model))

    def counts(self, batch: Mapping[str, Any]) -> dict[str, Float[Tensor, ""]]:
        """Labelled tokens."""
        return {"ce": (batch["labels"] != IGNORE_INDEX).sum().float()}

    def losses(self, model: nn.Module, batch: Mapping[str, Any], scales: Mapping[str, float]) -> dict[str, LossParts]:
        """One forward; labels are shifted already."""
        inputs = model_inputs(batch)
        logits: Tensor = model(**inputs, use_cache=False).logits
        labels = batch["labels"]
        total = nn.functional.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        kept = labels != IGNORE_INDEX
        right = ((logits.argmax(-1) == labels) & kept).sum()
        metrics = {"ce/accuracy": Ratio(right.float(), kept.sum().float())}
        total = total + zero_for_all(model, has_media=not inputs.keys() <= TOKEN_KEYS)
        return {"ce": LossParts(total, kept.sum().float(), metrics).scaled(scales["ce"])}

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Nothing beyond the one term."""
        return {}

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Exact answers on held-out rows, with their own images and with another row's."""
        if self.held_out is None:
            return {}
        rows = [self.held_out[place] for place in range(len(self.held_out))]
        was_training = model.training
        model.eval()
        try:
            return {"exact": self._exact(model, rows), "wrong_image_exact": self._exact(model, with_other_images(rows))}
        finally:
            model.train(was_training)

    def _exact(self, model: nn.Module, rows: Sequence[dict[str, Any]]) -> float:
        size, right, asked = self.recipe.eval.batch_size, 0, 0
        device = next(model.parameters()).device
        for start in range(0, len(rows), size):
            batch = self.plain_collator(rows[start : start + size]).to(device)
            chosen = model(**model_inputs(batch), use_cache=False).logits.argmax(-1)
            labels = batch["labels"]
            answered = (labels != IGNORE_INDEX).any(dim=1)
            exact = ((chosen == labels) | (labels == IGNORE_INDEX)).all(dim=1)
            right += int((exact & answered).sum())
            asked += int(answered.sum())
        return right / asked if asked else 0.0

    def left_out(self) -> dict[str, int]:
        """Nothing before collation, which leaves out what is too long."""
        return {}

    def report_sections(self) -> list[ReportSection]:
        """The first rows, every token coloured by what it is."""
        rows = [self.train_rows[place] for place in range(min(ROWS_SHOWN, len(self.train_rows)))]
        page = coloured(self.plain_collator(rows), rows, self.processing_class)
        return [ReportSection("The first rows, token by token", page)]

    def close(self) -> None:
        """There is nothing to free."""


def with_other_images(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same questions and answers, each with the images of the next row whose answer is another one."""
    answers = [_texts({"conversation": row["conversation"][-1:]}) for row in rows]
    changed = []
    for place, row in enumerate(rows):
        others = (place + step for step in range(1, len(rows)))
        other = next((o % len(rows) for o in others if answers[o % len(rows)] != answers[place]), place)
        images = [medium_of(part, "image") for message in rows[other]["conversation"] for part in parts_of(message)]
        changed.append({**row, "conversation": _with_images(row["conversation"], [i for i in images if i is not None])})
    return changed


def _with_images(conversation: Sequence[Mapping[str, Any]], images: list[Any]) -> list[dict[str, Any]]:
    left = list(images)
    messages = []
    for message in conversation:
        content = message.get("content")
        if isinstance(content, list):
            content = [
                {"type": "image", "image": left.pop(0)} if part.get("type") == "image" and left else part
                for part in content
            ]
        messages.append({**message, "content": content})
    return messages


def coloured(batch: BatchedDataDict, rows: Sequence[Mapping[str, Any]], processor: Any) -> str:
    """HTML of a batch's rows: labels green, media blue with the image in front, padding grey."""
    from spanwise.report.page import escape

    legend = " ".join(f'<span style="background:{colour}">{kind}</span>' for kind, colour in COLOURS.items())
    lines = [f"<p>{legend}</p>"]
    shown = gather(copied_in_rgb([row["conversation"] for row in rows], open_files=True)).images
    for row, images in enumerate(shown):
        left, before, pieces = list(images), "", []
        for text, kind in tokens_of_row(batch, row, processor):
            if kind == "media" != before and left:
                pieces.append(f'<img alt="image" style="height:56px" src="{_png(left.pop(0))}">')
            pieces.append(f'<span style="background:{COLOURS[kind]}" title="{kind}">{escape(text)}</span>')
            before = kind
        lines.append(f'<pre style="white-space:pre-wrap">{"".join(pieces)}</pre>')
    return "\n".join(lines)


def _png(image: Any) -> str:
    small = image.copy()
    small.thumbnail((224, 224))
    with io.BytesIO() as file:
        small.save(file, format="PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
