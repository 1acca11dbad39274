"""One local Ray cluster for a whole test run, for every room that needs one.

The fixture is known to every test (a second import would be a second fixture, and a second cluster). Mark its tests
``ray`` and ``xdist_group("ray")``: under xdist they then share one worker, and with it this cluster. Ray writes into
HOME, so it gets one of its own; its socket paths must be short, so its folder lies directly under /tmp. About 4 s to
start, 1 s to stop.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CPUS = 6


@dataclass(frozen=True)
class RayCluster:
    """Where the cluster is, and the environment in which another process can join it."""

    address: str
    environment: dict[str, str]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    import ray

    folder = Path(tempfile.mkdtemp(prefix="sw", dir="/tmp"))
    home = os.environ.get("HOME")
    os.environ["HOME"] = str(folder)
    try:
        ray.init(
            num_cpus=CPUS,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=str(folder / "r"),
            object_store_memory=256 << 20,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
        )
    finally:
        if home is None:
            del os.environ["HOME"]
        else:
            os.environ["HOME"] = home
    address = ray.get_runtime_context().gcs_address
    try:
        yield RayCluster(address, {"HOME": str(folder), "RAY_ADDRESS": address, "OMP_NUM_THREADS": "1"})
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
