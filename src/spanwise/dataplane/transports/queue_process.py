"""TransferQueue in this process: start or join it, call it under a deadline, leave without harming others.

TransferQueue keeps one client per process in a module variable, waits minutes for a dead storage unit, hangs when the
cluster lacks CPUs for its actors, and its ``close()`` ends the queue for everybody. This file closes these gaps: CPUs
are counted before anything starts, time-outs are set before the import, every call runs against a deadline while the
units' sockets are probed, and only the process that started the queue may end it.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from spanwise.dataplane.errors import CapacityExceeded, DataPlaneError, NotSupported, PartitionConflict, TransportDown

TIME_OUTS = {
    "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "30",
    "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "1",
    "TQ_SIMPLE_STORAGE_PROBE_TIMEOUT": "2",
    "TQ_LOGGING_LEVEL": "ERROR",
}
CONTROLLER = ("TransferQueueController", "transfer_queue")
PROBE_EVERY_S = 0.5

_joined: QueueProcess | None = None
_joined_lock = threading.Lock()


def join_queue(address: str, storage_units: int | None, max_rows: int | None, timeout_s: float | int) -> QueueProcess:
    """This process's handle on the queue of a cluster; started if the cluster has none. Counted: leave() once each."""
    global _joined
    with _joined_lock:
        if _joined is not None:
            _joined.check_settings(address, storage_units, max_rows)
            _joined.users += 1
            return _joined
        ray = _import("ray")
        for name, value in TIME_OUTS.items():
            os.environ.setdefault(name, value)
        started_ray = _join_cluster(ray, address, storage_units)
        try:
            _joined = QueueProcess(ray, address, storage_units, max_rows, timeout_s)
        except BaseException:
            if started_ray:
                ray.shutdown()
            raise
        _joined.started_ray = started_ray
        return _joined


class QueueProcess:
    """The queue's client of this process, shared by every ``TransferQueueClient`` in it."""

    def __init__(
        self, ray: Any, address: str, storage_units: int | None, max_rows: int | None, timeout_s: float | int
    ) -> None:
        self.ray = ray
        self.address = address
        self.users = 1
        self.started_ray = False
        self.queue = _import("transfer_queue")
        self.interface: Any = importlib.import_module("transfer_queue.interface")
        self.borrowed = self.interface._TQ_CLIENT is not None  # its own user in this process keeps its client
        self.owner = not self._controller_exists()
        if self.owner:
            units = storage_units or 1
            self._check_cpus(units)
            settings = _settings(units, max_rows)
            self._start(lambda: self.queue.init(settings), timeout_s)
        else:
            self._start(self.queue.init, timeout_s)
        self.client: Any = self.queue.get_client()
        self.config: Any = ray.get(self.interface._TQ_CONTROLLER.get_config.remote(), timeout=timeout_s)
        try:
            self.check_settings(address, storage_units, max_rows)
            self._check_mode()
        except DataPlaneError:
            self._let_go()
            raise

    @property
    def max_rows(self) -> int | None:
        """What the queue was started with; None where it may grow without limit."""
        limit: int | None = self.config.backend.SimpleStorage.total_storage_size
        return limit

    def call(self, function: Callable[[], Any], deadline: float, error: type[DataPlaneError]) -> Any:
        """``function()`` in a thread of its own. Past the deadline it is left behind and ``error`` is raised; a storage
        unit or controller that no longer listens is TransportDown at once."""
        box: dict[str, Any] = {}
        done = threading.Event()

        def run() -> None:
            try:
                box["value"] = function()
            except BaseException as problem:  # carried to the caller's thread
                box["problem"] = problem
            done.set()

        threading.Thread(target=run, daemon=True, name="spanwise-queue-call").start()
        while not done.wait(min(PROBE_EVERY_S, max(deadline - time.monotonic(), 0.001))):
            self.check_alive()
            if time.monotonic() >= deadline:
                raise error(
                    "the queue did not answer before the deadline, though its sockets listen. It is probably busy with "
                    "a large transfer. Fix: pass a longer timeout_s, or smaller batches."
                )
        if "problem" in box:
            self.check_alive()
            raise box["problem"]
        return box["value"]

    def check_alive(self) -> None:
        """TransportDown when the controller or a storage unit has no listening socket any more."""
        parties = [self.config.controller.zmq_info, *self.config.backend.SimpleStorage.zmq_info.values()]
        for party in parties:
            ports = party.ports
            port = next(iter(ports.values()))
            try:
                socket.create_connection((party.ip, int(port)), timeout=1.0).close()
            except OSError as problem:
                raise TransportDown(
                    f"{party.id} at {party.ip}:{port} does not listen any more ({problem}). Its process was probably "
                    "killed, or the queue was closed by its owner. Fix: start the queue again and re-put the samples."
                ) from problem

    def check_settings(self, address: str, storage_units: int | None, max_rows: int | None) -> None:
        """PartitionConflict when the queue that runs here is not the one asked for."""
        simple = self.config.backend.SimpleStorage
        running = (self.address, simple.num_data_storage_units, simple.total_storage_size)
        wanted = (address, storage_units or running[1], max_rows or running[2])
        if address != self.address and "auto" in (address, self.address):
            wanted = (self.address, *wanted[1:])
        if wanted != running:
            raise PartitionConflict(
                f"this process is joined to a queue of (address, storage_units, max_rows) = {running} and was asked "
                f"for {wanted}. A process can join one queue. Fix: close the other clients first, or leave the "
                "settings out to join what runs."
            )

    def leave(self) -> None:
        """One user less; the last one drops this process's client, and ends the queue if this process started it."""
        global _joined
        with _joined_lock:
            self.users -= 1
            if self.users > 0:
                return
            if _joined is self:
                _joined = None
        self._let_go()
        if self.started_ray:
            self.ray.shutdown()

    def _let_go(self) -> None:
        if self.owner:
            self.queue.close()
        elif not self.borrowed:
            if self.interface._TQ_CLIENT is not None:
                self.interface._TQ_CLIENT.close()
            self.interface._TQ_CLIENT = None
            self.interface._TQ_CONTROLLER = None  # without it the queue's own close() cannot kill the controller

    def _check_mode(self) -> None:
        if not self.config.controller.polling_mode:
            raise NotSupported(
                "the queue of this cluster runs with controller.polling_mode=False, in which a claim blocks its "
                "controller. Fix: start it with polling_mode=True, or let open_client start it."
            )

    def _controller_exists(self) -> bool:
        try:
            self.ray.get_actor(CONTROLLER[0], namespace=CONTROLLER[1])
        except ValueError:
            return False
        return True

    def _check_cpus(self, units: int) -> None:
        needed = units + 1
        free = float(self.ray.available_resources().get("CPU", 0.0))
        if free < needed:
            raise CapacityExceeded(
                f"TransferQueue needs {needed} free CPUs on the Ray cluster (1 controller + {units} storage units) and "
                f"{free:g} of {self.ray.cluster_resources().get('CPU', 0.0):g} are free; it would hang for ever. "
                "Fix: start Ray with more num_cpus, or pass fewer storage_units."
            )

    def _start(self, start: Callable[[], Any], timeout_s: float | int) -> None:
        box: dict[str, BaseException] = {}

        def run() -> None:
            try:
                start()
            except BaseException as problem:  # carried to the caller's thread
                box["problem"] = problem

        thread = threading.Thread(target=run, daemon=True, name="spanwise-queue-start")
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            raise TransportDown(
                f"TransferQueue did not start or answer within {timeout_s:g} s. Its actors are probably pending. "
                "Fix: look at `ray status`, or pass a longer timeout_s."
            )
        if "problem" in box:
            raise TransportDown(f"TransferQueue did not start: {box['problem']}. Fix: see the message.") from box[
                "problem"
            ]


def _join_cluster(ray: Any, address: str, storage_units: int | None) -> bool:
    """Connect this process to Ray; True when it was not connected before."""
    if ray.is_initialized():
        joined = ray.get_runtime_context().gcs_address
        if address != "auto" and not _is_same_place(address, joined):
            raise PartitionConflict(
                f"this process is connected to the Ray cluster at {joined} and was asked for the queue of {address!r}. "
                "A process can join one cluster. Fix: ray.shutdown() first, or use tq://auto."
            )
        return False
    quiet = {"include_dashboard": False, "log_to_driver": False}
    try:
        if address != "auto":
            ray.init(address=address, log_to_driver=False)
        elif os.environ.get("RAY_ADDRESS"):
            ray.init(address="auto", log_to_driver=False)
        else:
            ray.init(num_cpus=max(os.cpu_count() or 1, (storage_units or 1) + 1), **quiet)
    except (ConnectionError, RuntimeError, ValueError) as problem:
        raise TransportDown(
            f"no Ray cluster could be reached at {address!r} ({problem}). It is probably not running. "
            "Fix: `ray start --head`, or use tq://auto."
        ) from problem
    return True


def _is_same_place(one: str, other: str) -> bool:
    """Whether two host:port addresses mean one server; a loopback name means any address of this machine."""
    if one == other:
        return True
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    try:
        hosts = {socket.gethostbyname(host), socket.gethostbyname(other_host)}
    except (OSError, UnicodeError):
        return False
    return port == other_port and (len(hosts) == 1 or any(found.startswith("127.") for found in hosts))


def _settings(units: int, max_rows: int | None) -> Any:
    conf: Any = importlib.import_module("omegaconf").OmegaConf
    simple = {"num_data_storage_units": units, "total_storage_size": max_rows}
    return conf.create(
        {
            "controller": {"polling_mode": True},
            "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": simple},
        }
    )


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        raise TransportDown(
            f"tq:// needs {problem.name}, which is not installed. Fix: pip install 'spanwise[ray]'."
        ) from problem
