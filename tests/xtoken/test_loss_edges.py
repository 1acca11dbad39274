"""The edges of every loss: nothing valid, odd chunks, infinities, temperatures, dtypes, in-place, determinism,
gradcheck.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spanwise.teachers.scores import TeacherScores
from spanwise.xtoken.losses import (
    alm,
    count_chunks,
    gold,
    next_token_ce,
    plan_chunks,
    prefix_kl,
    projected_kl,
    same_vocab_kl,
    uld,
)
from spanwise.xtoken.projection import Projection
from tests.reference import losses as twin
from tests.xtoken import test_loss_prefix
from tests.xtoken.cases import Case, assert_same, dense_matrix, random_case
from tests.xtoken.test_loss_gold import partition

LOSSES = ["projected", "gold", "hkl", "uld", "alm"]
# Those that read positions, not chunks.
TEMPERED = [*LOSSES, "prefix", "same_vocab", "jsd"]
EVERY = [*TEMPERED, "ce"]


def run(which: str, case: Case, **options):
    """One loss on a case; those that read positions take the case's logits and rows as far as they fit them."""
    z, scores = options.pop("z", case.z), options.pop("scores", TeacherScores(logits=case.y))
    if which == "ce":
        options = {name: given for name, given in options.items() if name not in ("temperature", "reverse")}
        return next_token_ce(z, torch.zeros(z.shape[:2], dtype=torch.long), **options)
    if which in ("same_vocab", "jsd"):
        kind = "jsd" if which == "jsd" else "reverse" if options.get("reverse") else "forward"
        options.pop("reverse", None)
        seen = TeacherScores(logits=scores.logits[:, : z.shape[1], : z.shape[2]])
        return same_vocab_kl(z, seen, input_ids=torch.zeros(z.shape[:2], dtype=torch.long), divergence=kind, **options)
    if which == "prefix":
        seen = TeacherScores(logits=scores.logits[..., : len(test_loss_prefix.TEACHER)])
        alignment, ids, teacher_ids = prefix_rows_of(case)
        return prefix_kl(
            z, seen, alignment, trie=test_loss_prefix.trie(), student_input_ids=ids, teacher_input_ids=teacher_ids,
            **options,
        )  # fmt: skip
    if which == "projected":
        return projected_kl(z, scores, case.alignment, case.projection, vocab_topk=6, **options)
    if which in ("gold", "hkl"):
        return gold(z, scores, case.alignment, case.projection, relaxed=which == "hkl", **options)
    if which == "uld":
        options.pop("reverse", None)
        return uld(z, scores, case.alignment, student_vocab_size=9, teacher_vocab_size=11, **options)
    difference = "reverse" if options.pop("reverse", False) else "forward"
    ids = torch.zeros(case.z.shape[:2], dtype=torch.long)
    return alm(
        z, scores, case.alignment, student_input_ids=ids, student_vocab_size=9, difference=difference,
        teacher_input_ids=torch.zeros(case.y.shape[:2], dtype=torch.long), **options,
    )  # fmt: skip


def prefix_rows_of(case: Case):
    """Rows of toy tokens in the case's shape; one without any valid pair there has none here."""
    (rows, s), t = case.z.shape[:2], case.y.shape[1]
    text = b"abcabcaab" if s >= 7 else b"abca"
    alignment, ids, teacher_ids, *_ = test_loss_prefix.batch([text] * rows)

    def widened(values: torch.Tensor, width: int, fill: int) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=fill)

    alignment = replace(
        alignment,
        pair_valid=alignment.pair_valid & case.alignment.pair_valid.any(1)[:, None],
        student_exact_partition_mask=torch.zeros(rows, s, dtype=torch.bool),
        teacher_exact_partition_mask=torch.zeros(rows, t, dtype=torch.bool),
        student_chunk_id=widened(alignment.student_chunk_id, s, -1),
        teacher_chunk_id=widened(alignment.teacher_chunk_id, t, -1),
        student_byte_end=widened(alignment.student_byte_end, s, -1),
        teacher_byte_end=widened(alignment.teacher_byte_end, t, -1),
    )
    return alignment, widened(ids, s, 0), widened(teacher_ids, t, 0)


def gradient(parts, z: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(parts.total, z)[0]


@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("emptied", ["student", "teacher", "both", "pairs", "samples", "no_chunks"])
def test_nothing_valid_is_zero_with_a_graph(which: str, emptied: str) -> None:
    case = random_case(1)
    a = case.alignment
    none_s, none_t = torch.full_like(a.student_chunk_id, -1), torch.full_like(a.teacher_chunk_id, -1)
    options = {}
    if emptied in ("student", "both"):
        a = replace(a, student_chunk_id=none_s)
    if emptied in ("teacher", "both"):
        a = replace(a, teacher_chunk_id=none_t)
    if emptied == "pairs":
        a = replace(a, pair_valid=torch.zeros_like(a.pair_valid))
    if emptied == "samples":
        options["sample_mask"] = torch.zeros(2)
    if emptied == "no_chunks":
        nothing = torch.zeros(2, 0, dtype=torch.bool)
        a = replace(a, pair_valid=nothing, pair_is_correct=nothing, student_chunk_id=none_s, teacher_chunk_id=none_t)
    case.alignment = a
    parts = run(which, case, **options)
    assert float(parts.total.detach()) == 0.0
    assert float(parts.count) == 0.0
    assert float(parts.mean().detach()) == 0.0
    grad = gradient(parts, case.z)
    assert grad.shape == case.z.shape
    assert grad.eq(0).all()
    assert all(ratio.value == 0.0 for ratio in parts.metrics.values())


def test_no_supervised_token_is_zero_with_a_graph() -> None:
    z = torch.randn(2, 3, 5, requires_grad=True)
    ids = torch.zeros(2, 3, dtype=torch.long)
    scores = TeacherScores(logits=torch.zeros(2, 3, 5))
    for parts in (
        next_token_ce(z, ids, torch.zeros(2, 3, dtype=torch.long)),
        same_vocab_kl(z, scores, input_ids=ids, mask=torch.zeros(2, 3, dtype=torch.long)),
        next_token_ce(z, ids, sample_mask=torch.zeros(2)),
        next_token_ce(z[:, :0], ids[:, :0]),
    ):
        assert float(parts.total.detach()) == 0.0
        assert gradient(parts, z).eq(0).all()


@pytest.mark.parametrize("which", LOSSES)
def test_a_chunk_at_position_zero_is_not_valid(which: str) -> None:
    case = random_case(3, start=0)
    a = case.alignment
    student, teacher = a.student_chunk_id.clone(), a.teacher_chunk_id.clone()
    student[:], teacher[:] = -1, -1
    student[0, 0], teacher[0, 1] = 0, 0
    student[0, 1], teacher[0, 2] = 1, 1
    student[1, 1], teacher[1, 0] = 2, 2
    valid = torch.ones_like(a.pair_valid)
    case.alignment = replace(a, student_chunk_id=student, teacher_chunk_id=teacher, pair_valid=valid)
    assert float(run(which, case).count) == 1.0
    assert gradient(run(which, case), case.z)[0, 1:].eq(0).all()


def test_left_padding_has_no_predictor() -> None:
    case = random_case(3)
    a = case.alignment
    student, teacher = torch.full_like(a.student_chunk_id, -1), torch.full_like(a.teacher_chunk_id, -1)
    student[:, 3:5], teacher[:, 4:6] = torch.tensor([0, 1]), torch.tensor([0, 1])
    alignment = replace(a, student_chunk_id=student, teacher_chunk_id=teacher, pair_valid=torch.ones_like(a.pair_valid))
    mask = (torch.arange(7) >= 3).long().expand(2, 7)
    assert float(count_chunks(alignment)) == 4.0
    assert float(count_chunks(alignment, token_mask=mask)) == 2.0


@pytest.mark.parametrize("which", ["projected", "gold"])
def test_chunk_ids_need_not_be_contiguous(which: str) -> None:
    case = random_case(5)
    a = case.alignment
    case.alignment = replace(
        a,
        student_chunk_id=torch.tensor([[-1, 0, 3, 0, 3, 1, -1]] * 2),
        teacher_chunk_id=torch.tensor([[-1, 3, 3, 0, -1, 1, 1, 0]] * 2),
        pair_valid=torch.ones_like(a.pair_valid),
    )
    if which == "projected":
        expected = twin.projected_kl(case.z, case.y, case.alignment, dense_matrix(case.projection), vocab_topk=6)
    else:
        expected = twin.gold(case.z, case.y, case.alignment, partition(case.projection, False))
    assert_same(run(which, case), expected, case.z)


@pytest.mark.parametrize("which", EVERY)
@pytest.mark.parametrize("temperature", [1e-2, 1.0, 1e2])
@pytest.mark.parametrize("reverse", [False, True])
def test_infinities_and_extremes_stay_finite(which: str, temperature: float, reverse: bool) -> None:
    for kind in ("teacher", "student", "both", "large"):
        case = random_case(6)
        y, z = case.y.clone(), case.z.detach().clone()
        if kind in ("teacher", "both"):
            y[:, ::2, 1:4] = -torch.inf
        if kind in ("student", "both"):
            z[:, ::3, 2:5] = -torch.inf
        if kind == "large":
            y[..., 0], y[..., 1], z[..., 1], z[..., 2] = 1e4, -1e4, 1e4, -1e4
        z.requires_grad_()
        parts = run(which, case, z=z, scores=TeacherScores(logits=y), temperature=temperature, reverse=reverse)
        assert parts.total.isfinite()
        assert gradient(parts, z).isfinite().all()


@pytest.mark.parametrize("which", ["projected", "gold"])
@pytest.mark.parametrize("reverse", [False, True])
def test_minus_infinity_equals_the_twin(which: str, reverse: bool) -> None:
    case = random_case(6)
    y, z = case.y.clone(), case.z.detach().clone()
    y[:, ::2, 1:4], z[:, ::3, 2:5] = -torch.inf, -torch.inf
    z.requires_grad_()
    if which == "projected":
        expected = twin.projected_kl(z, y, case.alignment, dense_matrix(case.projection), vocab_topk=6, reverse=reverse)
    else:
        expected = twin.gold(z, y, case.alignment, partition(case.projection, False), reverse=reverse)
    parts = run(which, case, z=z, scores=TeacherScores(logits=y), reverse=reverse)
    torch.testing.assert_close(parts.total, expected[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("which", TEMPERED)
@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_temperatures_that_are_none_are_refused(which: str, temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        run(which, random_case(1), temperature=temperature)


@pytest.mark.parametrize("which", [*LOSSES, "same_vocab", "jsd", "ce"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_gradcheck(which: str, reverse: bool, temperature: float) -> None:
    case = random_case(8, batch=1, s=5, t=5, chunks=3)
    case.alignment = replace(
        case.alignment,
        student_chunk_id=torch.tensor([[-1, 0, 0, 1, -1]]),
        teacher_chunk_id=torch.tensor([[-1, 0, 1, 1, 2]]),
        pair_valid=torch.ones(1, 3, dtype=torch.bool),
    )
    assert float(run(which, case).count) > 0

    def value(z: torch.Tensor) -> torch.Tensor:
        return 3.0 * run(which, case, z=z, reverse=reverse, temperature=temperature).total

    assert torch.autograd.gradcheck(value, case.z)


@pytest.mark.parametrize("which", EVERY)
def test_low_precision_sums_in_float32(which: str) -> None:
    """bf16 inputs under bf16 autocast: within 1e-3 of the float32 run on the same rounded values."""
    case = random_case(9)
    rounded = case.z.detach().bfloat16()
    y = case.y.bfloat16()
    z32 = rounded.float().requires_grad_()
    exact = run(which, case, z=z32, scores=TeacherScores(logits=y.float()))
    wanted = gradient(exact, z32)
    for backward_inside in (False, True):
        z = rounded.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            parts = run(which, case, z=z, scores=TeacherScores(logits=y))
            if backward_inside:
                parts.total.backward()
        if not backward_inside:
            parts.total.backward()
        assert parts.total.dtype == torch.float32
        torch.testing.assert_close(parts.total, exact.total, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(z.grad, wanted.bfloat16())
    full = z32.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = gradient(run(which, case, z=full, scores=TeacherScores(logits=y.float())), full)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
    half = (60_000 * torch.tanh(case.z.detach())).half().requires_grad_()
    parts = run(which, case, z=half, scores=TeacherScores(logits=case.y.float()))
    assert parts.total.isfinite()
    assert not gradient(parts, half).isnan().any()


@pytest.mark.parametrize("which", EVERY)
def test_float32_against_a_float64_oracle(which: str) -> None:
    case = random_case(10, batch=3, s=12, t=12, chunks=9)
    z = case.z.detach().float().requires_grad_()
    y = case.y.float()
    case.z = z.detach().double().requires_grad_()
    exact = run(which, case, scores=TeacherScores(logits=y.double()))
    rough = run(which, case, z=z, scores=TeacherScores(logits=y))
    torch.testing.assert_close(rough.total.double(), exact.total, rtol=1e-6, atol=1e-6)
    wanted = gradient(exact, case.z)
    assert (gradient(rough, z).double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("which", EVERY)
def test_inputs_stay_as_they_were_unless_in_place_was_asked(which: str) -> None:
    case = random_case(2)
    before = [t.clone() for t in (case.z.detach(), case.y, case.projection.indices, case.alignment.student_chunk_id)]
    first, second = run(which, case), run(which, case)
    now = [case.z.detach(), case.y, case.projection.indices, case.alignment.student_chunk_id]
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    assert torch.equal(first.total, second.total)
    wanted = gradient(first, case.z)
    assert torch.equal(wanted, gradient(second, case.z))
    leaf = case.z.detach().clone().requires_grad_()
    logits = leaf * 1.0
    parts = run(which, case, z=logits, inplace=True)
    torch.testing.assert_close(parts.total, first.total)
    torch.testing.assert_close(gradient(parts, leaf), wanted)
    torch.testing.assert_close(logits.detach(), wanted)


@pytest.mark.parametrize("which", EVERY)
def test_no_grad_makes_no_gradient_buffer(which: str, monkeypatch) -> None:
    case = random_case(2)
    monkeypatch.setattr("spanwise.xtoken.losses.rows._empty_gradient", lambda *_: pytest.fail("a buffer was made"))
    with torch.no_grad():
        quiet = run(which, case, inplace=True)
    assert not quiet.total.requires_grad
    monkeypatch.undo()
    torch.testing.assert_close(quiet.total, run(which, case).total.detach())


@pytest.mark.parametrize("which", EVERY)
def test_scale_multiplies_total_and_gradient_only(which: str) -> None:
    case = random_case(2)
    plain, scaled = run(which, case), run(which, case, scale=0.25)
    torch.testing.assert_close(scaled.total, 0.25 * plain.total)
    torch.testing.assert_close(gradient(scaled, case.z), 0.25 * gradient(plain, case.z))
    assert float(scaled.count) == float(plain.count)
    for name in plain.metrics:
        assert scaled.metrics[name].value == pytest.approx(plain.metrics[name].value)


def test_projections_without_mass_in_the_set_and_rows_without_entries() -> None:
    case = random_case(2)
    empty = Projection(torch.full((9, 1), -1), torch.zeros(9, 1), 11)
    parts = projected_kl(case.z, TeacherScores(logits=case.y), case.alignment, empty)
    assert parts.total.isfinite()
    assert gradient(parts, case.z).eq(0).all()
    one = Projection(torch.zeros(9, 1, dtype=torch.long), torch.ones(9, 1), 11)
    expected = twin.projected_kl(case.z, case.y, case.alignment, dense_matrix(one), vocab_topk=1)
    parts = projected_kl(case.z, TeacherScores(logits=case.y), case.alignment, one, vocab_topk=1)
    assert_same(parts, expected, case.z)
    # K = 1 reaches the strict map too.
    assert gold(case.z, TeacherScores(logits=case.y), case.alignment, one).total.isfinite()


def test_ties_at_the_cut_go_to_the_lowest_id() -> None:
    case = random_case(2)
    flat = torch.zeros_like(case.y)
    expected = twin.projected_kl(case.z, flat, case.alignment, dense_matrix(case.projection), vocab_topk=3)
    parts = projected_kl(case.z, TeacherScores(logits=flat), case.alignment, case.projection, vocab_topk=3)
    assert_same(parts, expected, case.z)


def test_a_teacher_id_beyond_the_head_is_refused_by_name() -> None:
    case = random_case(2)
    indices = case.projection.indices.clone()
    indices[0, 0] = 40
    with pytest.raises(ValueError, match="maps to teacher token 40"):
        Projection(indices, case.projection.likelihoods, 11)
    widened = Projection(indices, case.projection.likelihoods, 41)
    for loss in (projected_kl, gold):
        with pytest.raises(ValueError, match="teacher's head scores 11 tokens"):
            loss(case.z, TeacherScores(logits=case.y), case.alignment, widened)


def test_wrong_chunk_ids_and_masks_are_refused() -> None:
    case = random_case(2)
    with pytest.raises(ValueError, match="expected ids below 5"):
        plan_chunks(replace(case.alignment, student_chunk_id=case.alignment.student_chunk_id + 5))
    with pytest.raises(ValueError, match="one per document"):
        plan_chunks(case.alignment, sample_mask=torch.ones(3))
    plan = plan_chunks(case.alignment)
    with pytest.raises(ValueError, match="inside the plan"):
        projected_kl(case.z, TeacherScores(logits=case.y), None, case.projection, plan=plan, sample_mask=torch.ones(2))


def test_a_leafs_gradient_is_not_copied_and_a_changed_one_is_noticed() -> None:
    case = random_case(2)
    parts = run("gold", case)
    wanted = torch.autograd.grad(parts.total, case.z, retain_graph=True)[0].clone()
    parts.total.backward(retain_graph=True)
    torch.testing.assert_close(case.z.grad, wanted)
    case.z.grad.zero_()
    with pytest.raises(RuntimeError, match="changed in place since"):
        parts.total.backward()
