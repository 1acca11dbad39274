"""Alignment against tokenization: the figures that the aligner is held to.

One thread, medians of CPU time, both sides interleaved in one run. The floor is tokenizing the same texts with both
tokenizers, which a collator has to do anyway. The peer is a dynamic program over canonicalised token strings, written
here. What importing the package costs is measured here, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.record import record
from spanwise.loading import load_tokenizer
from spanwise.xtoken import TokenAligner
from spanwise.xtoken.tokenizing import rectangle
from tests.fetch import tokenizer_folder
from tests.reference.alignment import boundaries, is_nfc, spans

LENGTH = 2048
PROSE = " ".join(topics[name] for name in sorted(topics))
BYTES = 9_500  # about 2,048 tokens of this prose
NFD = unicodedata.normalize("NFD", "Été à l'école, une naïve façade déjà vue; Ünïcödé, Straße, coöperate, Việt Nam. ")


Inputs = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


class Pair:
    """Two tokenizers and their aligner."""

    def __init__(self, student: str, teacher: str) -> None:
        self.student, self.teacher = (load_tokenizer(tokenizer_folder(name)) for name in (student, teacher))
        self.aligner = TokenAligner(self.student, self.teacher, byte_offsets=True)

    def tokenize(self, texts: list[str]) -> tuple[list[list[int]], list[list[int]]]:
        options = {"truncation": True, "max_length": LENGTH, "add_special_tokens": False}
        return self.student(texts, **options)["input_ids"], self.teacher(texts, **options)["input_ids"]

    def inputs(self, texts: list[str]) -> Inputs:
        student, teacher = self.tokenize(texts)
        (student_ids, student_mask), (teacher_ids, teacher_mask) = (
            rectangle(rows, 0, LENGTH, 1) for rows in (student, teacher)
        )
        return (
            student_ids,
            teacher_ids,
            {"student_attention_mask": student_mask, "teacher_attention_mask": teacher_mask},
        )

    def align(self, inputs: Inputs) -> object:
        return self.aligner.align(inputs[0], inputs[1], **inputs[2])


def medians(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median milliseconds of both, taken in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 2):
        for job, seen in zip((first, second), times, strict=True):
            begin = time.process_time()
            job()
            if turn >= 2:
                seen.append(1e3 * (time.process_time() - begin))
    return statistics.median(times[0]), statistics.median(times[1])


def prose(batch: int) -> list[str]:
    return [PROSE[row * BYTES : (row + 1) * BYTES] for row in range(batch)]


def ratio_row(figure: str, pair: Pair, texts: list[str], target: float, rounds: int) -> dict[str, object]:
    """Aligning the texts in per cent of tokenizing them."""
    inputs = pair.inputs(texts)
    tokenizing, aligning = medians(partial(pair.tokenize, texts), partial(pair.align, inputs), rounds)
    share = 100 * aligning / tokenizing
    context = f"{aligning:.2f} ms against {tokenizing:.1f} ms"
    return row(figure, share, "% of tokenizing", f"<= {target:g}", share <= target, context)


def string_aligner(student: list[str], teacher: list[str]) -> int:
    """Cost of the best alignment of token strings where up to four tokens of one side may equal one of the other."""
    previous = list(range(len(teacher) + 1))
    table = [previous]
    for i in range(1, len(student) + 1):
        row = [i]
        for j in range(1, len(teacher) + 1):
            best = 1 + min(table[i - 1][j], row[j - 1], table[i - 1][j - 1])
            for size in range(1, 5):
                if size <= j and "".join(teacher[j - size : j]) == student[i - 1]:
                    best = min(best, table[i - 1][j - size])
                if size <= i and "".join(student[i - size : i]) == teacher[j - 1]:
                    best = min(best, (table[i - size] if size else row)[j - 1])
            row.append(best)
        table.append(row)
    return table[-1][-1]


def against_strings(pair: Pair) -> dict[str, object]:
    """The string aligner on one row of a quarter of the length, once; its cost is quadratic."""
    text = PROSE[: BYTES // 8]
    (student,), (teacher,) = pair.tokenize([text])
    left, right = pair.student.convert_ids_to_tokens(student), pair.teacher.convert_ids_to_tokens(teacher)
    begin = time.process_time()
    string_aligner(left, right)
    slow = 1e3 * (time.process_time() - begin)
    ids: Inputs = torch.tensor([student]), torch.tensor([teacher]), {}
    fast, _ = medians(partial(pair.align, ids), partial(pair.align, ids), 5)
    context = f"one row of {len(student)} tokens: {slow:.0f} ms against {fast:.2f} ms; grows with the length"
    return {
        "figure": "string DP aligner / ours",
        "value": slow / fast,
        "unit": "x",
        "target": "",
        "reached": "-",
        "context": context,
    }


def judged(name: str, pair: Pair, texts: list[str], least: tuple[float, float]) -> list[dict[str, object]]:
    """Claims against the oracle: wrong pairs, coverage, and the share of common boundaries."""
    wrong = pairs = covered = tokens = ours = common = 0
    for text in texts:
        student, teacher = (side[0] for side in pair.tokenize([text]))
        found = pair.aligner.align(torch.tensor([student]), torch.tensor([teacher]))
        composed = is_nfc(pair.student) or is_nfc(pair.teacher)
        mine = boundaries(pair.student, text, spans(pair.student, text, student), composed)
        theirs = boundaries(pair.teacher, text, spans(pair.teacher, text, teacher), composed)
        edges: set[int | None] = set()
        for pair_id in found.pair_is_correct[0].nonzero().flatten().tolist():
            left = (found.student_chunk_id[0] == pair_id).nonzero().flatten().tolist()
            right = (found.teacher_chunk_id[0] == pair_id).nonzero().flatten().tolist()
            here, there = (mine[left[0]][0], mine[left[-1]][1]), (theirs[right[0]][0], theirs[right[-1]][1])
            wrong += here != there or None in here
            covered += len(left)
            edges |= set(here)
            pairs += 1
        both = {p for s in mine for p in s} & {p for s in theirs for p in s} - {None}
        tokens, ours, common = tokens + len(student), ours + len(edges & both), common + len(both)
    share, finest = 100 * covered / tokens, 100 * ours / common
    return [
        row(f"{name}: wrong claims", float(wrong), "pairs", "0", wrong == 0, f"of {pairs}"),
        row(f"{name}: in a correct chunk", share, "%", f">= {least[0]}", share >= least[0], f"{tokens} tokens"),
        row(f"{name}: finest", finest, "%", f">= {least[1]}", finest >= least[1], f"{common} common boundaries"),
    ]


def row(figure: str, value: float, unit: str, target: str, reached: bool, context: str) -> dict[str, object]:
    return {
        "figure": figure,
        "value": value,
        "unit": unit,
        "target": target,
        "reached": "yes" if reached else "no",
        "context": context,
    }


def importing() -> dict[str, object]:
    """What `import spanwise` costs beside `import torch`, each in fresh processes."""
    times: dict[str, list[float]] = {"import spanwise": [], "import torch": []}
    for _ in range(3):
        for code, seen in times.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            seen.append(time.perf_counter() - begin)
    ours, floor = (statistics.median(seen) for seen in times.values())
    return row("import spanwise", ours, "s", "", True, f"import torch alone: {floor:.2f} s") | {"reached": "-"}


def samples() -> list[str]:
    from tests.xtoken.test_align_hard_cases import CASES

    return [*CASES.values(), *(PROSE[start : start + 1500] for start in range(0, 30_000, 6_000))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 7 if parser.parse_args().quick else 21
    torch.set_num_threads(1)
    exact, composing = Pair("llama3_2", "deepseek_v3"), Pair("llama3_2", "qwen3")
    marks, dummy = Pair("gemma2", "llama3_2"), Pair("llama2", "llama3_2")
    rows = []
    rows.append(ratio_row("prose, byte-exact pair, B = 8", exact, prose(8), 5, rounds))
    rows.append(ratio_row("prose, byte-exact pair, B = 2", exact, prose(2), 10, rounds))
    usual = exact.inputs(prose(8))
    for figure, texts in (("repetitive text", ["ab " * 4096] * 8), ("short text, long window", ["A short one. "] * 8)):
        inputs = exact.inputs(texts)
        mine, same = medians(partial(exact.align, inputs), partial(exact.align, usual), rounds)
        context = f"{mine:.2f} ms against {same:.2f} ms"
        rows.append(row(f"{figure} / prose", mine / same, "x", "<= 2", mine / same <= 2, context))
    for figure, pair, texts in (
        ("NFD text, NFC tokenizer on one side", composing, [NFD * 120] * 8),
        ("literal ▁, SentencePiece on one side", marks, ["the ▁cat▁ sat a▁b on " * 450] * 8),
        ("dummy prefix on one side", dummy, prose(8)),
    ):
        rows.append(ratio_row(figure, pair, texts, 100, rounds))
    rows.append(against_strings(exact))
    rows += judged("byte-exact pair", exact, samples(), (100, 100))
    rows += judged("NFC pair", composing, samples(), (99.5, 99))
    rows += judged("dummy-prefix pair", dummy, samples(), (99.5, 99))
    rows.append(importing())
    record("align", rows)


if __name__ == "__main__":
    main()
