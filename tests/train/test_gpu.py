"""Runs on a GPU: the curves that the CPU gives, in every task, with a served teacher, sharded, and continued."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train import runs
from tests.train.small_tasks import alone, dealt, distill, masked, vision
from tests.train.test_sharded import SHARDED
from tests.train.two_ranks import RANK

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.save_teacher(tmp_path_factory.mktemp("teacher"))


def of_task(name: str, folder: Path, teacher: Path) -> dict[str, Any]:
    if name in ("fused", "plain"):
        return distill(folder, teacher, name == "fused")
    return vision(folder) if name == "vision" else masked(folder)


def on_the_cpu(content: dict[str, Any], output: Path) -> list[float]:
    """The same run by a process that sees no GPU."""
    content = content | {"output": str(output), "train": runs.recipe(output)["train"]}
    path = runs.write(content, output.with_suffix(".yaml"))
    hidden = runs.environment() | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(runs.spanwise("train", str(path), "--json"), env=hidden, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5_000:]
    found: list[float] = json.loads(done.stdout)["loss_per_step"]
    return found


@pytest.mark.parametrize("name", ["fused", "plain", "vision", "masked"])
def test_the_curve_is_the_one_of_the_cpu(name: str, tmp_path: Path, teacher: Path) -> None:
    content = of_task(name, tmp_path, teacher)
    here = alone(content, tmp_path / "here")["loss_per_step"]
    torch.testing.assert_close(here, on_the_cpu(content, tmp_path / "there"), rtol=1e-3, atol=1e-4)
    assert torch.cuda.max_memory_allocated() > 0


@pytest.mark.parametrize("family", ["prefix_kl", "projected_kl", "gold"])
def test_half_precision_inside_the_head_and_outside_of_it(family: str, tmp_path: Path, teacher: Path) -> None:
    curves = []
    for fused in (False, True):
        content = runs.recipe(tmp_path / str(fused), teacher, bf16=True)
        content["teachers"][0]["loss"] = family
        content["loss"] = {"fused": fused}
        curves.append(alone(content, tmp_path / f"{fused}-run")["loss_per_step"])
    torch.testing.assert_close(curves[0], curves[1], rtol=5e-3, atol=1e-3)


def test_a_run_is_continued_with_dropout_and_shuffling(tmp_path: Path, teacher: Path) -> None:
    from spanwise.train.recipe import parse_recipe
    from spanwise.train.run import train
    from spanwise.train.run_folder import checkpoints

    def content(name: str) -> dict[str, Any]:
        found = runs.recipe(tmp_path / name, teacher, save_strategy="steps", save_steps=2)
        found["student"]["model"] = runs.config(attention_dropout=0.2)
        return found

    whole = train(parse_recipe(content("whole")))["loss_per_step"]
    again = parse_recipe(content("again"))
    output = Path(train(again)["output"])
    last = checkpoints(output)[-1]
    for path in sorted(last.rglob("*"), reverse=True):
        path.unlink()
    last.rmdir()
    torch.testing.assert_close(train(again, resume=True)["loss_per_step"], whole, rtol=1e-5, atol=1e-6)


def test_a_sharded_student(tmp_path: Path, teacher: Path) -> None:
    content = distill(tmp_path, teacher, True)
    wanted = alone(content, tmp_path / "alone")["loss_per_step"]
    content = dealt(content, tmp_path / "sharded", per_device_train_batch_size=2, **SHARDED)
    path = runs.write(content, tmp_path / "recipe.yaml")
    job = {"recipe": str(path), "again": False, "signalled": False}
    (tmp_path / "jobs.json").write_text(json.dumps([job]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    done = subprocess.run(
        [*command, str(RANK), str(tmp_path)], env=runs.environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-5_000:]
    [seen] = json.loads((tmp_path / "rank-0.json").read_text())["results"]
    assert seen["kinds"] == ["sharded"]
    assert seen["fused"] == 6
    torch.testing.assert_close(seen["loss_per_step"], wanted, rtol=1e-4, atol=1e-5)


def test_a_served_teacher(tmp_path: Path, teacher: Path) -> None:
    local = alone(runs.recipe(tmp_path / "local", teacher), tmp_path / "local-run")["loss_per_step"]
    command = runs.spanwise("serve", str(teacher), "--port", "0", "--json")
    with subprocess.Popen(command, env=runs.environment(), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = json.loads(server.stdout.readline())["url"]
            content = runs.recipe(tmp_path / "served", teacher)
            content["teachers"] = [{"url": url, "tokenizer": str(teacher), "loss": "prefix_kl"}]
            served = alone(content, tmp_path / "served-run")["loss_per_step"]
        finally:
            server.terminate()
    torch.testing.assert_close(served, local, rtol=1e-3, atol=1e-4)
