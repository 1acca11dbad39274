"""Every example runs as a user would run it, for a few steps."""

from __future__ import annotations

import ast
import re
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.train.runs import ROOT, environment


def run(name: str, *words: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_example_is_run_here():
    """By its name: what ``run`` and the parameters of these tests are given."""
    tree = ast.parse(Path(__file__).read_text())
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert {file.name for file in (ROOT / "examples").glob("*.py")} == {
        word for word in words if re.fullmatch(r"\w+\.py", word)
    }


@pytest.mark.parametrize("name", ["bare_loop.py", "plain_trainer.py"])
def test_distillation_examples_learn(name):
    printed = run(name, "6")
    numbers = [float(value) for value in re.findall(r"ce (\d+\.\d+)|: (\d+\.\d+)", printed) for value in value if value]
    assert numbers
    assert numbers[-1] < 7.5
    if name == "bare_loop.py":
        assert numbers[-1] < numbers[0]


def test_lora_moves_away_from_its_base_through_the_adapters_alone():
    printed = run("lora.py", "3")
    kd = [float(value) for value in re.findall(r"kd (\d+\.\d+)", printed)]
    assert kd[0] == 0.0  # adapters of zero: student and base are one model
    assert kd[-1] > 0.0
    (megabytes,) = re.findall(r"saved (\d+\.\d+) MB of adapters", printed)
    assert 0.5 < float(megabytes) < 10


def test_a_served_teacher_teaches_and_its_server_is_closed():
    printed = run("served_teacher.py", "4")
    (url,) = re.findall(r"is served at (http://127\.0\.0\.1:\d+)", printed)
    ce, kd = ([float(value) for value in re.findall(rf"{term} (\d+\.\d+)", printed)] for term in ("ce", "kd"))
    assert ce[-1] < ce[0] < 7.5
    assert all(value > 0 for value in kd)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", urlsplit(url).port), timeout=5)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mlm_sudoku.py", r"top_prob: exact match (\d\.\d+)"),
        ("vlm_digits.py", r"exact answers: (\d\.\d+)"),
        ("rollout_to_trainer.py", r"every sample consumed by both tasks: (True)"),
    ],
)
def test_the_other_rooms_examples_reach_their_end(name, told):
    printed = run(name, *({"rollout_to_trainer.py": ["--samples", "16"]}.get(name, ["2"])))
    assert re.findall(told, printed)
