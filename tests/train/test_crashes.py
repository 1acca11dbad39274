"""Runs that are killed, asked to stop, or continued from what they left: real processes, real signals.

Each ends as a run that nothing happened to, or says what to do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from spanwise.train.data_workers import DeadDataWorkerError, told_of_dead_workers
from spanwise.train.recipe import RecipeError, parse_recipe
from spanwise.train.run import train
from spanwise.train.run_folder import checkpoints, verify_checkpoint
from spanwise.train.run_log import read_log
from tests.train import runs


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return runs.save_teacher(tmp_path_factory.mktemp("teacher"))


def losses(content, **options):
    return train(parse_recipe(content), **options)["loss_per_step"]


def start(content, path, **options):
    command = runs.spanwise("train", str(runs.write(content, path)))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=runs.environment(), **pipes, **options)


def wait_for_step(folder, step, process, seconds=120):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        log = read_log(folder / "log.jsonl")
        if any(entry["step"] >= step and entry["kind"] == "step" for entry in log):
            return
        assert process.poll() is None, process.communicate()[1][-2000:]
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, teacher):
    """The curve of a run with dropout that nothing happened to."""
    return losses(with_dropout(tmp_path_factory.mktemp("whole"), teacher))


def with_dropout(tmp_path, teacher, steps=40):
    content = runs.recipe(tmp_path, teacher, max_steps=steps, save_strategy="steps", save_steps=4)
    content["student"]["model"] = runs.config(attention_dropout=0.2)
    content["loss"] = {"dynamic": True}
    return content


def test_a_killed_run_continues_as_if_nothing_had_happened(tmp_path, teacher, whole):
    content = with_dropout(tmp_path / "killed", teacher)
    folder = Path(content["output"])
    folder.parent.mkdir(parents=True)
    process = start(content, tmp_path / "killed.yaml")
    wait_for_step(folder, 6, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert checkpoints(folder)
    # What a kill in the middle of a checkpoint leaves behind must not be taken for one.
    (folder / ".staging" / "checkpoint-99").mkdir(parents=True, exist_ok=True)
    with pytest.raises(ValueError, match="--resume"):
        losses(content)
    continued = losses(content, resume=True)
    assert continued == whole


# Dies while the manifest of the second checkpoint is made: its files lie there, whole, and it has no name yet.
KILLED_AS_IT_PUBLISHES = """
import os, signal, sys
from spanwise.train import run_folder
from spanwise.train.recipe import load_recipe
from spanwise.train.run import train
digest = run_folder.file_digest
def digest_or_die(path):
    if path.name == "optimizer.pt" and path.parent.name == "checkpoint-8":
        os.kill(os.getpid(), signal.SIGKILL)
    return digest(path)
run_folder.file_digest = digest_or_die
train(load_recipe(sys.argv[1]))
"""


def test_a_run_that_was_killed_as_it_published_a_checkpoint_continues(tmp_path, teacher, whole):
    content = with_dropout(tmp_path, teacher)
    recipe = runs.write(content, tmp_path / "recipe.yaml")
    command = [sys.executable, "-c", KILLED_AS_IT_PUBLISHES, str(recipe)]
    done = subprocess.run(command, env=runs.environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    folder = Path(content["output"])
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-4"]
    assert (folder / ".staging" / "checkpoint-8" / "optimizer.pt").is_file()
    assert losses(content, resume=True) == whole


def test_a_killed_data_worker_ends_the_run_with_what_to_do_and_resume_goes_on(tmp_path, teacher, whole):
    content = with_dropout(tmp_path / "killed", teacher)
    content["train"] |= {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 2}
    folder = Path(content["output"])
    folder.parent.mkdir(parents=True)
    process = start(content, tmp_path / "killed.yaml")
    wait_for_step(folder, 5, process)
    process.send_signal(signal.SIGSTOP)  # so that it cannot reach its end before its child is killed
    (reader,) = psutil.Process(process.pid).children()
    reader.kill()
    process.send_signal(signal.SIGCONT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "DeadDataWorkerError: a process that read data for this run was killed" in said, said[-3000:]
    assert "Fix: go on with --resume" in said
    assert losses(content, resume=True) == whole


def test_sigterm_to_all_processes_saves_and_exits_143_and_meanwhile_another_run_is_refused(tmp_path, teacher):
    """Schedulers signal every process of a job: the one that reads data and the teacher's outlive it until the end."""
    content = with_dropout(tmp_path, teacher, steps=4000)
    content["teachers"] = [{"process": str(teacher), "loss": "prefix_kl"}]
    content["train"] |= {"save_steps": 4000, "gradient_accumulation_steps": 2, "dataloader_num_workers": 1}
    folder = Path(content["output"])
    process = start(content, tmp_path / "recipe.yaml", start_new_session=True)
    wait_for_step(folder, 2, process)
    children = psutil.Process(process.pid).children()
    assert len(children) == 2
    with pytest.raises(ValueError, match="in use by another run"):
        losses(content, resume=True)
    os.killpg(process.pid, signal.SIGTERM)
    began = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said[-3000:]
    assert time.monotonic() - began < 30, "what schedulers grant"
    (saved,) = checkpoints(folder)
    verify_checkpoint(saved)
    assert int(saved.name.split("-")[1]) >= 2
    assert not [child for child in children if child.is_running()]


def test_resume_refuses_another_run_and_a_damaged_checkpoint(tmp_path, teacher):
    content = runs.recipe(tmp_path, teacher, save_strategy="steps", save_steps=2)
    train(parse_recipe(content))
    with pytest.raises(RecipeError, match="with another seed"):
        train(parse_recipe(content | {"seed": 3}), resume=True)
    newest = checkpoints(Path(content["output"]))[-1]
    (newest / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match=r"lacks optimizer\.pt"):
        train(parse_recipe(content), resume=True)


class BrokenCorpus(torch.utils.data.Dataset):
    """Rows from a server that hangs up."""

    def __len__(self):
        return 4

    def __getitem__(self, place):
        raise ConnectionResetError("the server hung up")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_connection_that_the_corpus_lost_is_not_taken_for_a_dead_worker(workers):
    loader = torch.utils.data.DataLoader(BrokenCorpus(), num_workers=workers)
    with pytest.raises(ConnectionResetError, match="the server hung up"), told_of_dead_workers():
        list(loader)


class DyingCorpus(BrokenCorpus):
    """Rows whose reader dies."""

    def __getitem__(self, place):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_reader_that_dies_is_named():
    with pytest.raises(DeadDataWorkerError, match="Fix: go on with --resume"), told_of_dead_workers():
        list(torch.utils.data.DataLoader(DyingCorpus(), num_workers=1))
