"""Grouping by length: what shares a step is of like length, and every row is still seen once."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch

from spanwise.train.arguments import training_arguments
from spanwise.train.recipe import parse_recipe
from spanwise.train.run_log import RunLog
from spanwise.train.sampler import StepSampler
from spanwise.train.trainer import SpanwiseTrainer
from tests.train import runs

ROWS, STEP = 1_003, 8


def ranges(lengths: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """How far the lengths of each step's rows lie apart."""
    return torch.tensor([int(lengths[step].max() - lengths[step].min()) for step in order.split(STEP)])


def test_steps_are_of_like_length_and_every_row_is_seen_once() -> None:
    lengths = torch.randint(1, 2_000, (ROWS,), generator=torch.Generator().manual_seed(0))
    made = {
        grouped: StepSampler(ROWS, batch_size=4, ranks=2, lengths=lengths.tolist() if grouped else None)
        for grouped in (False, True)
    }
    assert made[True].step_size == STEP
    apart = {grouped: ranges(lengths, sampler.order()).float().mean() for grouped, sampler in made.items()}
    assert apart[True] < apart[False] / 10
    orders = []
    for epoch in range(2):
        made[True].set_epoch(epoch)
        orders.append(made[True].order())
        assert sorted(orders[-1].tolist()) == list(range(ROWS))
    assert not torch.equal(*orders), "each epoch has an order of its own"
    first_of_steps = lengths[orders[0][: STEP * 40 : STEP]]
    assert first_of_steps.diff().sign().unique().numel() > 1, "steps do not come by length"


def test_an_epoch_costs_eight_bytes_a_row() -> None:
    """Batches are made as they are asked for; a list of places would cost a hundred bytes each."""
    rows = 60_000
    sampler = StepSampler(rows, batch_size=3, ranks=2)
    tracemalloc.start()
    seen = blanks = 0
    for batch in sampler:
        assert len(batch) == 3
        seen += sum(position >= 0 for _, _, position in batch)
        blanks += sum(position < 0 for _, _, position in batch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (seen, blanks) == (rows, -rows % 6)
    assert peak < rows  # torch's own eight bytes a row are not traced


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_recipe_groups_what_its_trainer_reads(tmp_path: Path, accumulation: int) -> None:
    from spanwise.train import distill

    found = {}
    for strategy in ("random", "group_by_length"):
        content = runs.recipe(tmp_path / strategy, train_sampling_strategy=strategy)
        content["train"] |= {"per_device_train_batch_size": STEP // accumulation}
        content["train"]["gradient_accumulation_steps"] = accumulation
        recipe = parse_recipe(content)
        folder = Path(recipe.output)
        folder.mkdir(parents=True)
        task = distill.build(recipe, folder)
        arguments = training_arguments(recipe, folder, has_evaluation=False, best_metric=task.best_metric)
        trainer = SpanwiseTrainer(task, arguments, RunLog(folder))
        trainer._train_batch_size = STEP // accumulation
        trainer.get_train_dataloader()
        assert trainer._sampler is not None
        lengths = torch.tensor(task.train_rows.lengths())
        texts = [len(task.train_rows[place]["text"].encode()) for place in range(20)]
        assert lengths[:20].tolist() == texts
        found[strategy] = ranges(lengths, trainer._sampler.order()).float().mean()
    assert found["group_by_length"] < found["random"] / 4
