"""Shared teacher logits between processes: zero copies, dead producers, stale handles."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from spanwise.teachers.process import (
    _ATTACHED,
    DeadProducerError,
    SharedLogitsBuffer,
    StaleHandleError,
    attach_logits,
    process_identity,
)
from spanwise.xtoken.loss_utils import rebuild_teacher_full_logits_from_ipc

SHAPE = (4, 64, 8192)
SPAWN = multiprocessing.get_context("spawn")


def produce(device: str, pipe: Any) -> None:
    """In another process: hold a buffer and do as told."""
    buffer = SharedLogitsBuffer(SHAPE, dtype=torch.float32, device=device)
    step = 0
    while True:
        word = pipe.recv()
        if word == "write":
            step += 1
            rows = torch.arange(SHAPE[0], dtype=torch.float32, device=device)
            buffer.write((rows[:, None, None] + 10 * step).expand(SHAPE))
            pipe.send(buffer.sample_handles())
        elif word == "close":
            buffer.close()
            pipe.send(os.getpid())
        else:
            return


@pytest.fixture
def producer(request):
    device = getattr(request, "param", "cpu")
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=produce, args=(device, theirs), daemon=True)
    process.start()
    yield process, ours
    if process.is_alive():
        ours.send("end")
    gone(process)


def gone(process: Any) -> None:
    """Wait for the end. Not join(): torch's shared-memory manager inherits the pipe that join() listens to."""
    limit = time.monotonic() + 20
    while process.is_alive():
        assert time.monotonic() < limit
        time.sleep(0.01)


def ask(pipe: Any, word: str) -> Any:
    pipe.send(word)
    assert pipe.poll(60)
    return pipe.recv()


def private_bytes() -> int:
    """Memory of this process that it shares with nobody."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_")) * 1024


BOTH_DEVICES = pytest.mark.parametrize("producer", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


@BOTH_DEVICES
def test_a_view_of_another_processs_memory(producer) -> None:
    process, pipe = producer
    samples = ask(pipe, "write")
    assert samples[0]["rank_logits_ipc"]["process"][0] == process.pid != os.getpid()
    before = private_bytes()
    view = rebuild_teacher_full_logits_from_ipc({"teacher_full_logits_ipc": samples[1:3]})
    assert view.shape == (2, *SHAPE[1:])
    assert view.dtype == torch.float32
    assert view.amax((1, 2)).tolist() == [11.0, 12.0]
    if view.device.type == "cpu":
        assert private_bytes() - before < 0.05 * 4 * 64 * 8192 * 4
    # The next step's logits appear in the same view, and the handles are the same.
    later = ask(pipe, "write")
    assert view.amax((1, 2)).tolist() == [21.0, 22.0]
    assert later[0]["rank_logits_ipc"] == samples[0]["rank_logits_ipc"]


@BOTH_DEVICES
def test_a_closed_buffer_and_a_dead_producer_are_named(producer) -> None:
    process, pipe = producer
    samples = ask(pipe, "write")
    data = {"teacher_full_logits_ipc": samples}
    rebuild_teacher_full_logits_from_ipc(data)
    ask(pipe, "close")
    with pytest.raises(StaleHandleError, match="was closed"):
        rebuild_teacher_full_logits_from_ipc(data)
    os.kill(process.pid, signal.SIGKILL)
    gone(process)
    with pytest.raises(DeadProducerError, match="is gone"):
        rebuild_teacher_full_logits_from_ipc(data)


def test_nothing_of_a_dead_producer_stays_mapped(producer) -> None:
    process, pipe = producer
    samples = ask(pipe, "write")
    rebuild_teacher_full_logits_from_ipc({"teacher_full_logits_ipc": samples})
    identity = samples[0]["rank_logits_ipc"]["process"]
    assert any(key[0] == identity for key in _ATTACHED)
    os.kill(process.pid, signal.SIGKILL)
    gone(process)
    with pytest.raises(DeadProducerError):
        attach_logits(samples[0]["rank_logits_ipc"])
    assert not any(key[0] == identity for key in _ATTACHED)


def test_a_reused_process_id_is_not_the_producer() -> None:
    buffer = SharedLogitsBuffer((1, 1, 1))
    handle = dict(buffer.handle())
    handle["process"] = (os.getpid(), handle["process"][1] - 1)
    with pytest.raises(DeadProducerError):
        attach_logits(handle)
    assert process_identity(2**22 + 5)[1] == -1


def test_samples_must_be_consecutive_rows_of_one_buffer() -> None:
    one, two = (SharedLogitsBuffer((3, 2, 4), dtype=torch.bfloat16) for _ in range(2))
    samples = one.sample_handles()
    for wrong in ([samples[0], samples[2]], [samples[1], samples[0]], [samples[0], two.sample_handles()[1]]):
        with pytest.raises(ValueError, match="consecutive rows of one"):
            rebuild_teacher_full_logits_from_ipc({"teacher_full_logits_ipc": wrong})
    beyond = [{**samples[2], "sample_idx_within_rank": 3}]
    with pytest.raises(ValueError, match="rows inside it"):
        rebuild_teacher_full_logits_from_ipc({"teacher_full_logits_ipc": beyond})
    with pytest.raises(ValueError, match="no teacher_full_logits_ipc"):
        rebuild_teacher_full_logits_from_ipc({})
    with pytest.raises(ValueError, match=r"lack rank_logits_ipc, sample_idx_within_rank.*sample_handles"):
        rebuild_teacher_full_logits_from_ipc({"teacher_full_logits_ipc": [samples[0], one.handle()]})
    assert rebuild_teacher_full_logits_from_ipc({"teacher_full_logits_ipc": samples}).dtype == torch.bfloat16


@pytest.mark.parametrize("attached_before", [False, True])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": "int32"}, "dtype = 'int32'"),
        ({"dtype": "nonsense"}, "dtype = 'nonsense'"),
        ({"dtype": "bfloat16"}, r"states logits \(2, 2, 4\) torch.bfloat16.*buffer is \(2, 2, 4\) torch.float32"),
        ({"dtype": "float64"}, "states logits"),
        ({"shape": (4, 2, 2)}, r"states logits \(4, 2, 2\)"),
        ({"shape": (1, 2, 4)}, "states logits"),
        ({"shape": (2, 2, 8)}, "states logits"),
        ({"shape": (2, 2)}, r"shape = \(2, 2\)"),
        ({"shape": None}, "shape = None"),
        ({"process": None}, "process = None"),
        ({"generation": "1"}, "generation = '1'"),
        ({"kind": "tpu"}, "kind = 'tpu'"),
        ({"storage": None}, "storage = None"),
        ({"version": 1}, "has version 1"),
    ],
)
def test_a_handle_that_states_something_else_is_refused(change: Any, named: str, attached_before: bool) -> None:
    buffer = SharedLogitsBuffer((2, 2, 4), dtype=torch.float32)
    if attached_before:
        attach_logits(buffer.handle())
    wrong = {**buffer.handle(), **change}
    with pytest.raises(ValueError, match=rf"(?s){named}.*expected.*probably.*Fix:"):
        attach_logits(wrong)
    with pytest.raises(ValueError, match=named):
        rebuild_teacher_full_logits_from_ipc(
            {"teacher_full_logits_ipc": [{"rank_logits_ipc": wrong, "sample_idx_within_rank": 0}]}
        )


@pytest.mark.parametrize("field", ["storage", "generation_storage"])
def test_a_handle_of_memory_that_is_not_there_is_stale(field: str) -> None:
    handle = SharedLogitsBuffer((2, 2, 4)).handle()
    for storage in (("x",), (handle[field][0], b"/torch_0_0_0", handle[field][2])):
        with pytest.raises(StaleHandleError, match="could not be mapped"):
            attach_logits({**handle, field: storage})


def test_wrong_shapes_dtypes_and_handles_are_refused() -> None:
    buffer = SharedLogitsBuffer((2, 2, 4), dtype=torch.float32)
    buffer.write(torch.ones(1, 2, 3))
    assert buffer.logits.sum() == 6
    with pytest.raises(ValueError, match="within it"):
        buffer.write(torch.ones(3, 2, 4))
    with pytest.raises(ValueError, match="its dtype"):
        buffer.write(torch.ones(1, 1, 1, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="three positive sizes"):
        SharedLogitsBuffer((2, 0, 4))
    with pytest.raises(ValueError, match=r"torch.int8; expected one of.*Fix:"):
        SharedLogitsBuffer((2, 1, 4), dtype=torch.int8)
    with pytest.raises(ValueError, match="logits handle lacks"):
        attach_logits({"shape": (1, 1, 1)})
    handle = buffer.handle()
    buffer.close()
    with pytest.raises(StaleHandleError):
        attach_logits(handle)
    with pytest.raises(StaleHandleError, match="closed SharedLogitsBuffer"):
        buffer.handle()
