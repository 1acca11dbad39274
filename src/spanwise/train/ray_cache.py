"""``spanwise cache`` on Ray: the teacher pass over a corpus with Ray Data's pool of actors.

The training rows are cut into blocks of ``BATCHES`` micro-batches, which are those of one process: the same rows,
padded alike. Actors score blocks and send the documents' frames; this process appends them in the rows' order. So the
files are, byte for byte, those of one process with as many threads, however many actors there were and whichever of
them died: Ray starts a dead actor again and gives it its unfinished blocks. About 10 s beyond the pass itself.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from spanwise.teachers.cache_build import CacheProgress, wanted_of
from spanwise.teachers.cache_store import CacheIdentity
from spanwise.teachers.cache_writer import CacheWriter, frame_of
from spanwise.teachers.documents import documents_of, split_scores
from spanwise.train.cache_run import ProgressLine, identity_of, open_task, requests_of, to_be_cached, word_starts_of
from spanwise.train.distill import DistillTask
from spanwise.train.distill_recipe import TaskRecipe
from spanwise.train.ray_cluster import Cluster, joined_cluster, stand, told_as_here

# Micro-batches per block: what a killed actor costs at most, for each task it had.
BATCHES = 4
# Beyond so many, blocks share Ray's tasks; each task costs Ray some milliseconds and some memory.
MOST_TASKS = 10_000


def cache_on_ray(recipe: TaskRecipe, paths: Mapping[int, Path]) -> list[dict[str, Any]]:
    """Build the caches of some of a recipe's teachers on ``recipe.ray.workers`` actors.

    Args:
        recipe: with ray.workers of at least 1.
        paths: where each teacher's cache goes, by the teacher's place.

    Returns:
        What one process returns per cache, and ``workers``: pid, host and number of blocks of each actor.
    """
    if recipe.data.stream:
        raise ValueError(
            "data.stream and ray.workers are both set; expected rows that can be counted, since every actor is given "
            "the places of its rows. The recipe was probably written for one process. Fix: data.stream=false (the "
            "corpus stays on the disk), or ray.workers=0."
        )
    # Standard output carries the result alone; what Ray and its actors print, to the end, belongs to standard error.
    with contextlib.redirect_stdout(sys.stderr), joined_cluster(recipe.ray.workers, recipe.ray.address) as cluster:
        job = {"recipe": recipe.model_dump(mode="json"), "place": cluster.place()}
        on_gpu = {"num_gpus": int(cluster.has_gpus(recipe.ray.workers))}
        with told_as_here():
            found = cluster.ray.get(cluster.ray.remote(**on_gpu)(describe).remote(job))
            return _Pass(recipe, paths, cluster, job | {"on_gpu": on_gpu}, **found).run()


def describe(job: Mapping[str, Any]) -> dict[str, Any]:
    """In a worker, which has the memory for it: whose scores the caches will hold, and of how many rows."""
    with _opened(job) as (recipe, task):
        identities = {
            place: identity_of(recipe, term.teacher, term.teacher_tokenizer, recipe.teachers[place])[0]
            for place, term in _terms(recipe, task).items()
        }
        return {"identities": identities, "rows": len(task.train_rows)}


class BlockScorer:
    """An actor: the teachers in its memory, blocks in, frames out.

    Args:
        job: recipe and place.
        known: the documents that are there already, by teacher.
    """

    def __init__(self, job: Mapping[str, Any], known: Mapping[int, frozenset[bytes]]) -> None:
        self._open = contextlib.ExitStack()  # the teachers stay open until the actor ends
        self.recipe, self.task = self._open.enter_context(_opened(job))
        self.known = known
        self.how: dict[int, Any] = {}
        for place, term in _terms(self.recipe, self.task).items():
            found = identity_of(self.recipe, term.teacher, term.teacher_tokenizer, self.recipe.teachers[place])
            self.how[place] = (term, *found, word_starts_of(term, *found))

    def __call__(self, blocks: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Score some blocks."""
        scored = [msgspec.msgpack.encode(self._score(int(block))) for block in blocks["id"]]
        return {
            "scored": np.array(scored, dtype=object),
            "pid": np.full(len(scored), os.getpid()),
            "host": np.full(len(scored), socket.gethostname()),
        }

    def _score(self, block: int) -> dict[int, tuple[int, list[bytes]]]:
        """Of each teacher: documents in the block, and the frames of those in batches that hold a new one."""
        size = BATCHES * self.recipe.cache.batch_size
        places = range(block * size, min((block + 1) * size, len(self.task.train_rows)))
        answer = {}
        for place, (term, identity, device, words) in self.how.items():
            seen, frames = 0, []
            for request in requests_of(self.task, term, self.recipe.cache.batch_size, device, places):
                documents = documents_of(request)
                seen += len(documents)
                if all(document.key in self.known[place] for document in documents):
                    continue
                scores = term.teacher.score(wanted_of(request, identity, words))
                frames += [
                    frame_of(identity, document.key, len(document.ids), part)
                    for document, part in zip(documents, split_scores(documents, scores), strict=True)
                ]
            answer[place] = (seen, frames)
        return answer


class _Pass:
    """One pass over the rows, seen from the process that writes the caches."""

    def __init__(
        self,
        recipe: TaskRecipe,
        paths: Mapping[int, Path],
        cluster: Cluster,
        job: dict[str, Any],
        identities: Mapping[int, CacheIdentity],
        rows: int,
    ) -> None:
        self.recipe, self.paths, self.cluster, self.job = recipe, paths, cluster, job
        self.identities, self.rows = identities, rows
        self.begun = time.monotonic()
        self.done, self.new_tokens = Counter[int](), Counter[int]()
        self.blocks_of: Counter[tuple[int, str]] = Counter()

    def run(self) -> list[dict[str, Any]]:
        with contextlib.ExitStack() as opened:
            writers = {
                place: opened.enter_context(CacheWriter(path, self.identities[place]))
                for place, path in self.paths.items()
            }
            lines = {place: ProgressLine(identity.name) for place, identity in self.identities.items()}
            for scored in self._scored({place: writer.keys() for place, writer in writers.items()}):
                for place, (seen, frames) in scored.items():
                    self.new_tokens[place] += sum(map(writers[place].add_frame, frames))
                    self.done[place] += seen
                    lines[place](self._progress(place, writers[place]))
            for line in lines.values():
                line.end()
            workers = [{"pid": pid, "host": host, "blocks": n} for (pid, host), n in sorted(self.blocks_of.items())]
            return [
                writer.finish() | {"path": str(self.paths[place]), "teacher": self._source(place), "workers": workers}
                for place, writer in writers.items()
            ]

    def _scored(self, known: dict[int, frozenset[bytes]]) -> Iterator[dict[int, tuple[int, list[bytes]]]]:
        """What the actors say of each block, in the blocks' order."""
        size = BATCHES * self.recipe.cache.batch_size
        blocks = -(-self.rows // size)
        if not blocks:  # Ray Data would never end on it
            return
        data: Any = importlib.import_module("ray.data")
        context = data.DataContext.get_current()
        before = context.execution_options.preserve_order, context.enable_progress_bars
        context.execution_options.preserve_order, context.enable_progress_bars = True, False
        try:
            found = data.range(blocks, override_num_blocks=min(blocks, MOST_TASKS)).map_batches(
                BlockScorer,
                batch_size=1,
                compute=data.ActorPoolStrategy(size=self.recipe.ray.workers),
                fn_constructor_args=(self.job, known),
                num_cpus=1,
                **self.job["on_gpu"],
            )
            for row in found.iter_rows():
                self.blocks_of[int(row["pid"]), str(row["host"])] += 1
                yield msgspec.msgpack.decode(row["scored"], type=dict[int, tuple[int, list[bytes]]])
        finally:
            context.execution_options.preserve_order, context.enable_progress_bars = before

    def _progress(self, place: int, writer: CacheWriter) -> CacheProgress:
        seconds = time.monotonic() - self.begun
        return CacheProgress(self.done[place], self.rows, self.new_tokens[place], seconds, writer.bytes_per_token)

    def _source(self, place: int) -> str:
        return self.recipe.teachers[place].source


@contextlib.contextmanager
def _opened(job: Mapping[str, Any]) -> Iterator[tuple[TaskRecipe, DistillTask]]:
    stand(job["place"])
    recipe = TaskRecipe.model_validate(job["recipe"])
    task = open_task(recipe)
    try:
        yield recipe, task
    finally:
        task.close()


def _terms(recipe: TaskRecipe, task: DistillTask) -> dict[int, Any]:
    """The teachers to be cached, by place."""
    return {place: task.terms[f"kd/{place}"] for place in to_be_cached(recipe)}
