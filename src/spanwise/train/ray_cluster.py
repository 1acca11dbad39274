"""The Ray cluster a run works on: the one this process is in, a running one by address, or one started for the run.

A cluster started here lives in a folder directly under /tmp (its socket paths must be short) and with a HOME of its own
while it starts, since Ray writes a token into HOME. Its workers are given the user's HOME back. About 4 s to start.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spanwise.dataplane import TransportDown

# What a worker may find and no second try can mend: mistakes in the input, and the end of the run's queue.
REFUSALS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, FileNotFoundError, ModuleNotFoundError, TransportDown)
}
# Losses, metrics and recipes pass through it, and a cache's finished blocks; Ray writes what is too much to disk.
OBJECT_STORE_BYTES = 256 << 20


@dataclass(frozen=True)
class Cluster:
    """A cluster that this process has joined.

    Attributes:
        ray: the module, joined.
        environment: what its workers must set before they import anything that reads it.
    """

    ray: Any
    environment: dict[str, str]

    def place(self) -> dict[str, Any]:
        """What a worker must know to stand where this process stands; see :func:`stand`."""
        return {"directory": str(Path.cwd()), "environment": self.environment}

    def has_gpus(self, workers: int, teachers: int = 0) -> bool:
        """Whether every worker and teacher gets a GPU; too few are refused, since Ray would wait for ever."""
        gpus = int(self.ray.cluster_resources().get("GPU", 0))
        if 0 < gpus < workers + teachers:
            beside = f" beside {teachers} actors of teachers" if teachers else ""
            raise ValueError(
                f"ray.workers is {workers}{beside} and the cluster has {gpus} GPUs; expected one for each, or none at "
                f"all. The recipe was probably written for a larger cluster. "
                f"Fix: {f'ray.workers={gpus - teachers}' if gpus > teachers else 'a cluster with more of them'}."
            )
        return gpus > 0

    def check_cpus(self, workers: int, beside: int) -> None:
        """Refuse a cluster with fewer CPUs than the workers and what runs beside them reserve, one each."""
        cpus = int(self.ray.cluster_resources().get("CPU", 0))
        if cpus < workers + beside:
            raise ValueError(
                f"ray.workers is {workers} and {beside} more processes run beside them (actors of teachers, their "
                f"queue), and the cluster has {cpus} CPUs; expected one each, since Ray would wait for ever. Fix: "
                "lower ray.workers or ray.teachers, or start Ray with more num_cpus."
            )


def stand(place: Mapping[str, Any]) -> None:
    """In a worker, first of all: the environment and the working directory of the process that started the run."""
    os.environ.update(place["environment"])
    if Path(place["directory"]).is_dir():
        os.chdir(place["directory"])


@contextlib.contextmanager
def joined_cluster(workers: int, address: str | None, beside: int = 0) -> Iterator[Cluster]:
    """Join the cluster at ``address`` (default: RAY_ADDRESS, the one already joined, or a new one) and leave it after.

    Args:
        workers: each reserves one CPU.
        address: of a running cluster.
        beside: further processes that reserve one; a cluster started here has them beyond the machine's own.

    Raises:
        ValueError: nothing answers at the address; another cluster is joined; this machine has fewer CPUs than workers.
        ModuleNotFoundError: the extra is not installed.
    """
    ray = _ray()
    if ray.is_initialized():
        _same_cluster(ray, address)
        yield _roomy(Cluster(ray, {}), workers, beside)
        return
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        try:
            ray.init(address=address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"no Ray cluster could be joined at '{address}' ({_first_line(error)}); expected a running one. It was "
                "probably stopped, or has another address. Fix: see 'ray status', or take ray.address out to start one "
                "here."
            ) from error
        try:
            yield _roomy(Cluster(ray, {}), workers, beside)
        finally:
            ray.shutdown()
        return
    folder = Path(tempfile.mkdtemp(prefix="sw", dir="/tmp"))  # mkdtemp: no one else's; short: see above
    try:
        yield _started(ray, workers, beside, folder)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "ray.workers is set and the package ray is not installed; expected it, since it runs the workers. The "
            "extra was probably left out. Fix: pip install 'spanwise[ray]', or ray.workers=0 to run in this process."
        ) from error


def _same_cluster(ray: Any, address: str | None) -> None:
    here = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", here):
        raise ValueError(
            f"ray.address is '{address}' and this process is already in the cluster at '{here}'; expected one cluster. "
            "ray.init was probably called before. Fix: call ray.shutdown() first, or take ray.address out."
        )


def _started(ray: Any, workers: int, beside: int, folder: Path) -> Cluster:
    """A cluster on this machine. Each worker reserves one CPU; one more logical CPU is left for Ray's own tasks."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers > cpus:
        raise ValueError(
            f"ray.workers is {workers} and this machine has {cpus} CPUs; expected at most one worker per CPU, since "
            "more only slow each other down. The recipe was probably written for a larger machine. "
            f"Fix: ray.workers={cpus}, or ray.address=ADDRESS of a cluster that has them."
        )
    home = os.environ.get("HOME")
    os.environ["HOME"] = str(folder)
    try:
        ray.init(
            num_cpus=max(cpus, workers + beside + 1),
            include_dashboard=False,
            # Without a dashboard one of Ray Train's actors warns every second that it cannot ask it.
            logging_config=ray.LoggingConfig(log_level="ERROR"),
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(folder / "r"),
        )
    finally:
        if home is None:
            del os.environ["HOME"]
        else:
            os.environ["HOME"] = home
    return Cluster(ray, {} if home is None else {"HOME": home})


def _roomy(cluster: Cluster, workers: int, beside: int) -> Cluster:
    cluster.check_cpus(workers, beside)
    return cluster


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def told_as_here() -> Iterator[None]:
    """One of ``REFUSALS`` that a worker met is raised as if it had been met here; Ray wraps it several times."""
    try:
        yield
    except Exception as error:
        inner: BaseException = error
        while (cause := getattr(inner, "cause", None) or inner.__cause__) is not None:
            inner = cause
        if inner is not error and isinstance(inner, tuple(REFUSALS.values())):
            raise inner from None
        raise
