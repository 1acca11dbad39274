"""Recipes of every task whose rows are hard to deal out: five of very different lengths.

Two ranks then have unlike counts, and in the epoch's last step the second one has no row at all.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from spanwise.train.recipe import parse_recipe
from spanwise.train.run import train
from tests.train import runs

ROWS = 5


def texts(folder: Path) -> str:
    """Five rows, from a few bytes to two hundred."""
    path = folder / "five.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {i} " + "word " * (8 * i)}) + "\n" for i in range(ROWS)))
    return str(path)


def streamed(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same rows as a stream, rows without text around them."""
    path = folder / "stream.jsonl"
    path.write_text('{"text": ""}\n' + Path(texts(folder)).read_text() + '{"text": " "}\n' * 2)
    data = content["data"] | {"train": str(path), "stream": True, "shuffle_buffer": 3}
    return content | {"data": data}


def conversations(folder: Path) -> str:
    """Three rows with images of unlike sizes, two without."""
    rows = []
    for place in range(ROWS):
        parts: list[dict[str, str]] = [{"type": "text", "text": "what is this? " * (1 + 2 * place)}]
        if place < 3:
            image = folder / f"{place}.png"
            Image.new("RGB", (28 * (1 + place), 28), (80 * place, 30, 200)).save(image)
            parts.insert(0, {"type": "image", "image": str(image)})
        answer = [{"type": "text", "text": "it is " + "very " * (3 * place) + "blue"}]
        rows.append({"conversation": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]})
    path = folder / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def distill(folder: Path, teacher: Path, fused: bool) -> dict[str, Any]:
    content = runs.recipe(folder, teacher)
    content["data"] |= {"train": texts(folder), "window_bytes": None}
    content["loss"] = {"fused": fused, "dynamic": True}
    return content


def vision(folder: Path) -> dict[str, Any]:
    content = yaml.safe_load((runs.ROOT / "recipes" / "vlm-digits.yaml").read_text())
    content["data"] = {"train": conversations(folder), "context_length": 256}
    del content["eval"]
    return content


def masked(folder: Path) -> dict[str, Any]:
    sizes = {"d_model": 16, "num_layers": 1, "nhead": 2, "rotary_emb_dim": 8, "dropout": 0.0, "max_length": 256}
    return {
        "task": "mlm",
        "student": {"model": {"model_type": "spanwise_mlm"} | sizes, "tokenizer": {"vocab_size": 300}},
        "data": {"train": texts(folder), "context_length": 256},
    }


def alone(content: dict[str, Any], output: Path) -> dict[str, Any]:
    """What one process gives that takes four rows at once."""
    arguments = runs.recipe(output)["train"]
    return train(parse_recipe(copy.deepcopy(content) | {"output": str(output), "train": arguments}))


def dealt(content: dict[str, Any], output: Path, **train_arguments: Any) -> dict[str, Any]:
    """The same run for two processes, which take one row each, twice per step (gradient accumulation)."""
    arguments = runs.recipe(output)["train"] | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    return copy.deepcopy(content) | {"output": str(output), "train": arguments | train_arguments}
