"""A run with streamed teachers loses nothing but time when a process of it is killed.

Real processes, real SIGKILL. Each run starts a cluster of its own, since what is killed here belongs to the run.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch

from spanwise.train.recipe import parse_recipe
from spanwise.train.run import train
from spanwise.train.run_folder import checkpoints
from spanwise.train.run_log import read_log
from tests.train import runs

STEPS = 60


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(
    "victim",
    [
        "TeacherActor",
        pytest.param("RayTrainWorker", marks=pytest.mark.full),
        pytest.param("SimpleStorageUnit", marks=pytest.mark.full),
    ],
    ids=["teacher", "student", "storage unit"],
)
def test_a_killed_process_costs_nothing_but_time(tmp_path: Path, victim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    teacher = runs.save_teacher(tmp_path / "teacher")
    content = runs.recipe(tmp_path, teacher, max_steps=STEPS, save_strategy="steps", save_steps=10)
    alone = train(parse_recipe(content))
    folder = tmp_path / "streamed"
    content |= {"output": str(folder), "ray": {"workers": 1, "teachers": 1}}
    path = runs.write(content, tmp_path / "recipe.yaml")
    run = subprocess.Popen(
        runs.spanwise("train", str(path), "--json"),
        env=runs.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 180
    while not folder.is_dir() or not checkpoints(folder):
        assert run.poll() is None, run.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = psutil.Process(run.pid).children(recursive=True)
    (killed,) = [child for child in children if victim in " ".join(child.cmdline())]
    killed.kill()
    assert len(read_log(folder / "log.jsonl")) < STEPS, "it was killed on the way"
    printed, said = run.communicate(timeout=300)
    assert run.returncode == 0, said[-3000:]
    torch.testing.assert_close(json.loads(printed)["loss_per_step"], alone["loss_per_step"], rtol=2e-5, atol=1e-6)
    if victim == "SimpleStorageUnit":
        assert "goes on with a new one" in said
