"""``memory://``: threads of one process share a plane; puts are encoded once, reads are copies of their own.

One condition variable guards the ledger and wakes whoever waits for samples or for room. Reads copy, so that no
consumer can change what another will read. A plane lives as long as one of its clients is open.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from spanwise.dataplane.errors import DataPlaneError
from spanwise.dataplane.frame_writer import FrameWriter
from spanwise.dataplane.frames import Frame, decode_frame
from spanwise.dataplane.ledger import Ledger, Record
from spanwise.dataplane.transports.local import LocalClient, Plane
from spanwise.dataplane.transports.settings import plane_settings, same_settings

_planes: dict[str, MemoryPlane] = {}  # named planes of this process; each leaves with its last client
_planes_lock = threading.Lock()


def open_memory(
    name: str = "", *, max_bytes: int | None = None, max_rows: int | None = None, when_full: str = "block"
) -> LocalClient:
    """A client of the plane ``name`` of this process, or of a new plane without a name."""
    settings = plane_settings(max_bytes, max_rows, when_full)
    with _planes_lock:
        plane = _planes.get(name) if name else None
        if plane is None:
            plane = MemoryPlane(name, settings)
            if name:
                _planes[name] = plane
        else:
            same_settings(f"memory://{name}", plane.ledger.settings, settings)
        client = uuid.uuid4().hex
        plane.clients.add(client)
    return LocalClient(plane, client)


class MemoryPlane(Plane):
    """Segments are bytearrays in a dict."""

    copies = True
    name = "memory"

    def __init__(self, key: str, settings: dict[str, Any]) -> None:
        self.key = key
        self.condition = threading.Condition(threading.RLock())
        self.ledger = Ledger()
        self.ledger.settings = settings
        self.segments: dict[str, Any] = {}
        self.clients: set[str] = set()

    @override
    @contextmanager
    def transaction(self, deadline: float, error: type[DataPlaneError]) -> Iterator[Ledger]:
        if not self.condition.acquire(timeout=max(deadline - time.monotonic(), 0.001)):
            raise error("the plane's lock was not free before the deadline; another thread holds it. Fix: wait longer.")
        try:
            yield self.ledger
        finally:
            self.condition.release()

    @override
    def commit(self, records: Sequence[Record]) -> None:
        for record in records:
            for segment in self.ledger.apply(record):
                self.segments.pop(segment, None)
        self.condition.notify_all()

    @override
    def write(self, segment: str, frame: FrameWriter) -> None:
        self.segments[segment] = frame.join()

    @override
    def settle(self, segment: str) -> None:
        return

    @override
    def discard(self, segment: str) -> None:
        self.segments.pop(segment, None)

    @override
    def frame(self, segment: str) -> Frame:
        return decode_frame(self.segments[segment])

    @override
    def wait(self, seconds: float) -> None:
        with self.condition:
            self.condition.wait(min(seconds, 0.05))

    @override
    def reap(self) -> None:
        return

    @override
    def leave(self, client: str) -> None:
        with _planes_lock:
            self.clients.discard(client)
            if not self.clients:
                _planes.pop(self.key, None)
                self.segments.clear()
        with self.condition:
            self.condition.notify_all()
