"""A run on Ray workers: the same trainer, one rank per worker, through Ray's TorchTrainer.

This process holds the output folder's lock and starts the workers; Ray gives each its rank and its process group, and
starts all of them again when one dies, up to ``RETRIES`` times. Checkpoints and their numbers are reported to Ray where
they lie: the run's folder is Ray's experiment. A worker always continues the newest checkpoint of the folder, so a
retry goes on from there and ends with the curve of a run that nothing happened to. Mistakes in the input are not tried
again. SIGTERM comes to this process, which passes it on as a file; the workers save, and the run ends. The folder must
be one that all workers see. About 20 s beyond the run itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from spanwise.dataplane import TransportDown
from spanwise.train.preemption import at_sigterm
from spanwise.train.ray_cluster import REFUSALS, Cluster, joined_cluster, stand
from spanwise.train.ray_teacher import cpus_of, teacher_actors
from spanwise.train.recipe import Recipe, parse_recipe
from spanwise.train.run import Preempted, checkpoint_to_continue, run_in_folder
from spanwise.train.run_folder import STAGING, RunFolder

RETRIES = 3
# Inside the folder's staging area, which the next run clears: what the workers say of themselves.
STATE = "ray"
REFUSAL = "refusal.json"
STOP = "stop"
# What Ray writes into the folder. It may name checkpoints that have been rotated away, and is never continued from.
RAYS_OWN = ("checkpoint_manager_snapshot.json", ".validate_storage_marker")
# What a worker answers instead of a result when it was asked to stop.
STOPPED_AT = "stopped_at"


def train_on_ray(recipe: Recipe, *, resume: bool = False) -> dict[str, Any]:
    """Run a recipe on ``recipe.ray.workers`` workers.

    Args:
        recipe: validated, with ray.workers of at least 1.
        resume: continue the newest checkpoint in the output folder.

    Returns:
        What :func:`spanwise.train.run.train` returns, and ``workers``: rank, pid and host of each that saw the end.

    Raises:
        Preempted: SIGTERM came, and the workers have saved.
    """
    output = Path(recipe.output).absolute()
    with RunFolder(output, resume=resume) as locked:
        checkpoint_to_continue(locked.path, recipe, resume=resume)
        state = output / STAGING / STATE
        state.mkdir(parents=True)
        # Standard output carries the result alone; what Ray and the workers print is kept out of it to the end.
        with (
            contextlib.redirect_stdout(sys.stderr),
            joined_cluster(recipe.ray.workers, recipe.ray.address, cpus_of(recipe)) as cluster,
            at_sigterm((state / STOP).touch),
        ):
            job = {
                "recipe": recipe.model_dump(mode="json") | {"output": str(output)},
                "place": cluster.place(),
            }
            result = _attempts(cluster, recipe, job, state)
        shutil.rmtree(output / STAGING)
    return result


def _attempts(cluster: Cluster, recipe: Recipe, job: dict[str, Any], state: Path) -> dict[str, Any]:
    """Fit; where the queue of the teachers breaks, again with a new one, from the newest checkpoint."""
    for attempt in range(RETRIES + 1):
        try:
            with teacher_actors(recipe, cluster, job["recipe"]["output"]):
                return _fit(cluster, recipe.ray.workers, job, state)
        except TransportDown as error:
            if attempt == RETRIES:
                raise
            print(f"the teachers' queue broke ({error}); the run goes on with a new one", file=sys.stderr, flush=True)
            (state / REFUSAL).unlink(missing_ok=True)
    raise AssertionError("the last attempt returns or raises")


def _fit(cluster: Cluster, workers: int, job: dict[str, Any], state: Path) -> dict[str, Any]:
    # As Any: the annotations of ray.train name the classes of both its versions.
    ray_train: Any = importlib.import_module("ray.train")
    torch_trainer: Any = importlib.import_module("ray.train.torch").TorchTrainer
    folder = Path(job["recipe"]["output"])
    trainer = torch_trainer(
        work,
        train_loop_config=job,
        scaling_config=ray_train.ScalingConfig(num_workers=workers, use_gpu=cluster.has_gpus(workers)),
        run_config=ray_train.RunConfig(
            name=".",  # of the experiment below the path, so that this is the folder itself; Ray wants a name in ASCII
            storage_path=str(folder),
            failure_config=ray_train.FailureConfig(max_failures=RETRIES),
        ),
    )
    _clear_rays_own(folder)
    try:
        done: Any = trainer.fit()
    except ray_train.TrainingFailedError as error:
        _raise_refusal(state)
        raise RuntimeError(
            f"the run failed {RETRIES + 1} times; expected it to get through in one of them. The last time: {error} "
            f"Fix: mend the cause and go on with --resume; the checkpoints are in '{folder}'."
        ) from error
    finally:
        _clear_rays_own(folder)
    _raise_refusal(state)
    result: dict[str, Any] = done.return_value
    if STOPPED_AT in result:
        raise Preempted(result[STOPPED_AT])
    return result | {"workers": workers_of(state, workers)}


def _clear_rays_own(folder: Path) -> None:
    for name in RAYS_OWN:
        (folder / name).unlink(missing_ok=True)


def work(job: dict[str, Any]) -> dict[str, Any] | None:
    """One worker's part: its rank's share of every step. Ray has set the ranks in the environment and the group up."""
    stand(job["place"])
    folder = Path(job["recipe"]["output"])
    state = folder / STAGING / STATE
    if not state.is_dir():
        raise FileNotFoundError(
            f"the worker on {socket.gethostname()} does not see the output folder '{folder}'; expected one on a disk "
            "that all machines of the cluster share. It is probably a local folder of the machine that started the "
            "run. Fix: name a shared folder in output."
        )
    if (state / REFUSAL).is_file():
        return None
    from spanwise.train.ray_report import RayReport

    for left in (folder / STAGING).glob("checkpoint-*"):  # of a worker that died while it saved
        shutil.rmtree(left, ignore_errors=True)
    rank = int(os.environ["RANK"])
    _write(state / f"worker-{rank}.json", {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()})
    try:
        recipe = parse_recipe(job["recipe"])
        asked = (state / STOP).is_file
        return run_in_folder(recipe, folder, resume=True, callbacks=[RayReport()], told_to_stop=asked)
    except Preempted as stopped:  # to Ray a worker that has done its work
        return {STOPPED_AT: stopped.step}
    except tuple(REFUSALS.values()) as error:
        kind = next(name for name, kind in REFUSALS.items() if isinstance(error, kind))
        _write(state / REFUSAL, {"kind": kind, "message": str(error)})
        raise


def workers_of(state: Path, workers: int) -> list[dict[str, Any]]:
    """Rank, pid and host of the workers that were started last, by rank."""
    return [json.loads((state / f"worker-{rank}.json").read_text()) for rank in range(workers)]


def _raise_refusal(state: Path) -> None:
    file = state / REFUSAL
    if file.is_file():
        refusal = json.loads(file.read_text())
        raise REFUSALS[refusal["kind"]](refusal["message"])


def _write(path: Path, content: dict[str, Any]) -> None:
    """Complete or not at all: another worker may read it now."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as staged:
        staged.write(json.dumps(content))
    Path(staged.name).replace(path)
