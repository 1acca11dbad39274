"""The teachers of a run as Ray actors, and the queue their scores go through.

``ray.teachers=N`` gives every teacher that is a model N actors of its own, so that no student worker holds its
weights. An actor that is killed is started again and is given what it had not answered; a queue that breaks ends the
attempt, and the run goes on from its newest checkpoint with a new one. About 10 s, and the loading of the teachers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from spanwise.dataplane import open_client
from spanwise.loading import load_tokenizer
from spanwise.teachers.scores import TeacherScores
from spanwise.teachers.teacher import ScoreRequest
from spanwise.train.distill import open_teacher
from spanwise.train.distill_recipe import TaskRecipe, TeacherSection, is_streamed
from spanwise.train.ray_cluster import Cluster, stand, told_as_here
from spanwise.train.recipe import Recipe
from spanwise.train.streamed_teacher import (
    NONCE,
    QUEUE,
    SLOTS,
    actor_name,
    actor_namespace,
    columns_of,
    unpack_asked,
)
from spanwise.xtoken.losses.shared_set import share_picked

# How often an actor is started again.
RESTARTS = 3
# CPUs of the queue: its controller and one storage unit.
QUEUE_CPUS = 2


class TeacherActor:
    """One teacher in a process of its own.

    Args:
        section: of the teacher in the recipe, as JSON values.
        place: where to stand; see :func:`spanwise.train.ray_cluster.stand`.
    """

    def __init__(self, section: Mapping[str, Any], place: Mapping[str, Any]) -> None:
        stand(place)
        asked = TeacherSection.model_validate(section)
        tokenizer = load_tokenizer(asked.tokenizer or asked.source)
        self.teacher = open_teacher(asked, None, tokenizer)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.client: Any = open_client(QUEUE, layout="frame")
        self.registered: set[str] = set()

    def describe(self) -> dict[str, Any]:
        """What a student must know before it asks."""
        return {
            "name": self.teacher.name,
            "vocab_size": self.teacher.vocab_size,
            "forms": sorted(self.teacher.forms),
        }

    def score(self, partition: str, sample: str, nonce: int, packed: Mapping[str, Any]) -> dict[str, Any]:
        """Score a request into one sample of the queue; its columns, and the temperature of what they hold."""
        request = unpack_asked(packed, self.device)
        scores = self._scores(request)
        columns = columns_of(scores, request.token_mask)
        if partition not in self.registered:
            self.client.register_partition(partition, [NONCE, *columns], SLOTS, ["student"])
            self.registered.add(partition)
        self.client.put_samples([sample], partition, {**columns, NONCE: torch.tensor([nonce])})
        return {"columns": list(columns), "temperature": scores.temperature}

    def _scores(self, request: ScoreRequest) -> TeacherScores:
        scores: TeacherScores = self.teacher.score(replace(request, pick=None))
        if request.pick is None:
            return scores
        return share_picked(
            scores, request.pick, teacher_vocab_size=self.teacher.vocab_size, temperature=request.temperature
        )


def places_streamed(recipe: Recipe) -> list[int]:
    """The places of the teachers that get actors."""
    if not isinstance(recipe, TaskRecipe) or not recipe.loss.kd_weight:
        return []
    return [place for place, section in enumerate(recipe.teachers) if is_streamed(section, recipe)]


def cpus_of(recipe: Recipe) -> int:
    """CPUs that a run's teachers and their queue reserve."""
    actors = recipe.ray.teachers * len(places_streamed(recipe))
    return actors + QUEUE_CPUS if actors else 0


@contextlib.contextmanager
def teacher_actors(recipe: Recipe, cluster: Cluster, output: str) -> Iterator[None]:
    """Start the queue and the actors of a run, wait until every teacher is loaded, and end them after."""
    places = places_streamed(recipe)
    if not places:
        yield
        return
    on_gpu = cluster.has_gpus(recipe.ray.workers, recipe.ray.teachers * len(places))
    kind = cluster.ray.remote(TeacherActor)
    with contextlib.ExitStack() as opened:
        opened.callback(open_client(QUEUE, layout="frame").close)
        actors = []
        for place in places:
            section = recipe.teachers[place].model_dump(mode="json")  # type: ignore[attr-defined]
            for replica in range(recipe.ray.teachers):
                actor = kind.options(
                    name=actor_name(place, replica),
                    namespace=actor_namespace(output),
                    num_cpus=1,
                    num_gpus=int(on_gpu),
                    max_restarts=RESTARTS,
                    max_task_retries=-1,
                ).remote(section, cluster.place())
                opened.callback(cluster.ray.kill, actor)
                actors.append(actor)
        with told_as_here():
            cluster.ray.get([actor.describe.remote() for actor in actors])
        yield
