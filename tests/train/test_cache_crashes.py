"""``spanwise cache`` killed in the middle, or out of disk, and started again: what a run writes that nothing disturbed.

Real processes; a full disk is a limit on the size of files, which writes meet as they meet the end of a disk.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from spanwise.cli import main
from spanwise.teachers.cache_store import SHARD_START, Manifest
from spanwise.train.cache_run import cache_teachers
from spanwise.train.recipe import parse_recipe
from tests.train import runs


def recipe(folder: Path, teacher: Path) -> dict[str, Any]:
    content = runs.recipe(folder, teacher)
    content["data"] |= {"train": str(folder.parent / "text.jsonl"), "window_bytes": 600, "context_length": 512}
    return content | {"cache": {"folder": str(folder / "cache"), "batch_size": 4}}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "cache" / "teacher-0").iterdir() if path.name != ".lock"}


def frames(folder: Path) -> bytes:
    """Every document's frame, one shard behind the other."""
    shards = sorted((folder / "cache" / "teacher-0").glob("shard-*.scores"))
    return b"".join(shard.read_bytes().removeprefix(SHARD_START) for shard in shards)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> tuple[Path, int]:
    """A cache that nothing happened to, beside its text; how many tokens it holds."""
    folder = tmp_path_factory.mktemp("caches") / "whole"
    folder.mkdir()
    texts = [topics[name] for name in sorted(topics)[:20]]
    (folder.parent / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder, cache_teachers(parse_recipe(recipe(folder, teacher)))["tokens"]


def words_for(folder: Path, teacher: Path) -> list[str]:
    folder.mkdir()
    return ["cache", str(runs.write(recipe(folder, teacher), folder / "recipe.yaml")), "--json"]


def continued(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as leave:
        main(words)
    assert leave.value.code == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def test_a_killed_cache_goes_on_and_is_the_same_in_every_byte(
    whole: tuple[Path, int], teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = whole[0].parent / "cut"
    words = words_for(cut, teacher)
    growing = cut / "cache" / "teacher-0" / "shard-00000.scores.open"
    told = subprocess.PIPE
    with subprocess.Popen(runs.spanwise(*words), env=runs.environment(), stdout=told, stderr=told) as process:
        deadline = time.monotonic() + 120
        while not growing.is_file() or growing.stat().st_size < 20_000:
            assert process.poll() is None, process.communicate()[1][-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not Manifest.read(growing.parent).complete
    assert 20_000 <= growing.stat().st_size < len(files(whole[0])["shard-00000.scores"])
    assert continued(words, capsys)["tokens"] == whole[1]
    assert files(cut) == files(whole[0])


ON_A_SMALL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from spanwise.cli import main
main()
"""


def test_a_full_disk_is_said_and_the_next_run_goes_on(
    whole: tuple[Path, int], teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = whole[0].parent / "full"
    words = words_for(full, teacher)
    command = [sys.executable, "-c", ON_A_SMALL_DISK, *words]
    done = subprocess.run(command, env=runs.environment(), capture_output=True, text=True)
    assert done.returncode == 1, done.stderr[-3000:]
    assert re.match(r"CacheDiskError: .*could not grow.*Fix: ", json.loads(done.stdout)["error"])
    held = Manifest.read(full / "cache" / "teacher-0")
    assert not held.complete
    assert 0 < len(frames(full)) < len(frames(whole[0]))
    assert continued(words, capsys)["tokens"] == whole[1]
    assert frames(full) == frames(whole[0]), "in more shards"
