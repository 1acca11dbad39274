"""A teacher in a process of its own: loads a model, scores for any number of students, dies with who started it.

``python -m spanwise.teachers.worker MODEL --address /tmp/teacher.sock`` runs one by hand. Each student has a connection
and shared buffers of its own, so that its scores stay as they are until it asks again; forwards run one at a time.
Memory: the model, and per student one buffer of its largest batch of logits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spanwise.teachers.process import SharedLogitsBuffer
from spanwise.teachers.teacher import Bounded, Teacher
from spanwise.teachers.worker_wire import (
    SHARED_FIELDS,
    VERSION,
    PeerGoneError,
    pack_scores,
    receive,
    send,
    unpack_request,
)

logger = logging.getLogger(__name__)


class TeacherWorker:
    """Answers students on a Unix socket.

    Args:
        teacher: whose scores are shared.
        address: path of the socket; only this user can connect.
        device: where the teacher's model lies.
    """

    def __init__(self, teacher: Teacher, address: str, device: torch.device) -> None:
        self.teacher = teacher
        self.device = device
        self._one_forward = threading.Lock()
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            self.listening.bind(address)
        finally:
            os.umask(before)
        self.listening.listen(64)

    def run(self) -> None:
        """Accept students until the process ends."""
        while True:
            connection, _ = self.listening.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        buffers: dict[str, SharedLogitsBuffer] = {}
        teacher = self.teacher
        about = {"name": teacher.name, "vocab_size": teacher.vocab_size, "forms": sorted(teacher.forms)}
        about |= {"context_length": teacher.context_length} if isinstance(teacher, Bounded) else {}
        with connection, contextlib.suppress(PeerGoneError):
            send(connection, {"version": VERSION, "pid": os.getpid()} | about)
            while True:
                message = receive(connection)
                try:
                    answer = self._score(message, buffers)
                except Exception as error:  # said to the student, which raises it
                    logger.exception("scoring failed")
                    kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
                    answer = {"error": str(error), "kind": kind}
                send(connection, answer)
        for buffer in buffers.values():
            buffer.close()

    def _score(self, message: dict[str, Any], buffers: dict[str, SharedLogitsBuffer]) -> dict[str, Any]:
        request = unpack_request(message, self.device)
        with self._one_forward:
            scores = self.teacher.score(request)
            shared = {}
            for name in SHARED_FIELDS:
                values: Tensor | None = getattr(scores, name)
                if values is not None:
                    shared[name] = share(buffers, name, values)
        return pack_scores(scores, shared)


def share(buffers: dict[str, SharedLogitsBuffer], name: str, values: Tensor) -> dict[str, Any]:
    """Copy ``values`` into the student's buffer of this name, made anew where it is too small; handle and shape."""
    buffer = buffers.get(name)
    small = buffer is None or any(size > room for size, room in zip(values.shape, buffer.logits.shape, strict=True))
    if buffer is None or small or buffer.logits.dtype != values.dtype:
        rows, length, width = values.shape
        room = [_power_of_two(rows), _power_of_two(length), width]
        if buffer is not None:
            # Rooms only double, so that all buffers a student ever had are less than twice the last.
            room = [max(size, old) for size, old in zip(room, buffer.logits.shape, strict=True)]
            buffer.close()
        buffers[name] = buffer = SharedLogitsBuffer(room, dtype=values.dtype, device=values.device)
    buffer.write(values)
    return {"handle": buffer.handle(), "shape": list(values.shape)}


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def new_address() -> str:
    """A fresh path for a socket, in a folder that only this user can enter."""
    folder = tempfile.mkdtemp(prefix="spanwise-")
    if len(folder) > 80:  # a Unix socket's path has room for about 100 bytes
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="spanwise-", dir="/tmp")
    return f"{folder}/teacher.sock"


def load_worker(model: str, tokenizer: str | None, dtype: str, options: dict[str, Any], address: str) -> TeacherWorker:
    """The worker of a model, on the GPU where there is one."""
    from spanwise.loading import load_model, load_tokenizer
    from spanwise.teachers.local import LocalTeacher, move_to_gpu

    loaded: Any = load_model(model, dtype=dtype, **options)
    move_to_gpu(loaded, device_map=options.get("device_map"))
    pieces: Any = load_tokenizer(tokenizer or model)
    return TeacherWorker(LocalTeacher(loaded, vocab_size=len(pieces), name=model), address, loaded.device)


def main(arguments: list[str] | None = None) -> None:
    """Run a worker; standard output gets one line, {address}, once it answers."""
    parser = argparse.ArgumentParser(prog="python -m spanwise.teachers.worker", description=__doc__)
    parser.add_argument("model", help="hub name, folder or GGUF file")
    parser.add_argument("--tokenizer", help="default: the model's")
    parser.add_argument("--address", help="path of the socket; default: a fresh one")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of from_pretrained, as JSON")
    parser.add_argument("--attached", action="store_true", help="end when standard input does")
    given = parser.parse_args(arguments)
    address = given.address or new_address()

    def leave(*_: object) -> None:
        Path(address).unlink(missing_ok=True)
        if given.address is None:
            shutil.rmtree(Path(address).parent, ignore_errors=True)
        os._exit(0)

    # A library's stray print must not reach the one line on standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # A scheduler sends its signals to all processes of a job, and the student that still saves needs its teacher.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN if given.attached else leave)
    if given.attached:
        threading.Thread(target=lambda: (sys.stdin.buffer.read(), leave()), daemon=True).start()
    try:
        worker = load_worker(given.model, given.tokenizer, given.dtype, given.options, address)
    except Exception as error:
        answers.write(json.dumps({"error": str(error), "kind": type(error).__name__}) + "\n")
        answers.flush()
        leave()
        raise
    answers.write(json.dumps({"address": address}) + "\n")
    answers.flush()
    worker.run()


if __name__ == "__main__":
    main()
