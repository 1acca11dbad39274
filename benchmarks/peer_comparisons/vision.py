"""Conversations with images: TRL's vision collator and transformers' assistant mask beside our collator.

Labels are compared with an oracle that counts bytes (``tests/reference/label_oracle.py``) on conversations made to go
wrong. TRL's and transformers' masks need generation marks in the template, which most released templates lack: they are
given a marked template here, their best case. A token is wrong if it is trained on without being the assistant's whole,
or is the assistant's and left out.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.peer_comparisons.row import Row, middle, plain, ratio, releases
from benchmarks.peer_process import Side, trl_python

# way → what it is called; each is asked of the side that has it.
WAYS = {
    "ours": "ours, proven",
    "assistant": "TRL, assistant_only_loss with a marked template",
    "default": "TRL, as it comes",
    "completion": "TRL, prompt and completion, last answers alone",
}
TIMED = {
    "assistant": "TRL, assistant_only_loss",
    "default": "TRL, every token a label",
    "mask": "transformers' template call with its assistant mask",
    "plain": "transformers' template call, no labels",
}


def compare(quick: bool) -> list[Row]:
    """Labels on conversations of eight or nine families, and seconds of a batch."""
    python = trl_python()
    with Side("peer_sides/vision_ours.py") as ours, Side("peer_sides/vision_trl.py", python) as theirs:
        said = releases(theirs.ask("versions", packages=["trl", "transformers", "torch", "pillow"]))
        return label_rows(ours, theirs, 2 if quick else 10, said) + time_rows(ours, theirs, quick, said)


def label_rows(ours: Side, theirs: Side, repeats: int, said: str) -> list[Row]:
    """The share of conversations with a wrong label, per way."""
    from benchmarks.peer_sides.vision_work import MARKED
    from tests.vlm import processors
    from tests.vlm.stress import rows as stress_rows

    counts: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
    for name in MARKED:
        processor = processors.build(name)
        chats = [row["conversation"] for row in stress_rows(name, repeats)]
        with tempfile.TemporaryDirectory() as folder:
            file = str(write_chats(Path(folder), chats))
            for way in WAYS:
                answers = (ours if way == "ours" else theirs).ask("labels", name=name, file=file, way=way)
                for chat, answer in zip(chats, answers, strict=True):
                    counts[way].update(verdict(name, processor, chat, answer, last=way == "completion"))
    rows = []
    for way, called in WAYS.items():
        found = counts[way]
        context = (
            f"{found['all']} conversations, {len(MARKED)} processors, tiny tokenizer; trained on what the assistant "
            f"did not say {found['too much']}, left out what it said {found['too little']}, refused "
            f"{found['refused']}; {said}"
        )
        rows.append(plain(f"conversations labelled wrong, {called}", found["wrong"] / found["all"], "", context))
    return rows


def verdict(name: str, processor: Any, chat: list[dict[str, Any]], answer: dict[str, Any], *, last: bool) -> list[str]:
    """What is to be counted of one conversation; ``last`` asks for the last answer alone."""
    from spanwise.vlm.tokens import media_token_ids
    from tests.reference.label_oracle import expected_labels
    from tests.vlm.rendered import RENDERERS

    if "error" in answer:
        return ["all", "refused"]
    pieces = RENDERERS[name][0](chat)
    if last:
        final = max(place for place, (_, said) in enumerate(pieces) if said)
        pieces = [(text, said and place == final) for place, (text, said) in enumerate(pieces)]
    try:
        expected = expected_labels(answer["ids"], processor.tokenizer, media_token_ids(processor), pieces)
    except AssertionError:
        return ["all", "wrong", "other tokens"]
    pairs = list(zip(answer["labels"], expected, strict=True))
    found = ["all"]
    if answer["labels"] != expected:
        found.append("wrong")
    if any(label != -100 and right == -100 for label, right in pairs):
        found.append("too much")
    if any(label == -100 and right != -100 for label, right in pairs):
        found.append("too little")
    return found


def write_chats(folder: Path, chats: list[list[dict[str, Any]]]) -> Path:
    """Conversations as JSON, images beside it."""
    images = 0
    plain_chats = json.loads(json.dumps(chats, default=lambda _: None))
    for chat, bare in zip(chats, plain_chats, strict=True):
        for message, copied in zip(chat, bare, strict=True):
            for part, target in zip(message["content"], copied["content"], strict=True):
                if part["type"] == "image":
                    target["image"] = f"{images}.png"
                    part["image"].convert("RGB").save(folder / target["image"])
                    images += 1
    file = folder / "chats.json"
    file.write_text(json.dumps(plain_chats))
    return file


def time_rows(ours: Side, theirs: Side, quick: bool, said: str) -> list[Row]:
    """Seconds of a batch of 16, ours and each other way in turn."""
    rows = []
    for name in ("llava",) if quick else ("llava", "qwen2_5_vl", "gemma3"):
        own: list[dict[str, float]] = []
        others: dict[str, list[dict[str, float]]] = {way: [] for way in TIMED}
        for _ in range(1 if quick else 3):
            own += ours.ask("collate", name=name, way="ours", repeats=3)
            for way, found in others.items():
                found += theirs.ask("collate", name=name, way=way, repeats=3)
        context = f"{name}, 16 conversations, one image of 640 × 480 each; {said}"
        for way, called in TIMED.items():
            told = middle(own, "seconds"), middle(others[way], "seconds")
            rows.append(ratio(f"collating a batch, ours / {called}", *told, "s of CPU", context))
    return rows
