"""Messages between a teacher's process and its students: MessagePack over a Unix socket, large tensors beside it.

A message is its length (8 bytes) and a map. Nothing is unpickled: tensors travel as dtype, shape and bytes, logits as
the handle of a shared buffer. A peer that dies closes its socket, which the other side sees at once.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from spanwise.teachers.scores import TeacherScores
from spanwise.teachers.teacher import ScoreRequest

VERSION = 1
LENGTH = struct.Struct("<Q")
MOST_BYTES = 4 << 30
# What goes through a shared buffer instead of the socket.
SHARED_FIELDS = ("logits", "columns")


class PeerGoneError(ConnectionError):
    """The other side closed its socket: it ended or was killed."""


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message."""
    import msgspec

    data = msgspec.msgpack.encode(message)
    try:
        connection.sendall(LENGTH.pack(len(data)) + data)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise PeerGoneError("the other process closed the connection") from error


def receive(connection: socket.socket) -> dict[str, Any]:
    """Wait for one message; :class:`PeerGoneError` when the peer is gone, TimeoutError when it is silent."""
    import msgspec

    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    if length > MOST_BYTES:
        raise PeerGoneError(f"the other process announced {length:,} bytes, which no message has")
    message: dict[str, Any] = msgspec.msgpack.decode(_exactly(connection, length), type=dict[str, Any])
    return message


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        try:
            got = connection.recv_into(view)
        except ConnectionResetError as error:
            raise PeerGoneError("the other process closed the connection") from error
        if not got:
            raise PeerGoneError("the other process closed the connection")
        view = view[got:]
    return data


def pack_tensor(tensor: Tensor) -> dict[str, Any]:
    """A tensor as dtype, shape and bytes."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "data": flat.numpy().tobytes()}


def unpack_tensor(packed: dict[str, Any]) -> Tensor:
    """The tensor that :func:`pack_tensor` packed; bytes are copied, since what arrived is read-only."""
    dtype: torch.dtype = getattr(torch, packed["dtype"])
    if not packed["data"]:
        return torch.empty(packed["shape"], dtype=dtype)
    return torch.frombuffer(bytearray(packed["data"]), dtype=dtype).view(packed["shape"])


def pack_request(request: ScoreRequest) -> dict[str, Any]:
    """A request as a message; without its pick, which saves nothing where logits are shared in place."""
    values = {field.name: getattr(request, field.name) for field in fields(ScoreRequest) if field.name != "pick"}
    tensors = {name: pack_tensor(value) for name, value in values.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    return {"op": "score", "plain": plain, "tensors": tensors}


def unpack_request(message: dict[str, Any], device: torch.device) -> ScoreRequest:
    """The request of a message, on the model's device."""
    tensors = {name: unpack_tensor(packed).to(device) for name, packed in message["tensors"].items()}
    return ScoreRequest(**message["plain"] | tensors)


def pack_scores(scores: TeacherScores, shared: dict[str, Any]) -> dict[str, Any]:
    """Scores as a message; ``shared`` holds the handles of the fields that lie in shared buffers."""
    names = [field.name for field in fields(TeacherScores) if field.name not in (*SHARED_FIELDS, "temperature")]
    tensors = {name: pack_tensor(getattr(scores, name)) for name in names if getattr(scores, name) is not None}
    return {"tensors": tensors, "shared": shared, "temperature": scores.temperature}
