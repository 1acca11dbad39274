"""Any split into micro-batches, ranks or packed rows gives the same number and gradient."""

from __future__ import annotations

import itertools
import multiprocessing
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.teachers.scores import TeacherScores
from spanwise.xtoken.losses import (
    averaged_logits,
    count_chunks,
    document_scores,
    dynamic_weights,
    merge_teachers,
    plan_chunks,
    plan_tokens,
    projected_kl,
    select_teacher,
    vocabulary_factor,
)
from tests.xtoken.cases import random_case, take
from tests.xtoken.test_loss_edges import EVERY, LOSSES, run

SPAWN = multiprocessing.get_context("spawn")


def part_of(case, rows: slice):
    part = random_case(0)
    part.z, part.y = case.z[rows], case.y[rows]
    part.alignment, part.projection = take(case.alignment, rows), case.projection
    return part


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.lists(st.integers(1, 5), max_size=3), st.sampled_from(EVERY))
def test_micro_batches_add_up(seed: int, cuts: list[int], which: str) -> None:
    case = random_case(seed, batch=6)
    scale = 1.0 / max(float(run(which, case).count), 1.0)
    whole = run(which, case, scale=scale)
    bounds = [0, *sorted(set(cuts)), 6]
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for start, end in itertools.pairwise(bounds):
        parts = run(which, part_of(case, slice(start, end)), scale=scale)
        total, count = total + parts.total, count + float(parts.count)
    assert count == float(whole.count)
    if which in LOSSES:
        assert count == float(count_chunks(case.alignment, sample_mask=torch.ones(6)))
    torch.testing.assert_close(total, whole.total, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(total, case.z)[0], torch.autograd.grad(whole.total, case.z)[0], rtol=1e-9, atol=1e-12
    )


def test_tiles_do_not_show(monkeypatch) -> None:
    case = random_case(5, batch=4, s=20, t=20, chunks=15)
    for which in EVERY:
        whole = run(which, case)
        monkeypatch.setattr("spanwise.xtoken.losses.rows.TILE_ELEMENTS", 20)
        tiled = run(which, case)
        monkeypatch.undo()
        torch.testing.assert_close(tiled.total, whole.total)
        torch.testing.assert_close(
            torch.autograd.grad(tiled.total, case.z)[0], torch.autograd.grad(whole.total, case.z)[0]
        )


@pytest.mark.parametrize("which", ["projected", "gold", "hkl", "uld", "alm"])
def test_two_documents_in_a_row_equal_two_rows(which: str) -> None:
    case, weights = random_case(2, batch=2), torch.tensor([1.0, 0.5])
    (s, t), pairs = (case.z.shape[1], case.y.shape[1]), case.alignment.pair_valid.shape[1]
    a, offset = case.alignment, torch.tensor([[0], [pairs]])
    joined = random_case(2, batch=1, s=2 * s, t=2 * t)
    joined.z = case.z.detach().reshape(1, 2 * s, -1).requires_grad_()
    joined.y = case.y.reshape(1, 2 * t, -1)
    joined.projection = case.projection
    joined.alignment = type(a)(
        a.pair_valid.reshape(1, -1), a.pair_is_correct.reshape(1, -1), a.student_exact_partition_mask.reshape(1, -1),
        a.teacher_exact_partition_mask.reshape(1, -1),
        torch.where(a.student_chunk_id >= 0, a.student_chunk_id + offset, -1).reshape(1, -1),
        torch.where(a.teacher_chunk_id >= 0, a.teacher_chunk_id + offset, -1).reshape(1, -1),
        torch.tensor([2 * pairs]),
    )  # fmt: skip
    plan = plan_chunks(
        joined.alignment, sample_mask=weights, segment_ids=torch.tensor([[1] * s + [2] * s]),
        teacher_segment_ids=torch.tensor([[1] * t + [2] * t]), pair_document=torch.tensor([[0] * pairs + [1] * pairs]),
    )  # fmt: skip
    apart, packed = run(which, case, sample_mask=weights), run(which, joined, plan=plan)
    assert float(packed.count) == float(apart.count) > 0
    torch.testing.assert_close(packed.total, apart.total)
    (wanted,), (got,) = torch.autograd.grad(apart.total, case.z), torch.autograd.grad(packed.total, joined.z)
    torch.testing.assert_close(got.reshape_as(wanted), wanted)


def rank_main(rank: int, file: str, pipe) -> None:
    """One of two data-parallel ranks; first both have valid chunks, then only rank 0."""
    torch.set_num_threads(1)
    import torch.distributed as dist

    from spanwise.xtoken.loss_utils import dp_all_reduce_sum

    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    for empty_rank in (False, True):
        case = rank_case(empty_rank)
        part = part_of(case, slice(2 * rank, 2 * rank + 2))
        local = count_chunks(part.alignment)
        total_count = dp_all_reduce_sum(local)
        pairs = {}
        for which in ("projected", "gold", "alm", "prefix"):
            z = part.z.detach().requires_grad_()
            parts = run(which, part, z=z, scale=1.0 / max(float(total_count), 1.0))
            parts.total.backward()
            value = parts.total.detach().clone()
            dist.all_reduce(value)
            pairs[which] = (float(value), z.grad.tolist())
        # Tensor-parallel replicas are not in the data-parallel group: their count is not summed.
        pipe.send((float(local), float(total_count), float(dp_all_reduce_sum(local, group=alone)), pairs))
    dist.barrier()
    dist.destroy_process_group()


def rank_case(empty_rank: bool):
    case = random_case(21, batch=4)
    if empty_rank:
        case.alignment.pair_valid[2:] = False
    return case


def test_two_ranks_equal_one(tmp_path) -> None:
    pipes, processes = [], []
    for rank in range(2):
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=rank_main, args=(rank, f"{tmp_path}/meet", theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    for empty_rank in (False, True):
        assert all(pipe.poll(60) for pipe in pipes)
        results = [pipe.recv() for pipe in pipes]
        case = rank_case(empty_rank)
        whole_count = float(count_chunks(case.alignment))
        for rank, (local, total, replica, pairs) in enumerate(results):
            assert total == whole_count == results[0][0] + results[1][0]
            assert replica == local
            for which, (value, grad) in pairs.items():
                whole = run(which, case, scale=1.0 / max(whole_count, 1.0))
                assert value == pytest.approx(float(whole.total.detach()), rel=1e-6)
                wanted = torch.autograd.grad(whole.total, case.z)[0][2 * rank : 2 * rank + 2]
                torch.testing.assert_close(torch.tensor(grad, dtype=torch.float64), wanted, rtol=1e-6, atol=1e-9)
    assert results[1][0] == 0.0
    for which in ("projected", "prefix"):
        assert torch.tensor(results[1][3][which][1]).eq(0).all()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0


def test_dynamic_weights_and_selection_are_per_document() -> None:
    case, other = random_case(3, batch=3), random_case(4, batch=3)
    ids = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([10.0, 20.0, 30.0])
    plan = plan_tokens(ids)
    for score in ("cross_entropy", "entropy", "max_probability"):
        both = [document_scores(TeacherScores(logits=c.y), plan, ids, sizes, score=score) for c in (case, other)]
        weights = torch.stack(dynamic_weights(both, alpha=2.0))
        torch.testing.assert_close(weights.sum(0), torch.ones(3))
        alone = document_scores(
            TeacherScores(logits=case.y[1:2]), plan_tokens(ids[1:2]), ids[1:2], sizes[1:2], score=score
        )
        torch.testing.assert_close(alone, both[0][1:2])
    ce = torch.stack([document_scores(TeacherScores(logits=c.y), plan, ids, sizes) for c in (case, other)])
    nats = torch.log_softmax(case.y[:, :-1], -1).gather(2, ids[:, 1:, None]).sum((1, 2))
    torch.testing.assert_close(ce[0], (nats / sizes).float())
    chosen = torch.stack(select_teacher(list(ce)))
    assert chosen.sum(0).eq(1).all()
    assert (chosen.argmax(0) == ce.argmax(0)).all()


def test_a_teacher_without_a_score_gets_no_weight_at_any_alpha() -> None:
    scores = [torch.tensor([-1.0, -torch.inf, -torch.inf]), torch.tensor([-2.0, -3.0, -torch.inf])]
    for alpha in (0.0, -1.0, 2.0):
        weights = torch.stack(dynamic_weights(scores, alpha=alpha))
        torch.testing.assert_close(weights.sum(0), torch.ones(3))
        assert weights[:, 1].tolist() == [0.0, 1.0]
        assert weights[:, 2].tolist() == [0.5, 0.5]


def test_a_weighted_plan_keeps_its_count_when_moved_and_cut() -> None:
    plan = plan_chunks(random_case(3, batch=3).alignment)
    assert 0 < float(plan.correct_only().count) < float(plan.count)
    weighted = plan.of_document(torch.tensor([0.2, 0.0, 3.0]))
    assert float(weighted.to("cpu").count) == float(plan.count)
    assert weighted.to("meta").count.device.type == "meta"
    assert float(weighted.correct_only().count) == float(plan.correct_only().count)
    assert float(weighted.of_document(torch.ones(3) / 2).count) == float(plan.count)


def test_weights_reach_the_total_and_not_the_count() -> None:
    case = random_case(3, batch=3)
    scores = TeacherScores(logits=case.y)
    plan = plan_chunks(case.alignment)
    weights = torch.tensor([0.2, 0.0, 3.0])
    weighted = projected_kl(case.z, scores, None, case.projection, plan=plan.of_document(weights))
    assert float(weighted.count) == float(plan.count)
    singles = []
    for b in range(3):
        alone = take(case.alignment, slice(b, b + 1))
        parts = projected_kl(case.z[b : b + 1], scores.slice(b, b + 1), alone, case.projection)
        singles.append(weights[b].item() * float(parts.total.detach()))
    assert float(weighted.total.detach()) == pytest.approx(sum(singles))


def test_merged_metrics_are_named_and_not_summed() -> None:
    case = random_case(3)
    one, two = (run("projected", case, scale=0.5) for _ in range(2))
    total, metrics = merge_teachers({"a": one, "b": two})
    torch.testing.assert_close(total, 2 * one.total)
    assert metrics["a/accuracy"].value == metrics["b/accuracy"].value == one.metrics["accuracy"].value
    with pytest.raises(ValueError, match="with their scale"):
        merge_teachers({"a": run("projected", case)})
    assert vocabulary_factor(8) == pytest.approx(0.4808983)
    with pytest.raises(ValueError, match="at least 2"):
        vocabulary_factor(1)


def test_averaged_logits_need_one_tokenizer() -> None:
    a, b = (TeacherScores(logits=torch.full((1, 2, 3), value)) for value in (1.0, 4.0))
    assert averaged_logits([a, b], [2.0, 1.0], ["x", "x"]).logits.unique().tolist() == [2.0]
    with pytest.raises(ValueError, match="different tokenizers"):
        averaged_logits([a, b], [1.0, 1.0], ["x", "y"])
    with pytest.raises(ValueError, match="expected dense"):
        averaged_logits([a.topk(1), b], [1.0, 1.0], ["x", "x"])
    with pytest.raises(ValueError, match="as many of each"):
        averaged_logits([a], [1.0, 1.0], ["x"])
