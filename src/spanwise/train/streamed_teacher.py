"""A teacher that lives in a Ray actor: the student asks it, and reads its scores from the run's queue.

Requests are token ids and go to the actor as a call. Scores come back through TransferQueue as one frame: real
positions only, the likeliest tokens or the columns of a shared set where the loss reads no more than these, the whole
vocabulary where it does. A student has ``SLOTS`` places in the queue and every answer overwrites one of them, so an
actor is at most so many answers ahead (backpressure) and the queue never holds more. What is announced early, a whole
step's micro-batches, is scored while the student still computes.

Shapes: B rows, T teacher length, L real positions, D documents, k ids.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.dataplane import open_client
from spanwise.dataplane.nested import nested_from_rows, nested_parts
from spanwise.teachers.process_teacher import DeadTeacherError
from spanwise.teachers.scores import Form, TeacherScores
from spanwise.teachers.teacher import ScoreRequest, SharedPick
from spanwise.teachers.worker_wire import pack_request, pack_tensor, unpack_request, unpack_tensor
from spanwise.train.ray_cluster import told_as_here

QUEUE = "tq://auto"
# Answers of one teacher that may wait for one student.
SLOTS = 4
# Fields of scores that say something about every position; the rest are shared_ids and the temperature.
PER_POSITION = tuple(field.name for field in fields(TeacherScores) if field.name not in ("shared_ids", "temperature"))
# Ids travel as 32-bit integers.
IDS = ("top_ids", "shared_ids")
# What an empty slot or a padded position holds.
NO_ID = -1
NONCE = "asked"


def actor_name(place: int, replica: int) -> str:
    """Name of the actor that holds the teacher at a place of the recipe."""
    return f"teacher-{place}-{replica}"


def actor_namespace(output: str) -> str:
    """The namespace of a run's actors; the lock on its folder keeps it to one run."""
    return f"spanwise {output}"


def columns_of(scores: TeacherScores, mask: Int[Tensor, "B T"]) -> dict[str, Tensor]:
    """Scores as ragged columns of one sample: the real positions of all rows, one after another."""
    real = mask.reshape(-1).nonzero().squeeze(1)
    columns = {}
    for name in PER_POSITION:
        values: Tensor | None = getattr(scores, name)
        if values is not None:
            columns[name] = values.flatten(0, 1).index_select(0, real)
    if scores.shared_ids is not None:
        columns["shared_ids"] = scores.shared_ids
    narrow = {name: values.to(torch.int32) if name in IDS else values for name, values in columns.items()}
    return {name: nested_from_rows(values.detach().cpu(), [len(values)]) for name, values in narrow.items()}


def scores_of(columns: Mapping[str, Tensor], mask: Int[Tensor, "B T"], temperature: float) -> TeacherScores:
    """The scores behind :func:`columns_of`, on the device of the mask; padded positions hold zeros and no ids."""
    real = mask.reshape(-1).nonzero().squeeze(1)
    tensors: dict[str, Tensor] = {}
    for name, column in columns.items():
        values = nested_parts(column)[0].to(mask.device)
        values = values.long() if name in IDS else values
        if name == "shared_ids":
            tensors[name] = values
            continue
        whole = values.new_full((mask.numel(), *values.shape[1:]), NO_ID if name == "top_ids" else 0)
        tensors[name] = whole.index_copy_(0, real, values).unflatten(0, tuple(mask.shape))
    return TeacherScores(**tensors, temperature=temperature)


def pack_asked(request: ScoreRequest) -> dict[str, Any]:
    """A request and its pick as plain values."""
    packed = pack_request(request)
    pick = request.pick
    if pick is not None:
        packed["pick"] = {
            "rows": pack_tensor(pick.rows),
            "owner": pack_tensor(pick.owner),
            "documents": pick.documents,
            "k": pick.k,
        }
    return packed


def unpack_asked(packed: Mapping[str, Any], device: torch.device) -> ScoreRequest:
    """The request behind :func:`pack_asked`."""
    request = unpack_request(dict(packed), device)
    pick = packed.get("pick")
    if pick is None:
        return request
    rows, owner = (unpack_tensor(pick[name]).to(device) for name in ("rows", "owner"))
    return replace(request, pick=SharedPick(rows, owner, pick["documents"], pick["k"]))


@dataclass
class _Asked:
    """One request on its way; ``slot`` and ``answer`` are set once it is with the actor."""

    digest: bytes
    packed: dict[str, Any]
    slot: int | None = None
    nonce: int = 0
    answer: Any = None


class StreamedTeacher:
    """The student's side. Scores rows by asking an actor (:class:`spanwise.train.ray_teacher.TeacherActor`).

    Args:
        place: of the teacher in the recipe.
        replicas: how many actors hold it; a worker asks the one its rank falls on.
        namespace: of the run's actors.
    """

    def __init__(self, place: int, replicas: int, namespace: str) -> None:
        self._ray: Any = importlib.import_module("ray")
        self.name = actor_name(place, int(os.environ.get("RANK", "0")) % replicas)
        self._actor = self._ray.get_actor(self.name, namespace=namespace)
        with self._answering():
            about = self._ray.get(self._actor.describe.remote())
        # A worker that is started again has a partition of its own: what its predecessor had asked for may still come.
        # The actor registers it, since it knows the columns.
        self._partition = f"{namespace}/{self.name}/{uuid.uuid4().hex}"
        self.name = str(about["name"])
        self.vocab_size = int(about["vocab_size"])
        self.forms: frozenset[Form] = frozenset(about["forms"])
        self._client: Any = open_client(QUEUE, layout="frame")
        self._free = list(range(SLOTS))
        self._asked: deque[_Asked] = deque()
        self._count = 0

    def announce(self, request: ScoreRequest) -> None:
        """Ask now for what ``score`` will be called with later, in the same order."""
        self._asked.append(self._as_asked(request))
        self._send()

    def score(self, request: ScoreRequest) -> TeacherScores:
        """Wait for the actor's answer and read it from the queue."""
        wanted = self._as_asked(request)
        while self._asked and self._asked[0].digest != wanted.digest:
            # Announced and never scored: the step it was for was given up.
            self._forget(self._asked.popleft())
        if not self._asked:
            self._asked.append(wanted)
        self._send()
        asked = self._asked[0]
        with self._answering():
            answer = self._ray.get(asked.answer)
        columns = self._client.get_samples([str(asked.slot)], self._partition, [NONCE, *answer["columns"]])
        if int(columns.pop(NONCE)) != asked.nonce:
            raise RuntimeError(
                f"place {asked.slot} of the queue holds another answer of the teacher {self.name} than the one asked "
                "for; expected the newest. An actor that was taken for dead probably went on writing. Fix: go on with "
                "--resume."
            )
        scores = scores_of(columns, request.token_mask, answer["temperature"])
        self._forget(self._asked.popleft())
        self._send()
        return scores

    def close(self) -> None:
        """Leave the queue; the actor belongs to the run. Closing twice is harmless."""
        self._client.close()

    def _as_asked(self, request: ScoreRequest) -> _Asked:
        packed = pack_asked(request)
        return _Asked(hashlib.blake2b(msgspec.msgpack.encode(packed)).digest(), packed)

    def _send(self) -> None:
        """Give the actor what there is room for, in order."""
        for asked in self._asked:
            if asked.answer is not None:
                continue
            if not self._free:
                return
            self._count += 1
            asked.slot, asked.nonce = self._free.pop(0), self._count
            asked.answer = self._actor.score.remote(self._partition, str(asked.slot), asked.nonce, asked.packed)

    def _forget(self, asked: _Asked) -> None:
        if asked.slot is not None:
            self._free.append(asked.slot)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Names what an actor says or suffers: a mistake in the input, a broken queue, its own end."""
        try:
            with told_as_here():
                yield
        except self._ray.exceptions.RayActorError as error:
            raise DeadTeacherError(
                f"the actor of the teacher {self.name} is gone and was not started again ({error}); expected its "
                "scores. It was probably killed more often than it may be, for want of memory or by hand. Fix: look at "
                "its log, and go on with --resume."
            ) from error
