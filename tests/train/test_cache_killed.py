"""``spanwise cache`` killed in the middle and started again writes the bytes of a run that nothing disturbed."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from spanwise.cli import main
from spanwise.teachers.cache_store import Manifest
from spanwise.train.cache_run import cache_teachers
from spanwise.train.recipe import parse_recipe
from tests.train import runs


def recipe(folder: Path, teacher: Path) -> dict[str, Any]:
    content = runs.recipe(folder, teacher)
    content["data"] |= {"train": str(folder.parent / "text.jsonl"), "window_bytes": 600, "context_length": 512}
    return content | {"cache": {"folder": str(folder / "cache"), "batch_size": 4}}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "cache" / "teacher-0").iterdir() if path.name != ".lock"}


def test_a_killed_cache_goes_on_and_is_the_same_in_every_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = runs.save_teacher(tmp_path / "teacher")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    cut.mkdir()
    texts = [topics[name] for name in sorted(topics)[:20]]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    said = cache_teachers(parse_recipe(recipe(whole, teacher)))
    words = ["cache", str(runs.write(recipe(cut, teacher), cut / "recipe.yaml")), "--json"]
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
    assert 20_000 <= growing.stat().st_size < len(files(whole)["shard-00000.scores"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as leave:
        main(words)
    assert leave.value.code == 0
    assert files(cut) == files(whole)
    assert json.loads(capsys.readouterr().out)["tokens"] == said["tokens"]
