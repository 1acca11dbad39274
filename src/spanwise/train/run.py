"""One recipe, one run: lock the folder, build the task, train, measure, report.

What can be known to be wrong before the first step is refused before it, and before the folder is touched where
possible. The folder ends up holding the model and tokenizer (loadable by transformers), ``recipe.yaml``, ``log.jsonl``,
``report.html`` and the checkpoints.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from spanwise.train.recipe import TASK_MODULES as TASKS
from spanwise.train.recipe import Recipe, RecipeError, public_content, read_yaml, without_secrets, write_recipe
from spanwise.train.run_folder import RunFolder

RECIPE_NAME = "recipe.yaml"
REPORT_NAME = "report.html"
# What an evaluation's line in the log holds beside the measures.
NO_MEASURES = {"kind", "step", "seconds"}
# Sections that a continued run may change without becoming another run.
MAY_CHANGE = {"train", "eval", "ray", "output"}


class Preempted(SystemExit):
    """The run was asked to stop (SIGTERM), saved a checkpoint and ended; exit code 143."""

    def __init__(self, step: int) -> None:
        super().__init__(143)
        self.step = step


def train(recipe: Recipe, *, resume: bool = False, callbacks: list[Any] | None = None) -> dict[str, Any]:
    """Run a recipe to its end.

    Args:
        recipe: validated.
        resume: continue the newest checkpoint in the output folder.
        callbacks: transformers' callbacks beside ours.

    Returns:
        loss_per_step, bits_per_byte (None without held-out data), output, report, and the task's other last measures.
    """
    if recipe.ray.workers:
        ray_run: Any = importlib.import_module("spanwise.train.ray_run")
        result: dict[str, Any] = ray_run.train_on_ray(recipe, resume=resume)
        return result
    with _one_run(Path(recipe.output), resume=resume) as folder:
        return run_in_folder(recipe, folder, resume=resume, callbacks=callbacks)


def run_in_folder(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool,
    callbacks: list[Any] | None = None,
    told_to_stop: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """What :func:`train` does once the folder is ours; every rank of a distributed run calls it.

    ``told_to_stop`` ends the run as SIGTERM does, where another process hears the signal.
    """
    import transformers
    from transformers.utils import logging as transformers_logging

    from spanwise.train.arguments import training_arguments
    from spanwise.train.data_workers import told_of_dead_workers
    from spanwise.train.full_disk import told_of_a_full_disk
    from spanwise.train.held_out import check_held_out
    from spanwise.train.preemption import Preemption
    from spanwise.train.progress import ProgressCallback
    from spanwise.train.run_log import RunLog
    from spanwise.train.trainer import SpanwiseTrainer

    transformers_logging.disable_progress_bar()
    checkpoint = checkpoint_to_continue(folder, recipe, resume=resume)
    if recipe.task == "distill":  # the other tasks look at theirs when they are built
        check_held_out(recipe.data)
    transformers.set_seed(recipe.seed)
    began = time.time()
    module: Any = importlib.import_module(TASKS[recipe.task])
    task: Any = module.build(recipe, folder)
    try:
        arguments = training_arguments(recipe, folder, has_evaluation=task.has_evaluation, best_metric=task.best_metric)
        _check_room(folder, task.model, merges=recipe.student.merge)
        first_rank = arguments.process_index == 0
        arguments.distributed_state.wait_for_everyone()  # no rank may still read what the first one now writes
        if first_rank:
            write_recipe(recipe, folder / RECIPE_NAME)
        preemption = Preemption(told_to_stop)
        log = RunLog(folder, writes=first_rank)
        if checkpoint is None:
            log.rewind(-1)  # what a run that never reached a checkpoint wrote is trained again
        trainer = SpanwiseTrainer(task, arguments, log, [ProgressCallback(), *(callbacks or [])], preemption.asked)
        trainer.remove_callback(transformers.PrinterCallback)
        with told_of_a_full_disk(folder), told_of_dead_workers():  # they live until the run ends
            with preemption.listening():
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            if trainer.stopped:
                raise Preempted(trainer.state.global_step)
            return _finish(recipe, folder, trainer, task, seconds=time.time() - began)
    finally:
        task.close()


@contextlib.contextmanager
def _one_run(path: Path, *, resume: bool) -> Iterator[Path]:
    """The folder, locked by the first rank; other ranks of a distributed run rely on it."""
    if int(os.environ.get("RANK", "0")) > 0:
        if not path.exists():  # the first rank may not have come this far
            path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with RunFolder(path, resume=resume) as folder:
        yield folder.path


def checkpoint_to_continue(folder: Path, recipe: Recipe, *, resume: bool) -> Path | None:
    """The newest checkpoint, verified, of a run that may be continued; None to begin at the first step."""
    from spanwise.train.run_folder import checkpoints, verify_checkpoint

    if not resume:
        return None
    earlier = folder / RECIPE_NAME
    if earlier.is_file():
        refuse_another_run(read_yaml(earlier.read_text(encoding="utf-8"), name=str(earlier)), recipe)
    found = checkpoints(folder)
    if not found:
        return None
    verify_checkpoint(found[-1])
    return found[-1]


def refuse_another_run(earlier: dict[str, Any], recipe: Recipe) -> None:
    """A continued run must be the same run: student, teachers, data, loss and seed. Its secrets may be new ones."""
    earlier, now = without_secrets(earlier), public_content(recipe)
    changed = sorted(key for key in now if key not in MAY_CHANGE and earlier.get(key) != now[key])
    if changed:
        before = yaml.safe_dump({key: earlier.get(key) for key in changed}, default_flow_style=True, width=10_000)
        raise RecipeError(
            f"--resume was asked with another {', '.join(changed)} than the run in '{recipe.output}' had "
            f"({before.strip()}); expected the same run. The recipe was probably edited in between. "
            "Fix: undo the edit, or name another output folder to begin a new run."
        )


def _check_room(folder: Path, model: Any, *, merges: bool) -> None:
    """Refuse a disk that cannot hold two checkpoints (weights, and two fp32 moments per trained parameter).

    Of a model with adapters a checkpoint holds these alone; merged at the end, all of it in fp32.
    """
    adapted = hasattr(model, "peft_config")
    weights = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad or not adapted)
    moments = sum(p.numel() * 8 for p in model.parameters() if p.requires_grad)
    merged = sum(p.numel() * 4 for p in model.parameters()) if adapted and merges else 0
    needed, free = 2 * (weights + moments) + merged, shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"the disk of '{folder}' has {free / 2**30:.2f} GiB free; expected at least {needed / 2**30:.2f} GiB for "
            "two checkpoints. Fix: free space, or name an output folder on another disk."
        )


def _finish(recipe: Recipe, folder: Path, trainer: Any, task: Any, *, seconds: float) -> dict[str, Any]:
    """Measure, save the model at the folder's root, write the report."""
    from spanwise.train.run_report import write_run_report
    from spanwise.train.student import merged

    measured = _last_measures(trainer) if task.has_evaluation else {}
    if not recipe.student.merge:
        trainer.save_model(str(folder))
    elif trainer.args.process_index == 0:
        merged(trainer.model).save_pretrained(folder)
        task.processing_class.save_pretrained(folder)
    left_out = trainer.left_out()
    steps = [entry for entry in trainer.run_log.entries if entry["kind"] == "step"]
    result = {
        "loss_per_step": [entry["loss"] for entry in steps],
        "bits_per_byte": None,
        **measured,
        "left_out": left_out,
        "output": str(folder),
        "report": str(folder / REPORT_NAME),
    }
    if trainer.args.process_index == 0:
        write_run_report(folder / REPORT_NAME, recipe, trainer.run_log, task, measured, left_out, seconds)
        write_card(folder, recipe, task, measured)
    trainer.accelerator.wait_for_everyone()  # a rank that returned finds the folder as the run leaves it
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    return result


def _last_measures(trainer: Any) -> dict[str, float]:
    """What the model at hand measures: known already when the last evaluation was of this very model."""
    best = trainer.state.best_global_step if trainer.args.load_best_model_at_end else trainer.state.global_step
    for entry in reversed(trainer.run_log.entries):
        if entry["kind"] == "evaluation" and entry["step"] == best:
            return {name: value for name, value in entry.items() if name not in NO_MEASURES}
    return {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items() if name.startswith("eval_")}


def write_card(folder: Path, recipe: Recipe, task: Any, measured: dict[str, float]) -> None:
    """The model card: what was trained, from what, by which losses, how well, on whose tokenizers, the whole recipe."""
    from spanwise.spans.table import tokenizer_fingerprint

    content = public_content(recipe)
    student = recipe.student.model if isinstance(recipe.student.model, str) else "random weights"
    lines = [
        "---",
        "library_name: transformers",
        "tags: [spanwise]",
        "---",
        f"# {folder.name}",
        "",
        f"Trained with Spanwise: task `{recipe.task}`, student {student}, data {_names(content['data']['train'])}"
        + (f", held-out data {_names(content['data']['eval'])}." if recipe.data.eval else "."),
        "",
    ]
    for place, section in enumerate(content.get("teachers", [])):
        source = next(section[key] for key in ("model", "cache", "url", "process") if section.get(key))
        term = task.terms.get(f"kd/{place}")
        print_ = tokenizer_fingerprint(term.teacher_tokenizer) if term else "not loaded, kd_weight is 0"
        lines.append(f"- teacher {source}: {section['loss']['name']}, weight {section['weight']:g}, tokenizer {print_}")
    if callable(getattr(task.processing_class, "convert_ids_to_tokens", None)):
        lines.append(f"- student tokenizer: {tokenizer_fingerprint(task.processing_class)}")
    lines += [f"- {name}: {value:.4g}" for name, value in measured.items()]
    lines += ["", "```yaml", yaml.safe_dump(content, sort_keys=False, allow_unicode=True).rstrip(), "```", ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _names(sources: str | list[str]) -> str:
    return sources if isinstance(sources, str) else ", ".join(sources)
