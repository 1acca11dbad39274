"""Teachers in actors of their own: the scores and the curve of a teacher in the student's process.

Ray runs in the cluster of the test session; teacher, student and queue are processes of their own.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spanwise.loading import load_tokenizer
from spanwise.teachers.scores import TeacherScores
from spanwise.teachers.teacher import ScoreRequest, SharedPick
from spanwise.train.distill import build, open_teacher
from spanwise.train.ray_cluster import joined_cluster
from spanwise.train.ray_teacher import cpus_of, teacher_actors
from spanwise.train.recipe import RecipeError, parse_recipe
from spanwise.train.run import train
from spanwise.train.streamed_teacher import SLOTS, StreamedTeacher, actor_namespace
from spanwise.xtoken.losses.shared_set import share_picked
from tests.ray_cluster import RayCluster
from tests.train import runs

pytestmark = [
    pytest.mark.ray,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore::UserWarning:ray.data.context", "ignore::DeprecationWarning:ray.data.context"),
]
VOCABULARY = 1_237  # of the teacher's head; no other module has this size


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def actors(tmp_path_factory: pytest.TempPathFactory, teacher: Path, ray_cluster: RayCluster) -> Iterator[str]:
    """One actor with the teacher, and its queue; the namespace it is found in."""
    folder = tmp_path_factory.mktemp("actors")
    recipe = parse_recipe(streamed(runs.recipe(folder, teacher), workers=1))
    with joined_cluster(1, None, cpus_of(recipe)) as cluster, teacher_actors(recipe, cluster, str(folder)):
        yield actor_namespace(str(folder))


def streamed(content: dict[str, Any], workers: int = 2) -> dict[str, Any]:
    """The same steps, dealt to workers that have no teacher."""
    size = content["train"]["per_device_train_batch_size"] // workers
    return content | {
        "output": content["output"] + "-streamed",
        "train": content["train"] | {"per_device_train_batch_size": size},
        "ray": {"workers": workers, "teachers": 1},
    }


def ragged_request(rows: int = 3, length: int = 9, **asked: Any) -> ScoreRequest:
    ids = torch.randint(0, 400, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = torch.arange(length)[None] < torch.tensor([[length], [4], [1]])[:rows]
    return ScoreRequest(ids, mask.long(), **asked)


ASKED = {
    "dense": {},
    "top-k": {"top_k": 5, "temperature": 2.0},
    "top-k with statistics": {"top_k": 3, "statistics": True},
    "shared ids": {"shared_ids": torch.tensor([[1, 5, 9], [0, 2, 4], [7, 8, 11]])},
    "packed": {
        "top_k": 4,
        "segment_ids": torch.tensor([[1, 1, 2, 2, 2, 3, 3, 3, 3], [1] * 4 + [0] * 5, [1] + [0] * 8]),
    },
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
def test_scores_are_those_of_the_teacher_itself(teacher: Path, actors: str, asked: dict[str, Any]) -> None:
    request = ragged_request(**asked)
    section = parse_recipe(runs.recipe(teacher, teacher)).teachers[0]
    expected = open_teacher(section, None, load_tokenizer(str(teacher))).score(request)
    far = StreamedTeacher(0, 1, actors)
    compare(far.score(request), expected, request)
    far.close()


def test_a_pick_sends_the_columns_that_the_loss_reads(teacher: Path, actors: str) -> None:
    pick = SharedPick(torch.tensor([0, 1, 3, 9, 10]), torch.tensor([0, 0, 0, 1, 1]), 3, 17)
    request = ragged_request()
    section = parse_recipe(runs.recipe(teacher, teacher)).teachers[0]
    near = open_teacher(section, None, load_tokenizer(str(teacher)))
    far = StreamedTeacher(0, 1, actors)
    scores = far.score(replace(request, pick=pick))
    assert scores.form == "shared"
    compare(scores, share_picked(near.score(request), pick, teacher_vocab_size=near.vocab_size), request)
    far.close()


def compare(scores: TeacherScores, expected: TeacherScores, request: ScoreRequest) -> None:
    """Equal at every real position, with nothing at the others."""
    assert scores.form == expected.form
    assert scores.temperature == expected.temperature
    real = request.token_mask != 0
    for field in fields(TeacherScores):
        ours, theirs = getattr(scores, field.name), getattr(expected, field.name)
        if not isinstance(theirs, torch.Tensor):
            assert ours == theirs
        elif field.name == "shared_ids":
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours[real], theirs[real], rtol=1e-5, atol=1e-5)
            assert bool((ours[~real] == (-1 if field.name == "top_ids" else 0)).all())


def test_more_is_announced_than_the_queue_has_places_and_a_dropped_step_harms_nothing(actors: str) -> None:
    far = StreamedTeacher(0, 1, actors)
    requests = [replace(ragged_request(top_k=2), temperature=1.0 + step) for step in range(SLOTS + 3)]
    for request in requests:
        far.announce(request)
    # The first two are given up; the rest come in order, whatever place of the queue they have.
    for request in requests[2:]:
        assert far.score(request).temperature == request.temperature
    held = far._client.stats()["partitions"][far._partition]
    assert held["samples"] <= SLOTS
    assert held["frames"] <= SLOTS, "an answer takes the place of an earlier one"
    far.close()
    far.close()


def test_a_mistake_in_the_request_is_told_as_here(actors: str) -> None:
    far = StreamedTeacher(0, 1, actors)
    with pytest.raises(ValueError, match="temperature"):
        far.score(ragged_request(top_k=2, temperature=-1.0))
    assert far.score(ragged_request(top_k=2)).form == "topk"
    far.close()


@pytest.mark.parametrize("loss", [pytest.param("prefix_kl", marks=pytest.mark.full), "projected_kl"])
def test_the_curve_is_that_of_a_teacher_in_the_process(
    tmp_path: Path, teacher: Path, ray_cluster: RayCluster, loss: str
) -> None:
    content = runs.recipe(tmp_path, teacher, gradient_accumulation_steps=2)
    content["teachers"][0]["loss"] = {"name": loss} | ({"vocab_topk": 64} if loss == "projected_kl" else {})
    content["data"]["packing"] = loss == "projected_kl"
    alone = train(parse_recipe(content))
    result = train(parse_recipe(streamed(content)))
    torch.testing.assert_close(result["loss_per_step"], alone["loss_per_step"], rtol=2e-5, atol=1e-6)
    assert len({worker["pid"] for worker in result["workers"]} | {os.getpid()}) == 3


def test_the_student_never_holds_the_teacher(tmp_path: Path, ray_cluster: RayCluster) -> None:
    from tests import tiny_tokenizers

    tokenizer = tiny_tokenizers.byte_level_bpe(420, start=8)
    tokenizer.add_tokens([f"<extra {i}>" for i in range(VOCABULARY - len(tokenizer))])
    content = streamed(runs.recipe(tmp_path, runs.save_teacher(tmp_path / "wide", tokenizer)), workers=1)
    recipe = parse_recipe(content)
    (tmp_path / "student").mkdir()
    with joined_cluster(1, None, cpus_of(recipe)) as cluster, teacher_actors(recipe, cluster, recipe.output):
        task = build(recipe, tmp_path / "student")
        batch = task.collator([task.train_rows[place] for place in range(4)])
        scales = {"ce": 1.0, "kd/0": 1.0}
        task.losses(task.model, batch, scales)["kd/0"].total.backward()
        assert parameters()
        assert not parameters(VOCABULARY)
        task.close()
    near = open_teacher(recipe.teachers[0], None, load_tokenizer(recipe.teachers[0].source))
    assert near.vocab_size == VOCABULARY
    assert parameters(VOCABULARY), "a teacher in this process would have been seen"


def parameters(width: int | None = None) -> list[torch.Size]:
    """Shapes of the parameters in this process (that have a side of this width)."""
    gc.collect()
    held = [found.shape for found in gc.get_objects() if issubclass(type(found), torch.nn.Parameter)]
    return [shape for shape in held if width is None or width in shape]


def test_actors_without_a_teacher_or_workers_or_room_are_refused(
    tmp_path: Path, teacher: Path, ray_cluster: RayCluster
) -> None:
    content = runs.recipe(tmp_path, teacher)
    with pytest.raises(RecipeError, match="workers of at least 1"):
        parse_recipe(content | {"ray": {"teachers": 1}})
    with pytest.raises(RecipeError, match="no teacher is a model"):
        parse_recipe(content | {"teachers": [], "ray": {"teachers": 1, "workers": 1}})
    crowded = parse_recipe(content | {"ray": {"teachers": 99, "workers": 1}})
    with pytest.raises(ValueError, match=r"101 more processes .* Fix: lower ray\.workers or ray\.teachers"):
        train(crowded)
