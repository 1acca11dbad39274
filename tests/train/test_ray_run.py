"""Runs on Ray workers: the numbers of a single process, also when a worker is killed on the way.

The single process and the workers are different programs; only the recipe is the same. Ray runs in the cluster of the
test session, never in local mode, and each run is joined by two processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train.torch import TorchTrainer

from spanwise.train.ray_cluster import joined_cluster
from spanwise.train.ray_run import train_on_ray, work
from spanwise.train.recipe import parse_recipe
from spanwise.train.run import train
from spanwise.train.run_folder import checkpoints, verify_checkpoint
from spanwise.train.run_log import read_log
from tests.ray_cluster import RayCluster
from tests.train import runs

# Ray Data, which Ray Train imports, copies all of its own settings, deprecated ones among them.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:ray.data.context", "ignore::DeprecationWarning:ray.data.context"
)

FOLDER = "à deux #2"  # as people name folders


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return runs.save_teacher(tmp_path_factory.mktemp("teacher"))


def uneven(tmp_path: Path, teacher: Path, **train_arguments: object) -> dict:
    """Five rows, from one word to many: with two rows per worker, the second worker's last batch holds none."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    path = tmp_path / "five.jsonl"
    path.write_text("".join(json.dumps({"text": "word " * (1 + 6 * i) + str(i)}) + "\n" for i in range(5)))
    content = runs.recipe(tmp_path, teacher, **train_arguments)
    content["data"] |= {"train": str(path)}
    return content


def on_workers(content: dict, tmp_path: Path) -> dict:
    """The same steps, dealt to two workers."""
    size = content["train"]["per_device_train_batch_size"] // 2
    return content | {
        "output": str(tmp_path / FOLDER),
        "train": content["train"] | {"per_device_train_batch_size": size},
        "ray": {"workers": 2},
    }


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_two_workers_give_the_curve_of_one_process(
    tmp_path: Path, teacher: Path, ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit, fitted = TorchTrainer.fit, []
    monkeypatch.setattr(TorchTrainer, "fit", lambda trainer: fitted.append(fit(trainer)) or fitted[-1])
    content = uneven(tmp_path, teacher, max_steps=4, save_strategy="steps", save_steps=2)
    alone = train(parse_recipe(content))
    result = train(parse_recipe(on_workers(content, tmp_path)))
    torch.testing.assert_close(result["loss_per_step"], alone["loss_per_step"], rtol=2e-5, atol=1e-6)
    assert [worker["rank"] for worker in result["workers"]] == [0, 1]
    assert len({worker["pid"] for worker in result["workers"]} | {os.getpid()}) == 3
    folder = Path(result["output"])
    assert (folder / "model.safetensors").is_file()
    assert (folder / "report.html").is_file()
    assert not (folder / ".staging").exists()
    (rays,) = fitted
    reported = [(Path(checkpoint.path), numbers["step"]) for checkpoint, numbers in rays.best_checkpoints]
    assert (
        reported
        == [(folder / "checkpoint-2", 2), (folder / "checkpoint-4", 4)]
        == [(path, int(path.name.split("-")[1])) for path in checkpoints(folder)]
    ), "Ray knows the checkpoints where they lie"
    assert rays.metrics["loss"] == pytest.approx(result["loss_per_step"][-1], rel=1e-3)
    left = {path.name for path in folder.iterdir()}
    assert left == {path.name for path in (tmp_path / "run").iterdir()} - {".staging"}, "nothing of Ray's"
    with pytest.raises(ValueError, match="not empty"):
        train(parse_recipe(on_workers(content, tmp_path)))


def on_the_cluster(content: dict, tmp_path: Path, cluster: RayCluster) -> tuple[subprocess.Popen[str], Path]:
    """The command, running in a process of its own on the cluster of the tests; its folder."""
    path = runs.write(on_workers(content, tmp_path), tmp_path / "recipe.yaml")
    command = runs.spanwise("train", str(path), f"ray.address={cluster.address}", "--json")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(command, env=runs.environment() | cluster.environment, **pipes)
    return run, tmp_path / FOLDER


def until(reached: Callable[[], object], run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not reached():
        assert run.poll() is None, run.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_a_killed_worker_is_started_again(tmp_path: Path, teacher: Path, ray_cluster: RayCluster) -> None:
    content = uneven(tmp_path, teacher, max_steps=60, save_strategy="steps", save_steps=20)
    alone = train(parse_recipe(content))
    run, folder = on_the_cluster(content, tmp_path, ray_cluster)
    until(lambda: folder.is_dir() and checkpoints(folder), run)
    killed = json.loads((folder / ".staging" / "ray" / "worker-1.json").read_text())["pid"]
    os.kill(killed, signal.SIGKILL)
    assert len(read_log(folder / "log.jsonl")) < 60, "it was killed on the way"
    printed, said = run.communicate(timeout=240)
    assert run.returncode == 0, said[-3000:]
    result = json.loads(printed)
    assert killed not in [worker["pid"] for worker in result["workers"]]
    torch.testing.assert_close(result["loss_per_step"], alone["loss_per_step"], rtol=2e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_sigterm_to_the_command_saves_on_all_workers_and_resume_goes_on(
    tmp_path: Path, teacher: Path, ray_cluster: RayCluster
) -> None:
    content = uneven(tmp_path, teacher, max_steps=100_000, lr_scheduler_type="constant", save_strategy="steps")
    run, folder = on_the_cluster(content, tmp_path, ray_cluster)
    until(lambda: len(read_log(folder / "log.jsonl")) > 2, run)
    run.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, said = run.communicate(timeout=120)
    assert run.returncode == 143, said[-3000:]
    assert time.monotonic() - began < 30, "what schedulers grant"
    (saved,) = checkpoints(folder)
    verify_checkpoint(saved)
    content["train"]["max_steps"] = int(saved.name.split("-")[1]) + 3
    alone = train(parse_recipe(content))
    continued = train(parse_recipe(on_workers(content, tmp_path)), resume=True)
    torch.testing.assert_close(continued["loss_per_step"], alone["loss_per_step"], rtol=2e-5, atol=1e-6)


def test_a_folder_that_a_worker_does_not_see_is_named(tmp_path: Path) -> None:
    here = {"directory": str(Path.cwd()), "environment": {}}
    with pytest.raises(FileNotFoundError, match=r"does not see the output folder .* Fix: name a shared folder"):
        work({"recipe": {"output": str(tmp_path / "elsewhere")}, "place": here})


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_a_mistake_that_only_a_worker_sees_is_told_and_not_tried_again(
    tmp_path: Path, teacher: Path, ray_cluster: RayCluster
) -> None:
    content = on_workers(uneven(tmp_path, teacher), tmp_path)
    content["student"]["model"] = runs.config(100)
    with pytest.raises(ValueError, match="head scores 100 tokens"):
        train(parse_recipe(content))


@pytest.mark.full
def test_a_cluster_is_started_where_there_is_none(tmp_path: Path, teacher: Path) -> None:
    content = uneven(tmp_path, teacher)
    alone = train(parse_recipe(content))
    path = runs.write(on_workers(content, tmp_path), tmp_path / "recipe.yaml")
    home = tmp_path / "home"
    home.mkdir()
    environment = {name: value for name, value in runs.environment().items() if not name.startswith("RAY_")}
    done = subprocess.run(
        runs.spanwise("train", str(path), "--json"),
        env=environment | {"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    torch.testing.assert_close(result["loss_per_step"], alone["loss_per_step"], rtol=2e-5, atol=1e-6)
    assert not (home / ".ray").exists(), "Ray's token is not left in the user's home"


def test_more_workers_than_cpus_are_refused_before_anything_starts(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    content = uneven(tmp_path, teacher) | {"ray": {"workers": 999}}
    code = (
        "import sys, yaml; from spanwise.train.recipe import parse_recipe; from spanwise.train.run import train\n"
        "try: train(parse_recipe(yaml.safe_load(sys.stdin)))\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(content), env=runs.environment(), capture_output=True, text=True
    )
    assert done.stdout.startswith("ray.workers is 999 and this machine has"), done.stderr
    assert "Fix: ray.workers=" in done.stdout


def test_without_the_extra_the_error_names_it(tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    recipe = parse_recipe(on_workers(uneven(tmp_path, teacher), tmp_path))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'spanwise\[ray\]'"):
        train_on_ray(recipe)


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_another_cluster_than_the_one_joined_is_refused(ray_cluster: RayCluster) -> None:
    with pytest.raises(ValueError, match="already in the cluster"), joined_cluster(2, "10.0.0.1:6379"):
        pass
    with joined_cluster(2, ray_cluster.address) as cluster:
        assert cluster.environment == {}
