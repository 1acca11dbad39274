"""The teacher pass on Ray: the bytes of one process, whoever scored them and whoever was killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from spanwise.teachers.cache_store import Manifest
from spanwise.train import data
from spanwise.train.cache_run import cache_teachers
from spanwise.train.ray_cache import BATCHES
from spanwise.train.recipe import parse_recipe
from tests.ray_cluster import RayCluster
from tests.train import runs

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:ray.data.context", "ignore::DeprecationWarning:ray.data.context"
)
ACTOR = b"BlockScorer"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return runs.save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory, teacher):
    """The cache that one process makes, and what it says of it."""
    assert torch.get_num_threads() == 1, "Ray's actors have one thread each; others could differ in the last bits"
    folder = tmp_path_factory.mktemp("alone")
    return folder, cache_teachers(parse_recipe(recipe(folder, teacher)))


def recipe(folder: Path, teacher: Path, workers: int = 0) -> dict[str, Any]:
    content = runs.recipe(folder, teacher)
    content["data"] |= {"window_bytes": 600, "context_length": 512}
    return content | {"cache": {"folder": str(folder / "cache"), "batch_size": 4}, "ray": {"workers": workers}}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "cache" / "teacher-0").iterdir() if path.name != ".lock"}


def actors() -> list[int]:
    """Process ids of Ray's actors that score blocks."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if ACTOR in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
            except OSError:  # it has just ended
                continue
    return found


def cut_in_a_batch(whole: Path, folder: Path) -> int:
    """What a killed writer leaves: an open shard whose last frame is torn; the documents that are whole."""
    (folder / "cache" / "teacher-0").mkdir(parents=True)
    content = files(whole)
    manifest = Manifest.read(whole / "cache" / "teacher-0")
    half = content["shard-00000.scores"][: len(content["shard-00000.scores"]) // 2]
    Manifest(manifest.identity).write(folder / "cache" / "teacher-0")
    (folder / "cache" / "teacher-0" / "shard-00000.scores.open").write_bytes(half)
    return len(half)


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_two_actors_go_on_with_a_torn_cache_and_write_the_bytes_of_one_process(
    tmp_path: Path, teacher: Path, alone: Any, ray_cluster: RayCluster
) -> None:
    whole, said = alone
    assert cut_in_a_batch(whole, tmp_path) > 10_000
    result = cache_teachers(parse_recipe(recipe(tmp_path, teacher, workers=2)))
    assert files(tmp_path) == files(whole)
    assert result["tokens"] == said["tokens"]
    workers = result["caches"][0]["workers"]
    assert len({worker["pid"] for worker in workers} - {os.getpid()}) == 2
    assert all(worker["blocks"] > 0 for worker in workers)


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_a_killed_actor_costs_only_its_blocks(
    tmp_path: Path, teacher: Path, alone: Any, ray_cluster: RayCluster
) -> None:
    path = runs.write(recipe(tmp_path, teacher, workers=2), tmp_path / "recipe.yaml")
    run = subprocess.Popen(
        runs.spanwise("cache", str(path), f"ray.address={ray_cluster.address}", "--json"),
        env=runs.environment() | ray_cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    growing = tmp_path / "cache" / "teacher-0" / "shard-00000.scores.open"
    deadline = time.monotonic() + 120
    while not growing.is_file() or growing.stat().st_size < 10_000:
        assert run.poll() is None, run.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed = actors()[0]
    os.kill(killed, signal.SIGKILL)
    assert growing.is_file(), "it was killed on the way"
    printed, told = run.communicate(timeout=240)
    assert run.returncode == 0, told[-3000:]
    workers = {worker["pid"]: worker["blocks"] for worker in json.loads(printed)["caches"][0]["workers"]}
    # How much each of them had scored by then is the scheduler's affair; that nothing is missing or twice is ours.
    assert set(workers) - {killed}, "others went on"
    assert files(tmp_path) == files(alone[0])
    section = parse_recipe(recipe(tmp_path, teacher)).data
    corpus = data.open_corpus(section.train, stream=False)
    rows = len(data.IndexedRows(corpus, columns=section.columns, window_bytes=section.window_bytes))
    assert sum(workers.values()) == -(-rows // (BATCHES * 4)), "every block is in the result once"


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_a_mistake_that_only_an_actor_sees_is_told_as_here(
    tmp_path: Path, teacher: Path, ray_cluster: RayCluster
) -> None:
    content = recipe(tmp_path, teacher, workers=1)
    content["teachers"][0]["model"] = str(tmp_path / "nothing")
    with pytest.raises(Exception) as here:
        cache_teachers(parse_recipe(content | {"ray": {"workers": 0}}))
    with pytest.raises(type(here.value)) as there:
        cache_teachers(parse_recipe(content))
    assert str(there.value) == str(here.value)


def test_a_stream_is_refused(tmp_path: Path, teacher: Path) -> None:
    content = recipe(tmp_path, teacher, workers=2)
    content["data"]["stream"] = True
    with pytest.raises(ValueError, match=r"Fix: data\.stream=false"):
        cache_teachers(parse_recipe(content))
