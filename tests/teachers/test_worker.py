"""A teacher in a process of its own: the same scores, several students, and nobody waits for the dead."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from spanwise.loading import load_model
from spanwise.teachers.local import LocalTeacher
from spanwise.teachers.process import process_identity
from spanwise.teachers.process_teacher import DeadTeacherError, ProcessTeacher
from spanwise.teachers.teacher import ScoreRequest
from spanwise.teachers.worker import TeacherWorker, new_address, share
from spanwise.teachers.worker_wire import PeerGoneError, pack_tensor, receive, send, unpack_tensor
from tests.teachers.serving import save_model
from tests.teachers.tiny import padded, random_rows, tiny_teacher

# One worker runs them all: the processes they share are started once.
pytestmark = pytest.mark.xdist_group("worker")

ROWS = random_rows(6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, byte_bpe: PreTrainedTokenizerBase) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), byte_bpe)


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Iterator[ProcessTeacher]:
    teacher = ProcessTeacher.start(str(folder))
    yield teacher
    teacher.close()


@pytest.fixture(scope="module")
def live(folder: Path, byte_bpe: PreTrainedTokenizerBase) -> LocalTeacher:
    return LocalTeacher(load_model(folder), vocab_size=len(byte_bpe))


PACKED = ScoreRequest(
    torch.tensor([[5, 6, 7, 8, 9, 10, 0]]),
    torch.tensor([[1, 1, 1, 1, 1, 1, 0]]),
    segment_ids=torch.tensor([[1, 1, 1, 2, 2, 2, 0]]),
)


@pytest.mark.parametrize(
    "request_",
    [
        padded(ROWS),
        replace(padded(ROWS[:2]), top_k=7, statistics=True, temperature=2.0),
        replace(padded(ROWS), statistics=True, word_start=torch.arange(600) % 2 == 0),
        replace(padded(ROWS[:2]), shared_ids=torch.tensor([[1, 5, 9], [0, 2, 4]])),
        PACKED,
    ],
)
def test_it_says_exactly_what_the_same_model_says_here(
    teacher: ProcessTeacher, live: LocalTeacher, request_: ScoreRequest
) -> None:
    there, here = teacher.score(request_), live.score(request_)
    assert there.form == here.form
    assert there.temperature == here.temperature
    for name in vars(here):
        expected, found = getattr(here, name), getattr(there, name)
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        else:
            assert found == expected
    assert (teacher.vocab_size, teacher.forms) == (live.vocab_size, live.forms)
    assert teacher.context_length == live.context_length


def test_what_it_refuses_is_raised_here_and_it_goes_on(teacher: ProcessTeacher) -> None:
    with pytest.raises(ValueError, match=r"could not score: the temperature of the teacher scores is 0"):
        teacher.score(replace(padded(ROWS), top_k=3, temperature=0.0))
    assert teacher.score(padded(ROWS)).form == "dense"


def test_several_students_at_once_do_not_disturb_each_other(teacher: ProcessTeacher, live: LocalTeacher) -> None:
    wrong: list[int] = []

    def study(number: int) -> None:
        student = ProcessTeacher(f"unix:{teacher.address}")
        for step in range(5):
            request = padded(random_rows(3, seed=10 * number + step))
            found = student.score(request).logits
            time.sleep(0.002)  # others write meanwhile
            if not torch.allclose(found, live.score(request).logits, atol=1e-5):
                wrong.append(number)
        student.close()

    students = [threading.Thread(target=study, args=(number,)) for number in range(3)]
    for student in students:
        student.start()
    for student in students:
        student.join()
    assert wrong == []


STUDENT = """
import sys
import torch
from spanwise.teachers.process_teacher import ProcessTeacher
from spanwise.teachers.teacher import ScoreRequest
teacher = ProcessTeacher.start(sys.argv[2]) if sys.argv[1] == "start" else ProcessTeacher(sys.argv[2])
ids = torch.arange(30)[None]
while True:
    teacher.score(ScoreRequest(ids, torch.ones_like(ids)))
    print(teacher.pid, flush=True)
"""


def test_a_killed_student_leaves_the_others_in_peace(teacher: ProcessTeacher) -> None:
    with subprocess.Popen([sys.executable, "-c", STUDENT, "join", teacher.address], stdout=subprocess.PIPE) as student:
        assert int(student.stdout.readline()) == teacher.pid
        student.kill()
    assert teacher.score(padded(ROWS)).form == "dense"


def test_the_teacher_ends_with_the_process_that_started_it(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STUDENT, "start", str(folder)], stdout=subprocess.PIPE) as student:
        pid = int(student.stdout.readline())
        assert process_identity(pid)[1] > 0
        student.kill()
    deadline = time.monotonic() + 20
    while process_identity(pid)[1] != -1:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_teacher_is_an_error_at_once_and_closing_clears_up(folder: Path) -> None:
    teacher = ProcessTeacher.start(str(folder))
    scores = teacher.score(padded(ROWS))
    os.kill(teacher.pid, signal.SIGKILL)
    with pytest.raises(DeadTeacherError, match=rf"process {teacher.pid} .* is gone"):
        teacher.score(padded(ROWS))
    assert scores.logits.isfinite().all()  # what was read stays mapped
    with pytest.raises(DeadTeacherError, match="after it was closed"):
        teacher.score(padded(ROWS))
    teacher.close()
    assert not Path(teacher.address).parent.exists()


def test_a_model_that_does_not_load_is_said() -> None:
    with pytest.raises(ValueError, match="did not start: no causal language model could be loaded"):
        ProcessTeacher.start("no/such/model")


def test_an_address_without_a_worker_is_said(tmp_path: Path) -> None:
    with pytest.raises(DeadTeacherError, match="no teacher answers at"):
        ProcessTeacher(str(tmp_path / "nothing.sock"))


def local_worker(teacher: object) -> str:
    address = new_address()
    worker = TeacherWorker(teacher, address, torch.device("cpu"))
    threading.Thread(target=worker.run, daemon=True).start()
    return address


def test_a_silent_teacher_is_given_up() -> None:
    class Sleeping:
        name, vocab_size, forms = "sleeping", 300, frozenset({"dense"})

        def score(self, request: ScoreRequest) -> object:
            time.sleep(0.4)
            return tiny_teacher().score(request)

        def close(self) -> None:
            pass

    teacher = ProcessTeacher(local_worker(Sleeping()), timeout=0.1)
    with pytest.raises(DeadTeacherError, match="is silent"):
        teacher.score(padded(ROWS))
    teacher.close()
    time.sleep(0.5)


def test_only_this_user_can_connect_and_another_version_is_refused(tmp_path: Path) -> None:
    address = local_worker(tiny_teacher())
    assert os.stat(address).st_mode & 0o077 == 0
    assert os.stat(Path(address).parent).st_mode & 0o077 == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.bind(str(tmp_path / "s"))
        stranger.listen()
        thread = threading.Thread(target=lambda: greet(stranger))
        thread.start()
        with pytest.raises(DeadTeacherError, match="speaks version 7"):
            ProcessTeacher(str(tmp_path / "s"))
        thread.join()


def greet(listening: socket.socket) -> None:
    connection, _ = listening.accept()
    with connection:
        send(connection, {"version": 7})


def test_messages_survive_the_wire_and_a_cut_one_is_a_gone_peer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for tensor in (torch.randn(2, 3).to(torch.bfloat16), torch.zeros(0, 4), torch.tensor([True, False])):
            send(ours, {"tensor": pack_tensor(tensor)})
            assert torch.equal(unpack_tensor(receive(theirs)["tensor"]), tensor)
        ours.sendall(b"\xff" * 8)
        with pytest.raises(PeerGoneError, match="which no message has"):
            receive(theirs)
        ours.sendall(b"\x09" + b"\0" * 7 + b"cut")
        ours.close()
        with pytest.raises(PeerGoneError, match="closed the connection"):
            receive(theirs)


def test_buffers_grow_by_doubling_and_old_handles_go_stale() -> None:
    buffers: dict = {}
    first = share(buffers, "logits", torch.ones(2, 3, 5))
    again = share(buffers, "logits", torch.ones(1, 4, 5))
    assert first["handle"] == again["handle"]
    old = buffers["logits"]
    share(buffers, "logits", torch.ones(3, 2, 5))
    assert tuple(buffers["logits"].logits.shape) == (4, 4, 5)
    assert buffers["logits"] is not old
    buffers["logits"].close()


@pytest.mark.gpu
def test_on_a_gpu_logits_are_read_in_place(folder: Path, byte_bpe: PreTrainedTokenizerBase) -> None:
    teacher = ProcessTeacher.start(str(folder))
    request = padded(ROWS)
    on_gpu = ScoreRequest(request.input_ids.cuda(), request.token_mask.cuda())
    found = teacher.score(on_gpu).logits
    assert found.is_cuda
    here = LocalTeacher(load_model(folder).cuda(), vocab_size=len(byte_bpe))
    torch.testing.assert_close(found, here.score(on_gpu).logits, rtol=1e-4, atol=1e-4)
    del found
    teacher.close()
