"""A teacher in another process on this machine: its weights and its forward are not in this one.

Dense logits and the columns of a shared id set are read in place from a shared buffer (CUDA IPC on a GPU, shared
memory on the CPU): they stay as they are until the next ``score`` of this teacher. The rest is small and is copied. A
teacher that dies is a named error at once; one that was started here ends with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from spanwise.teachers.process import attach_logits
from spanwise.teachers.scores import Form, TeacherScores
from spanwise.teachers.teacher import ScoreRequest
from spanwise.teachers.worker_wire import VERSION, PeerGoneError, pack_request, receive, send, unpack_tensor

ADDRESS = "unix:"
SECONDS_TO_LEAVE = 10.0


class DeadTeacherError(RuntimeError):
    """The teacher's process is gone or silent."""


class ProcessTeacher:
    """Scores rows by asking a worker (``spanwise.teachers.worker``).

    Args:
        address: path of its socket, with or without ``unix:``.
        timeout: seconds that one answer may take.

    Several students, in one process or many, may connect to one address.
    """

    def __init__(self, address: str, *, timeout: float = 600.0) -> None:
        self.address = address.removeprefix(ADDRESS)
        self.timeout = timeout
        self._process: subprocess.Popen[str] | None = None
        self._connection: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(timeout)
        try:
            self._connection.connect(self.address)
            about = receive(self._connection)
        except (OSError, PeerGoneError) as error:
            self._connection.close()
            raise DeadTeacherError(
                f"no teacher answers at '{self.address}' ({error}); expected a running worker. It was probably "
                "stopped, or the path is misspelt. Fix: start it: python -m spanwise.teachers.worker MODEL "
                "--address PATH."
            ) from error
        if about["version"] != VERSION:
            self._connection.close()
            raise DeadTeacherError(
                f"the teacher at '{self.address}' speaks version {about['version']}; expected {VERSION}. It was "
                "probably started by another release of Spanwise. Fix: start it again with this one."
            )
        self.pid = int(about["pid"])
        self.name = str(about["name"])
        self.vocab_size = int(about["vocab_size"])
        self.forms: frozenset[Form] = frozenset(about["forms"])
        self.context_length: int | None = about.get("context_length")

    @classmethod
    def start(
        cls,
        model: str,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        options: dict[str, Any] | None = None,
        timeout: float = 600.0,
    ) -> ProcessTeacher:
        """Start a worker for ``model`` and connect to it; it ends with ``close`` or with this process.

        Args:
            model: hub name, folder or GGUF file.
            tokenizer: default: the model's.
            dtype: of the weights, as in from_pretrained.
            options: more arguments of from_pretrained (plain values).
            timeout: seconds that one answer may take; loading may take as long as it needs.
        """
        command = [sys.executable, "-m", "spanwise.teachers.worker", model, "--attached", "--dtype", dtype]
        command += ["--options", json.dumps(options or {})]
        if tokenizer is not None:
            command += ["--tokenizer", tokenizer]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        # Its end closes the pipe, so this waits no longer than the worker lives.
        said = json.loads((process.stdout.readline() if process.stdout else "") or "{}")
        if "address" not in said:
            _end(process)
            message = said.get("error") or f"it ended with code {process.returncode}; its log is on standard error"
            kind = ValueError if said.get("kind") == "ValueError" else DeadTeacherError
            raise kind(f"the teacher's process for '{model}' did not start: {message}")
        try:
            teacher = cls(said["address"], timeout=timeout)
        except BaseException:
            _end(process)
            raise
        teacher._process = process
        return teacher

    def score(self, request: ScoreRequest) -> TeacherScores:
        """Ask the worker. Dense logits and columns are views that the next call overwrites."""
        connection = self._connection
        if connection is None:
            raise DeadTeacherError(
                f"scores were asked of the teacher {self.name} after it was closed; expected an open one. "
                "Fix: close it after the last step."
            )
        try:
            send(connection, pack_request(request))
            answer = receive(connection)
        except (PeerGoneError, TimeoutError) as error:
            self.close()  # an answer that comes late must not be taken for the next one
            how = "is silent" if isinstance(error, TimeoutError) else "is gone"
            raise DeadTeacherError(
                f"the teacher's process {self.pid} ({self.name}) {how}; expected its scores within {self.timeout:g} s. "
                "It was probably killed, for want of memory or by hand. Fix: look at its log, and start the run again "
                "with --resume."
            ) from error
        if "error" in answer:
            kind = ValueError if answer["kind"] == "ValueError" else RuntimeError
            raise kind(f"the teacher {self.name} in process {self.pid} could not score: {answer['error']}")
        return self._scores(answer, request.input_ids.device)

    def _scores(self, answer: dict[str, Any], device: torch.device) -> TeacherScores:
        tensors = {name: unpack_tensor(packed).to(device) for name, packed in answer["tensors"].items()}
        for name, shared in answer["shared"].items():
            # The wire knows lists only; a handle holds tuples.
            handle = {key: tuple(v) if isinstance(v, list) else v for key, v in shared["handle"].items()}
            rows, length, width = shared["shape"]
            tensors[name] = attach_logits(handle)[:rows, :length, :width].to(device)
        return TeacherScores(**tensors, temperature=answer["temperature"])

    def close(self) -> None:
        """Leave the worker; one that was started here is ended. Closing twice is harmless."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            _end(self._process)
            self._process = None
            folder = Path(self.address).parent
            if folder.name.startswith("spanwise-"):  # a killed worker could not clear up
                shutil.rmtree(folder, ignore_errors=True)


def _end(process: subprocess.Popen[str]) -> None:
    """End a worker by closing its standard input; kill it where that does not help."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    try:
        process.wait(SECONDS_TO_LEAVE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
