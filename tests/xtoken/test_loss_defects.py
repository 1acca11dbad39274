"""Where losses across tokenizers are known to go wrong, one test each: every one of these was once a wrong number, a
NaN or a crash in some implementation.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spanwise.teachers.scores import TeacherScores
from spanwise.train.trainer import SpanwiseTrainer
from spanwise.xtoken.loss_utils import chunk_average_log_probs, dp_all_reduce_sum, get_topk_projection
from spanwise.xtoken.losses import count_chunks, gold, merge_teachers, next_token_ce, projected_kl
from spanwise.xtoken.projection import Projection
from tests.xtoken.cases import random_case, take
from tests.xtoken.test_loss_edges import gradient, run


def test_tensor_parallel_replicas_do_not_divide_the_loss(monkeypatch) -> None:
    """Two replicas hold the same chunks: the count is summed over the data-parallel group that is named, no other."""
    asked: list[Any] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group=None: asked.append(group))
    local = count_chunks(random_case(1).alignment)
    assert float(dp_all_reduce_sum(local, group="data-parallel")) == float(local)
    assert asked == ["data-parallel"]


def test_the_count_is_the_global_batchs_like_that_of_cross_entropy() -> None:
    """Micro-batches of unequal counts: both terms divide by what all of them counted, and add up to one big batch."""
    case = random_case(4, batch=3)
    ids = torch.zeros(3, 7, dtype=torch.long)
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4, [1] * 5 + [0] * 2])
    chunks = [float(count_chunks(take(case.alignment, slice(b, b + 1)))) for b in range(3)]
    assert len(set(chunks)) > 1
    kd = ce = torch.zeros((), dtype=torch.float64)
    tokens = float(next_token_ce(case.z, ids, mask).count)
    for b in range(3):
        rows = slice(b, b + 1)
        scores, alignment = TeacherScores(logits=case.y[rows]), take(case.alignment, rows)
        kd = kd + projected_kl(case.z[rows], scores, alignment, case.projection, scale=1 / sum(chunks)).total
        ce = ce + next_token_ce(case.z[rows], ids[rows], mask[rows], scale=1 / tokens).total
    whole = projected_kl(case.z, TeacherScores(logits=case.y), case.alignment, case.projection)
    torch.testing.assert_close(kd, whole.mean(), rtol=1e-6, atol=0)
    torch.testing.assert_close(ce, next_token_ce(case.z, ids, mask).mean(), rtol=1e-6, atol=0)


def test_the_dynamic_ratio_is_one_number_of_reduced_sums() -> None:
    """It is made from what all micro-batches and ranks gave together; a mean of their ratios would be another."""
    task: Any = SimpleNamespace(scaled_terms=["kd"], weights={"kd": 1.0})
    trainer: Any = SimpleNamespace(task=task, terms=["kd", "ce"])
    parts = [(1.0, 2.0), (3.0, 1.0)]
    kd, ce = (sum(each) for each in zip(*parts, strict=True))
    ratio = SpanwiseTrainer._next_ratio(trainer, {"kd": kd, "ce": ce})
    assert ratio == ce / kd
    assert ratio != sum(b / a for a, b in parts) / 2


def test_metrics_of_several_teachers_are_not_summed() -> None:
    one = run("projected", random_case(3), scale=0.5)
    _, metrics = merge_teachers({"a": one, "b": one})
    assert metrics["a/projected_kl"].value == metrics["b/projected_kl"].value == one.metrics["projected_kl"].value


def test_a_rewritten_projection_file_is_not_served_from_the_cache(tmp_path) -> None:
    file, device = tmp_path / "p.pt", torch.device("cpu")
    for weight in (1.0, 0.5):
        torch.save({"indices": torch.zeros(1, 1, dtype=torch.long), "likelihoods": torch.full((1, 1), weight)}, file)
        os.utime(file, ns=(0, int(weight * 1e9)))
        assert get_topk_projection(file, device)[1].item() == weight


def test_chunk_means_under_bf16_autocast_are_float32() -> None:
    g = torch.Generator().manual_seed(0)
    values, ids = torch.randn(1, 300, 4, generator=g), torch.zeros(1, 300, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        means, _ = chunk_average_log_probs(values, ids, 1)
    torch.testing.assert_close(means[0, 0], values[0].mean(0))
    case = random_case(9, s=20, t=20, dtype=torch.float32)
    wanted = gradient(run("gold", case), case.z)
    with torch.autocast("cpu", torch.bfloat16):
        got = gradient(run("gold", case), case.z)
    assert (got - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("which", ["projected", "gold"])
def test_distillation_alone_without_a_valid_chunk_has_a_graph(which: str) -> None:
    case = random_case(1)
    parts = run(which, case, sample_mask=torch.zeros(2))
    parts.total.backward()
    assert case.z.grad is not None
    assert case.z.grad.eq(0).all()


@pytest.mark.parametrize("loss", [projected_kl, gold])
def test_heads_wider_than_their_tokenizers_change_nothing(loss) -> None:
    case = random_case(5)
    expected = loss(case.z, TeacherScores(logits=case.y), case.alignment, case.projection)
    wide_z, wide_y = (torch.nn.functional.pad(x.detach(), (0, 3), value=50.0) for x in (case.z, case.y))
    wide_z.requires_grad_()
    parts = loss(wide_z, TeacherScores(logits=wide_y), case.alignment, case.projection)
    torch.testing.assert_close(parts.total, expected.total)
    got = gradient(parts, wide_z)
    torch.testing.assert_close(got[..., :-3], gradient(expected, case.z))
    assert got[..., -3:].eq(0).all()


@pytest.mark.parametrize("loss", [projected_kl, gold])
def test_a_teachers_head_narrower_than_its_vocabulary_is_refused_by_name(loss) -> None:
    case = random_case(5)
    with pytest.raises(ValueError, match=r"head scores 5 tokens.*expected a head at least as wide"):
        loss(case.z, TeacherScores(logits=case.y[..., :5]), case.alignment, case.projection)


@pytest.mark.parametrize("loss", [projected_kl, gold])
def test_a_teacher_id_beyond_the_head_is_refused_by_name(loss) -> None:
    """A loader widens the teacher's side to the largest id of the file; the head must be as wide."""
    case = random_case(5)
    ids = case.projection.indices.clone()
    ids[0, 0] = 40
    widened = Projection(ids, case.projection.likelihoods, 41)
    with pytest.raises(ValueError, match=r"head scores 11 tokens and its side of the vocabulary has 41"):
        loss(case.z, TeacherScores(logits=case.y), case.alignment, widened)


@pytest.mark.parametrize("which", ["projected", "gold", "hkl", "uld", "alm"])
def test_one_minus_infinity_in_the_teachers_logits_is_no_nan(which: str) -> None:
    case = random_case(6)
    y = case.y.clone()
    y[:, :, 4] = -torch.inf
    parts = run(which, case, scores=TeacherScores(logits=y))
    assert parts.total.isfinite()
    assert gradient(parts, case.z).isfinite().all()


def test_a_projection_of_one_column_has_a_strict_map() -> None:
    case = random_case(2)
    one = Projection(torch.arange(9)[:, None], torch.ones(9, 1), 11)
    assert one.token_map()["common_student"].tolist() == list(range(9))
    assert gold(case.z, TeacherScores(logits=case.y), case.alignment, one).total.isfinite()
