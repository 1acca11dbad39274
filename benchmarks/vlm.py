"""Vision-language collation: wrong labels, the price of proven ones, how full packs are, and what a batch costs.

The other side of the label figures is the two searches that other collators use (``labels="search"`` and
``"template"``), on the same conversations. The price of labels is measured against the same collation without them.
``--quick`` measures less of everything. TRL's collator is compared in ``peers.py``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.peer_sides.vision_work import batch_of, released
from benchmarks.record import record
from spanwise.loading import load_tokenizer
from spanwise.spans.chat import AssistantSpans, UnprovenSpanError
from spanwise.spans.pack import pack_documents
from spanwise.vlm import VLMCollator
from spanwise.vlm.labels import labels_of_row
from spanwise.vlm.media import copied_in_rgb
from spanwise.vlm.pipeline import _as_tensors, template_source
from spanwise.vlm.tokens import media_token_ids
from tests.fetch import tokenizer_folder
from tests.reference.label_oracle import expected_labels
from tests.vlm import processors
from tests.vlm.rendered import RENDERERS
from tests.vlm.stress import rows as stress_rows

torch.set_num_threads(1)
Row = dict[str, Any]


def label_rows(repeats: int) -> list[Row]:
    """How many conversations of the stress set each way of labelling gets wrong."""
    wrong, refused, total = dict.fromkeys(("proven", "template", "search"), 0), 0, 0
    for name in processors.REAL:
        processor = processors.build(name)
        media = media_token_ids(processor)
        collators: dict[str, VLMCollator] = {
            kind: VLMCollator(processor, labels=kind, allow_unlabelled=True) for kind in wrong
        }
        for row in stress_rows(name, repeats):
            total += 1
            pieces = RENDERERS[name][0](row["conversation"])
            for kind, collator in collators.items():
                try:
                    document = collator.document(row)
                except UnprovenSpanError:
                    refused += 1
                    continue
                expected = expected_labels(document["input_ids"].tolist(), processor.tokenizer, media, pieces)
                wrong[kind] += document["labels"].tolist() != expected
    context = f"{total} conversations, {len(processors.REAL)} real processors, tiny tokenizer"
    return [
        figure("conversations labelled wrong, proven", wrong["proven"] / total, "", 0, wrong["proven"] == 0, context),
        figure("conversations refused, proven", refused / total, "", "≤ 0.01", refused <= 0.01 * total, context),
        figure("conversations labelled wrong, by role markers", wrong["template"] / total, "", "-", None, context),
        figure("conversations labelled wrong, by search", wrong["search"] / total, "", "-", None, context),
    ]


def figure(name: str, value: Any, unit: str, target: Any, reached: bool | None, context: str = "") -> Row:
    said = "-" if reached is None else "yes" if reached else "no"
    return {"figure": name, "value": value, "unit": unit, "target": target, "reached": said, "context": context}


def seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def median_of(parts: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each part, interleaved."""
    for work in parts.values():
        work()
    taken: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, work in parts.items():
            taken[name].append(seconds(work))
    return {name: statistics.median(values) for name, values in taken.items()}


def cost_rows(name: str, size: tuple[int, int], rounds: int, *, target: bool) -> list[Row]:
    """Samples per second, and where the time goes; the labels' part is rendering twice, offsets and their mapping."""
    processor = released(name) if target else processors.build(name)
    rows = batch_of(16, size)
    collator = VLMCollator(processor)
    source, find = template_source(processor), AssistantSpans(template_source(processor))
    conversations = copied_in_rgb([row["conversation"] for row in rows])
    texts, spans = zip(*(find(conversation) for conversation in conversations), strict=True)
    images = [[conversation[0]["content"][0]["image"]] for conversation in conversations]

    def process(**more: Any) -> dict[str, Any]:
        media = {"images": images, "images_kwargs": {"return_tensors": "pt"}}
        return _as_tensors(processor(text=list(texts), **media, padding=True, padding_side="right", **more))

    output = process(return_offsets_mapping=True, return_text_replacement_offsets=True)

    def label() -> None:
        for row, text in enumerate(texts):
            labels_of_row(
                output["input_ids"][row], output["attention_mask"][row], text, spans[row],
                offsets=output["offset_mapping"][row], replacements=output["text_replacement_offsets"][row],
                processor=processor,
            )  # fmt: skip

    took = median_of(
        {
            "all": lambda: collator(rows),
            "rendering": lambda: [source.apply_chat_template(chat, tokenize=False) for chat in conversations],
            "spans": lambda: [find(chat) for chat in conversations],
            "processor": process,
            "offsets": lambda: process(return_offsets_mapping=True, return_text_replacement_offsets=True),
            "images": lambda: processor.image_processor(images, return_tensors="pt"),
            "tokens": lambda: processor.tokenizer(list(texts)),
            "labels": label,
        },
        rounds,
    )
    labels = took["spans"] - took["rendering"] + max(took["offsets"] - took["processor"], 0.0) + took["labels"]
    parts = {"images": took["images"], "tokens": took["tokens"], "labels": labels, "rendering": took["rendering"]}
    shares = {part: value / took["all"] for part, value in parts.items()}
    shares["padding and the rest"] = 1 - sum(shares.values())
    split = ", ".join(f"{part} {value:.0%}" for part, value in shares.items())
    family = f"{collator.family.name}, {size[0]} × {size[1]} images"
    if not target:
        family += " made tiny"
    share = shares["labels"]
    return [
        figure(f"{family}: samples", len(rows) / took["all"], "/s", "-", None, split),
        figure(f"{family}: share of labels", share, "", "≤ 0.12" if target else "-", share <= 0.12 if target else None,
               "offsets included, CPU time, one thread"),
    ]  # fmt: skip


def peer_rows(rounds: int) -> list[Row]:
    """transformers' own padding of the same rows, beside ours."""
    rows = batch_of(16, (640, 480))
    processor = processors.build("llava_onevision")
    ours = VLMCollator(processor)
    chats = copied_in_rgb([row["conversation"] for row in rows])

    def stock() -> Any:
        return processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"padding": True}
        )

    took = median_of({"ours": lambda: ours(rows), "transformers": stock}, rounds)
    name = "time beside transformers' own template call, which makes no labels"
    told = "LLaVA-OneVision, 16 rows; TRL's collator: benchmarks/peers.py"
    return [figure(name, took["ours"] / took["transformers"], "×", "-", None, told)]


SCRIPTS = {
    "English": "The quick brown fox jumps over the lazy dog and runs into the deep dark wood. ",
    "Chinese": "敏捷的棕色狐狸跳过了懒狗，跑进了幽深的树林里去了。",
    "JSON": '{"id": 17, "tags": ["a", "b"], "score": 0.125, "nested": {"x": null}} ',
    "mixed": "Ответ: 42 — شكرا 🙂 naïve café 你好 x=1; ",
}


def pack_rows(documents: int) -> list[Row]:
    """Fill of packs of 1,024 tokens and what is left out, by lengths that are counted and by characters // 3."""
    tokenizer = load_tokenizer(tokenizer_folder("qwen2_5"))
    found = []
    for name, sentence in SCRIPTS.items():
        generator = torch.Generator().manual_seed(0)
        most = 900 * len(sentence) // len(tokenizer(sentence)["input_ids"])
        sizes = torch.randint(1, most, (documents,), generator=generator).tolist()
        texts = [(sentence * (size // len(sentence) + 1))[:size] for size in sizes]
        lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
        bins = pack_documents(lengths, 1024)
        fills = [sum(lengths[document] for document in row) / 1024 for row in bins.rows]
        fill = statistics.mean(fills[:-1] or fills)
        guessed = pack_documents([len(text) // 3 for text in texts], 1024)
        lost = sum(_lost([lengths[document] for document in row], 1024) for row in guessed.rows)
        context = f"{documents} documents, Qwen2.5 tokens; planned by characters // 3: {lost / documents:.0%} left out"
        found.append(figure(f"fill of packs at 1,024, {name}", fill, "", "≥ 0.98", fill >= 0.98, context))
        found.append(figure(f"left out of packs, {name}", len(bins.too_long), "documents", 0, not bins.too_long))
    return found


def _lost(lengths: list[int], width: int) -> int:
    """Documents that a row planned for too few tokens has no room for."""
    return sum(total > width for total in itertools.accumulate(lengths))


def digits_rows() -> list[Row]:
    """Exact answers of the recipe, and with another row's image."""
    import tempfile

    from spanwise.train.recipe import load_recipe
    from spanwise.train.run import train

    recipe = Path(__file__).parents[1] / "recipes" / "vlm-digits.yaml"
    torch.set_num_threads(2)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = train(load_recipe(recipe, [f"output={folder}/run"]))
    took = time.perf_counter() - began
    torch.set_num_threads(1)
    exact, other = result["exact"], result["wrong_image_exact"]
    return [
        figure("digits: exact answers", exact, "", "≥ 0.93", exact >= 0.93, "600 steps × 32, 359 held-out images"),
        figure("digits: with another row's image", other, "", "≤ 0.20", other <= 0.20),
        figure("digits: the whole run", took, "s", "≤ 120", took <= 120, "two threads, evaluation and report included"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rows = label_rows(2 if quick else 10)
    for name in ("qwen2_5_vl",) if quick else ("qwen2_5_vl", "llava", "gemma3"):
        rows += cost_rows(name, (640, 480), 3 if quick else 7, target=True)
    for name in ("qwen3_vl",) if quick else ("qwen3_vl", "llava_onevision", "internvl", "idefics3"):
        rows += cost_rows(name, (112, 112), 3 if quick else 7, target=False)
    rows += peer_rows(3 if quick else 9)
    rows += pack_rows(200 if quick else 2_000)
    if not quick:
        rows += digits_rows()
    record("vlm", rows)


if __name__ == "__main__":
    main()
