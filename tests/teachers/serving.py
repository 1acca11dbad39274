"""Real server processes for tests: ``spanwise serve`` with a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tests.teachers.tiny import tiny_model


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def save_model(folder: Path, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> Path:
    tiny_model(seed, width=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def server(model: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The url of a running server, and its process."""
    command = [sys.executable, "-c", "from spanwise.cli import main; main()", "serve", str(model), "--json", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("SPANWISE_TOKEN", None)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield json.loads(process.stdout.readline())["url"], process
        finally:
            process.kill()
