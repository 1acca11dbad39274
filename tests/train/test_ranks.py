"""Every task on two processes gives the curve of one, step by step.

Rows are of very different lengths and fewer than two steps can deal out, so that ranks have unlike counts and the
second rank's last batch holds no row at all.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image

from spanwise.train.recipe import parse_recipe
from spanwise.train.run import train
from tests.train import runs
from tests.train.two_ranks import on_two_ranks

ROWS = 5


def texts(folder: Path) -> str:
    """Five rows, from a few bytes to two hundred."""
    path = folder / "five.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {i} " + "word " * (8 * i)}) + "\n" for i in range(ROWS)))
    return str(path)


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
    content["data"]["train"] = texts(folder)
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


def test_two_processes_give_the_curve_of_one_in_every_task(tmp_path: Path) -> None:
    """One process takes four rows at once; two take one row each, twice per step (gradient accumulation)."""
    teacher = runs.save_teacher(tmp_path / "teacher")
    tasks = [distill(tmp_path, teacher, False), distill(tmp_path, teacher, True), vision(tmp_path), masked(tmp_path)]
    arguments = runs.recipe(tmp_path)["train"] | {"max_steps": 4}
    curves, contents = [], []
    for place, content in enumerate(tasks):
        alone = copy.deepcopy(content) | {"output": str(tmp_path / f"alone-{place}"), "train": arguments}
        curves.append(train(parse_recipe(alone))["loss_per_step"])
        dealt = arguments | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
        contents.append(copy.deepcopy(content) | {"output": str(tmp_path / f"dealt-{place}"), "train": dealt})
    for curve, ranks in zip(curves, on_two_ranks(contents, tmp_path), strict=True):
        for seen in ranks:
            assert seen["kinds"] == ["whole"]
            torch.testing.assert_close(seen["loss_per_step"], curve, rtol=2e-5, atol=1e-6)
