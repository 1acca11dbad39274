"""What callers get wrong: another batch's logits, ids or scores, broken teachers, impossible options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spanwise.teachers.scores import TeacherScores
from spanwise.xtoken.losses import (
    CrossEntropyRows,
    Head,
    alm,
    document_scores,
    dynamic_weights,
    fused,
    gold,
    next_token_ce,
    plan_chunks,
    plan_tokens,
    projected_kl,
    projected_rows,
    same_vocab_kl,
    select_teacher,
    share_scores,
    together,
    uld,
)
from spanwise.xtoken.losses.checks import check_scores
from tests.xtoken.cases import random_case
from tests.xtoken.test_loss_edges import EVERY, LOSSES, gradient, run
from tests.xtoken.test_loss_prefix_edges import TEXTS, value


def planned(which: str, case):
    """A loss of the case that takes any logits: its plan is made beforehand."""
    scores, ids = TeacherScores(logits=case.y), torch.zeros(case.z.shape[:2], dtype=torch.long)
    plan, tokens = plan_chunks(case.alignment), plan_tokens(ids)
    return {
        "projected": lambda z: projected_kl(z, scores, None, case.projection, plan=plan),
        "gold": lambda z: gold(z, scores, None, case.projection, plan=plan),
        "uld": lambda z: uld(z, scores, None, plan=plan),
        "same_vocab": lambda z: same_vocab_kl(
            z, TeacherScores(logits=case.y[:, :7, :9]), plan=tokens, student_vocab_size=9
        ),
    }[which]


@pytest.mark.parametrize("which", ["projected", "gold", "uld", "same_vocab"])
def test_logits_of_another_shape_are_refused_and_never_read_at_wrong_places(which: str) -> None:
    case = random_case(2)
    loss = planned(which, case)
    for wrong in (case.z[:, :-1], case.z[:1], case.z[:, 1:], torch.cat([case.z, case.z])):
        with pytest.raises(ValueError, match=r"planned for 2 × 7 .*expected equal sizes.*probably.*Fix:"):
            loss(wrong)
    with pytest.raises(ValueError, match="lie on meta"):
        loss(case.z.to("meta"))
    assert loss(case.z).total.isfinite()


def test_hidden_states_and_partners_of_another_batch_are_refused() -> None:
    case = random_case(2)
    head = Head(torch.randn(9, 6, dtype=torch.float64))
    loss = projected_rows(plan_chunks(case.alignment), TeacherScores(logits=case.y), case.projection)
    with pytest.raises(ValueError, match="hidden states are 2 × 6"):
        fused(torch.zeros(2, 6, 6, dtype=torch.float64), head, loss)
    with pytest.raises(ValueError, match="expected one batch"):
        together(loss, CrossEntropyRows(plan_tokens(torch.zeros(2, 6, dtype=torch.long)), 9, 1.0))


def test_ids_of_another_batch_are_refused() -> None:
    case = random_case(2)
    scores, ids = TeacherScores(logits=case.y), torch.zeros(2, 7, dtype=torch.long)
    with pytest.raises(ValueError, match=r"student_input_ids are \(2, 6\)"):
        alm(case.z[:, 1:], scores, case.alignment, student_input_ids=ids[:, 1:], teacher_input_ids=ids.new_zeros(2, 8))
    with pytest.raises(ValueError, match=r"input_ids are \(2, 7\) and the teacher scores \(2, 8\)"):
        alm(case.z, scores, case.alignment, student_input_ids=ids, teacher_input_ids=ids)
    with pytest.raises(ValueError, match="probably the student's"):
        scores.with_statistics(ids)


def test_alm_reads_statistics_at_temperature_one_only() -> None:
    case = random_case(3)
    ids, teacher_ids = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
    scores = TeacherScores(logits=case.y)
    warm = scores.with_statistics(teacher_ids, temperature=2.0, word_start=torch.arange(11) < 3)
    options = {"student_input_ids": ids, "student_vocab_size": 9}
    alone = TeacherScores(observed_logp=warm.observed_logp, temperature=2.0)
    for wrong, more in ((alone, {}), (warm, {}), (warm, {"word_start": torch.arange(9) < 3})):
        with pytest.raises(ValueError, match=r"taken at temperature 2; expected 1.*Fix:"):
            alm(case.z, wrong, case.alignment, **options, **more)
    # Where the logits are there, they are read again.
    expected = alm(case.z, scores, case.alignment, teacher_input_ids=teacher_ids, **options)
    again = alm(case.z, warm, case.alignment, teacher_input_ids=teacher_ids, **options)
    torch.testing.assert_close(again.total, expected.total)


@pytest.mark.parametrize("difference", ["forward", "reverse", "abs"])
@pytest.mark.parametrize("impossible", ["student", "teacher", "both"])
def test_an_observed_token_that_a_side_cannot_produce_stays_finite(difference: str, impossible: str) -> None:
    case = random_case(3)
    z, y = case.z.detach().clone(), case.y.clone()
    if impossible in ("student", "both"):
        z[..., 0] = -torch.inf
    if impossible in ("teacher", "both"):
        y[..., 0] = -torch.inf
    z.requires_grad_()
    ids, teacher_ids = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
    parts = alm(
        z, TeacherScores(logits=y), case.alignment, student_input_ids=ids, teacher_input_ids=teacher_ids,
        difference=difference,
    )  # fmt: skip
    assert float(parts.count) > 0
    assert parts.total.isfinite()
    assert gradient(parts, z).isfinite().all()


@pytest.mark.parametrize("which", [*LOSSES, "prefix", "same_vocab", "jsd"])
def test_a_row_of_nothing_but_minus_infinity_stays_finite(which: str) -> None:
    case = random_case(6)
    z = case.z.detach().clone()
    z[:, 2] = -torch.inf
    z.requires_grad_()
    parts = run(which, case, z=z)
    assert parts.total.isfinite()
    assert gradient(parts, z).isfinite().all()


@pytest.mark.parametrize("which", EVERY)
def test_a_scalers_factor_neither_overflows_float16_nor_comes_too_late(which: str) -> None:
    """What a loss scaler is for: gradients below float16's range that it lifts, by a factor beyond that range."""
    case = random_case(9)
    half = case.z.detach().half().requires_grad_()
    full = half.detach().float().requires_grad_()
    small = 1e-7  # as 1 / the tokens of a global batch
    (got,) = torch.autograd.grad(run(which, case, z=half, scale=small).total * 65_536.0, half)
    (wanted,) = torch.autograd.grad(run(which, case, z=full, scale=small).total * 65_536.0, full)
    assert got.dtype == torch.float16
    assert wanted.abs().max() > 1e-5
    torch.testing.assert_close(got.float(), wanted, rtol=1e-3, atol=1e-6)


def test_a_broken_teacher_is_named() -> None:
    case = random_case(2)
    for damage in (float("nan"), float("inf")):
        y = case.y.clone()
        y[1, :, 3] = damage
        with pytest.raises(ValueError, match=r"scores of document 1 hold NaN or \+inf.*bfloat16"):
            projected_kl(case.z, TeacherScores(logits=y), case.alignment, case.projection)


def test_a_teacher_run_with_a_graph_is_read_without_it() -> None:
    case = random_case(2)
    y = case.y.clone().requires_grad_()
    ids = torch.zeros(2, 8, dtype=torch.long)
    for which in LOSSES:
        assert not gradient(run(which, case, scores=TeacherScores(logits=y)), case.z).isnan().any()
    assert not TeacherScores(logits=y).topk(3).top_logp.requires_grad
    assert not TeacherScores(logits=y).with_statistics(ids).entropy.requires_grad
    plan = plan_chunks(case.alignment)
    shared = share_scores(TeacherScores(logits=y), plan, teacher_vocab_size=11, vocab_topk=4)
    projected_kl(case.z, shared, None, case.projection, plan=plan, vocab_topk=4).total.backward()
    assert y.grad is None


def test_shared_sets_of_another_batch_or_teacher_are_refused() -> None:
    case = random_case(2)
    plan = plan_chunks(case.alignment)
    shared = share_scores(TeacherScores(logits=case.y), plan, teacher_vocab_size=11, vocab_topk=4)
    too_few = TeacherScores(shared_ids=shared.shared_ids[:1], columns=shared.columns)
    beyond = TeacherScores(shared_ids=shared.shared_ids + 9, columns=shared.columns)
    for wrong in (too_few, beyond):
        with pytest.raises(ValueError, match=r"expected a set per document.*share_scores"):
            projected_kl(case.z, wrong, None, case.projection, plan=plan)


def test_options_and_projections_that_are_none_are_refused() -> None:
    case = random_case(2)
    scores = TeacherScores(logits=case.y)
    with pytest.raises(ValueError, match="expected 0 or more"):
        gold(case.z, scores, case.alignment, case.projection, uncommon_topk=-1)
    without_tails = gold(case.z, scores, case.alignment, case.projection, uncommon_topk=0)
    assert without_tails.metrics["gold_l1"].value == 0.0
    with pytest.raises(ValueError, match=r"the 0 likeliest tokens.*at least 1"):
        scores.topk(0)
    for wrong in ({"keep": 0}, {"teacher_topk": 0}, {"keep": -3}):
        with pytest.raises(ValueError, match="at least 1 of each"):
            value(TEXTS, **wrong)


def test_plain_logits_are_no_scores() -> None:
    case = random_case(2)
    with pytest.raises(ValueError, match=r"a Tensor was given.*Fix: TeacherScores\(logits=teacher_logits\)"):
        check_scores(case.y, 2, 8)


def test_labels_and_foreign_ids_are_refused_by_name() -> None:
    """On an accelerator a gather beyond the width ends the process."""
    case = random_case(2)
    ids, teacher_ids = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
    labels = ids.clone()
    labels[:, 3] = -100
    with pytest.raises(ValueError, match=r"tokens hold -100; expected ids from 0.*mask="):
        next_token_ce(case.z, labels)
    assert float(next_token_ce(case.z, labels, labels >= 0).count) == 10
    scores = TeacherScores(logits=case.y)
    for wrong, match in ((ids + 40, "student scores 9 tokens"), (ids - 100, "tokens hold -100")):
        with pytest.raises(ValueError, match=match):
            alm(case.z, scores, case.alignment, student_input_ids=wrong, teacher_input_ids=teacher_ids)
    for wrong in (teacher_ids + 40, teacher_ids - 100):
        with pytest.raises(ValueError, match=r"the teacher scores 11 tokens.*the teacher's own tokens"):
            alm(case.z, scores, case.alignment, student_input_ids=ids, teacher_input_ids=wrong)


def test_marks_of_word_starts_are_one_per_token() -> None:
    case = random_case(2)
    ids, teacher_ids = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
    marks = torch.ones(3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"word_start marks 3 tokens and the teacher scores 11"):
        TeacherScores(logits=case.y).with_statistics(teacher_ids, word_start=marks)
    scores = TeacherScores(logits=case.y).with_statistics(teacher_ids, word_start=torch.arange(11) < 4)
    with pytest.raises(ValueError, match=r"word_start marks 3 tokens and the student scores 9"):
        alm(case.z, scores, case.alignment, student_input_ids=ids, word_start=marks)


def test_teachers_are_weighed_by_the_documents_they_scored() -> None:
    case = random_case(2)
    scores, teacher_ids = TeacherScores(logits=case.y), torch.zeros(2, 8, dtype=torch.long)
    with pytest.raises(ValueError, match=r"counts 1 documents and the teacher's plan 2"):
        document_scores(scores, plan_tokens(teacher_ids), teacher_ids, torch.tensor([9.0]))
    with pytest.raises(ValueError, match="expected equal shapes"):
        document_scores(scores, plan_tokens(teacher_ids[:, 1:]), teacher_ids, torch.tensor([9.0, 9.0]))
    for weigh in (select_teacher, dynamic_weights):
        for wrong in ([], [torch.zeros(2), torch.zeros(3)]):
            with pytest.raises(ValueError, match="at least one teacher and the same documents"):
                weigh(wrong)


def test_scores_that_carry_a_temperature_of_their_own_are_not_reused() -> None:
    case = random_case(2)
    warm = replace(TeacherScores(logits=case.y), temperature=2.0)
    plain = projected_kl(case.z, TeacherScores(logits=case.y), case.alignment, case.projection, temperature=3.0)
    again = projected_kl(case.z, warm, case.alignment, case.projection, temperature=3.0)
    assert torch.equal(plain.total, again.total)
