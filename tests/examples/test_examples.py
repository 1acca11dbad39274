"""Every example runs as a user would run it, for a few steps."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.train.runs import ROOT, environment


def run(name: str, *words: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", ["bare_loop.py", "plain_trainer.py"])
def test_distillation_examples_learn(name):
    printed = run(name, "6")
    numbers = [float(value) for value in re.findall(r"ce (\d+\.\d+)|: (\d+\.\d+)", printed) for value in value if value]
    assert numbers
    assert numbers[-1] < 7.5
    if name == "bare_loop.py":
        assert numbers[-1] < numbers[0]
