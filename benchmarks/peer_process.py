"""A side of a comparison in a process of its own: a virtual environment for a peer, and questions asked line by line.

Every side answers the same JSON commands (``peer_sides/serve.py``), so what differs between two sides is their code.
Environments lie in the cache folder and are made once, in about a minute each, from pinned releases.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spanwise.loading import cache_dir

ROOT = Path(__file__).resolve().parents[1]
# One thread and no hub: figures of two sides differ by their work alone.
QUIET = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "PYTHONPATH": str(ROOT),
}


class PeerError(RuntimeError):
    """A peer that could not be installed or run; the message says why and becomes a row of the table."""


def pinned(*packages: str) -> list[str]:
    """The releases that the tests run with, so that both sides stand on the same ones."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    releases = dict(line.split("==") for line in lines if "==" in line)
    return [f"{package}=={releases[package]}" for package in packages]


def trl_python() -> str:
    """TRL's environment, one for every comparison with it; its vision collator needs pillow, which it does not name."""
    packages = ("torch", "transformers", "tokenizers", "accelerate", "datasets")
    return peer_python("trl", [*pinned(*packages), "trl==1.16.0", "pillow==13.0.0"])


def peer_python(name: str, pins: Sequence[str]) -> str:
    """The interpreter of a peer's virtual environment, which is made when it is missing or holds other releases.

    Raises:
        PeerError: pip could not install it.
    """
    folder = cache_dir() / "peers" / name
    done, wanted = folder / ".done", "\n".join(pins)
    if not done.is_file() or done.read_text() != wanted:
        print(f"installing {', '.join(pins)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "pip"), "install", "-q", *pins]
        result = subprocess.run(pip, capture_output=True, text=True, check=False)
        if result.returncode:
            why = [line.removeprefix("ERROR: ") for line in result.stderr.splitlines() if line.startswith("ERROR")]
            raise PeerError(f"pip could not install {' '.join(pins)}: {' '.join(why)}")
        done.write_text(wanted)
    return str(folder / "bin" / "python")


class Side:
    """One side, asked line by line. A context manager.

    Args:
        script: answers commands, from the folder benchmarks.
        python: its interpreter; ours by default.
        arguments: of the script.
    """

    def __init__(self, script: str, python: str = sys.executable, arguments: Sequence[str] = ()) -> None:
        self.script = script
        with tempfile.NamedTemporaryFile("w", suffix=".stderr", delete=False) as errors:
            self.errors = Path(errors.name)
            self.process = subprocess.Popen(
                # -P: a script's own folder is no place to import from; a peer's package is called mlm, as a script.
                [python, "-P", str(ROOT / "benchmarks" / script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | QUIET,
                text=True,
            )

    def ask(self, do: str, **arguments: Any) -> Any:
        """One command, one answer.

        Raises:
            PeerError: the side died; the message ends with what it said last.
        """
        try:
            self.process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.process.wait()
            said = self.errors.read_text().strip()
            print(said[-3_000:], file=sys.stderr)
            raise PeerError(f"{self.script} ended at '{do}': {said.splitlines()[-1] if said else 'without a word'}")
        return json.loads(answer)

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died before it read everything
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.errors.unlink(missing_ok=True)
