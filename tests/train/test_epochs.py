"""Epoch after epoch: each has every row once, in an order of its own, and a run goes on in the middle of any."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from spanwise.train.data import StreamedRows, open_corpus
from spanwise.train.recipe import parse_recipe
from spanwise.train.run import train
from spanwise.train.run_folder import checkpoints
from spanwise.train.sampler import BLANK, WholeSteps
from tests.train import runs

ROWS, STEP = 7, 4


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {i} " + "of seven " * i}) + "\n" for i in range(ROWS)))
    return str(path)


def whole_steps(corpus: str) -> WholeSteps:
    opened: Any = open_corpus(corpus, stream=True)
    return WholeSteps(StreamedRows(opened, columns={}, window_bytes=None, shuffle_buffer=ROWS, seed=0), STEP)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_goes_on_through_epochs_of_whole_steps_each_in_its_own_order(corpus: str, workers: int) -> None:
    loader = torch.utils.data.DataLoader(whole_steps(corpus), batch_size=None, num_workers=workers)
    rows = list(islice(loader, 24))
    epochs = [rows[start : start + 8] for start in (0, 8, 16)]
    orders = []
    for number, epoch in enumerate(epochs):
        assert [row["epoch"] for row in epoch] == [number] * 8
        assert [row["position"] for row in epoch] == [*range(ROWS), BLANK]
        assert [row["loss_multiplier"] for row in epoch] == [1.0] * ROWS + [0.0]
        orders.append([row["text"] for row in epoch[:ROWS]])
        assert len(set(orders[-1])) == ROWS
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_readers_without_a_file_of_their_own_end_and_the_others_go_on(corpus: str) -> None:
    loader = torch.utils.data.DataLoader(whole_steps(corpus), batch_size=None, num_workers=2)
    assert [row["epoch"] for row in islice(loader, 20)] == [0] * 8 + [1] * 8 + [2] * 4


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stream": ({"stream": True, "shuffle_buffer": 3}, {}),
    "accumulated stream": (
        {"stream": True, "shuffle_buffer": 3},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    ),
    "stream and a reader that stays": (
        {"stream": True, "shuffle_buffer": 3},
        {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    ),
    "readers that stay": ({}, {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_in_the_middle_of_its_second_epoch(tmp_path: Path, corpus: str, way: str) -> None:
    """Two steps are an epoch; the checkpoint of the third is continued, with shuffling and dropout on."""
    data, arguments = WAYS[way]
    content = runs.recipe(tmp_path, max_steps=5, save_strategy="steps", save_steps=3, **arguments)
    content["student"]["model"] = runs.config(attention_dropout=0.2)
    content["data"] = {"train": corpus, "context_length": 128} | data
    whole = train(parse_recipe(content))["loss_per_step"]
    shutil.rmtree(checkpoints(Path(content["output"]))[-1])
    assert [path.name for path in checkpoints(Path(content["output"]))] == ["checkpoint-3"]
    assert train(parse_recipe(content), resume=True)["loss_per_step"] == whole
    if way == "readers that stay":
        plain = content | {"output": str(tmp_path / "plain"), "train": runs.recipe(tmp_path, max_steps=5)["train"]}
        assert train(parse_recipe(plain))["loss_per_step"] == whole, "how rows are read changes nothing"
