"""Prefix KL at its edges: top-k, masks, packing, real tokenizers, what is skipped and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spanwise.teachers.scores import TeacherScores
from spanwise.xtoken.losses import PrefixTrie, plan_prefix, prefix_kl, prefix_targets
from tests.xtoken.test_loss_prefix import STUDENT, TEACHER, batch, trie


def case(texts: list[bytes], seed: int = 0):
    alignment, ids_s, ids_t, *_ = batch(texts)
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(*ids_s.shape, len(STUDENT), generator=g, dtype=torch.float64).requires_grad_()
    y = torch.randn(*ids_t.shape, len(TEACHER), generator=g, dtype=torch.float64)
    return alignment, ids_s, ids_t, z, y


def value(texts: list[bytes], **options):
    alignment, ids_s, ids_t, z, y = case(texts)
    scores = options.pop("scores", TeacherScores(logits=y))
    z = options.pop("z", z)
    return prefix_kl(
        z, scores, options.pop("alignment", alignment), trie=trie(), student_input_ids=ids_s, teacher_input_ids=ids_t,
        **options,
    )  # fmt: skip


TEXTS = [b"abcabca", b"caab", b"bbb"]


@pytest.mark.parametrize("missing", ["tail_bucket", "renormalise"])
def test_topk_approaches_the_dense_value(missing: str) -> None:
    *_, y = case(TEXTS)
    dense = value(TEXTS, teacher_topk=None).total
    gaps = []
    for k in (1, 5, len(TEACHER)):
        parts = value(TEXTS, scores=TeacherScores(logits=y).topk(k), missing=missing)
        gaps.append(abs(float((parts.total - dense).detach())))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-9


def test_dense_scores_are_read_as_their_own_topk() -> None:
    _, _, ids_t, _, y = case(TEXTS)
    scores = TeacherScores(logits=y)
    cut = replace(scores.topk(3), observed_logp=scores.observed(ids_t))
    torch.testing.assert_close(value(TEXTS, teacher_topk=3).total, value(TEXTS, scores=cut).total)


def test_truncated_scores_allow_their_own_temperature_only() -> None:
    *_, y = case(TEXTS)
    with pytest.raises(ValueError, match="taken at 1"):
        value(TEXTS, scores=TeacherScores(logits=y).topk(3), temperature=2.0)
    cut = TeacherScores(logits=y).topk(len(TEACHER), temperature=2.0)
    torch.testing.assert_close(
        value(TEXTS, scores=cut, temperature=2.0).total, value(TEXTS, teacher_topk=None, temperature=2.0).total
    )


def test_micro_batches_and_sample_mask() -> None:
    alignment, ids_s, ids_t, z, y = case(TEXTS)
    whole = value(TEXTS, sample_mask=torch.tensor([1.0, 0.0, 0.5]))
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for b, weight in ((0, 1.0), (2, 0.5)):
        rows = slice(b, b + 1)
        part = type(alignment)(**{k: None if t is None else t[rows] for k, t in vars(alignment).items()})
        parts = prefix_kl(
            z[rows], TeacherScores(logits=y[rows]), part, trie=trie(), student_input_ids=ids_s[rows],
            teacher_input_ids=ids_t[rows],
        )  # fmt: skip
        total, count = total + weight * parts.total, count + weight * float(parts.count)
    torch.testing.assert_close(whole.total, total)
    assert float(whole.count) == count


def test_two_documents_in_a_row_equal_two_rows() -> None:
    texts = [b"abcabca", b"caabbcaa"]
    alignment, ids_s, ids_t, z, y = case(texts)
    (s, t), pairs = (ids_s.shape[1], ids_t.shape[1]), alignment.pair_valid.shape[1]
    offset = torch.tensor([[0], [pairs]])
    joined = type(alignment)(
        alignment.pair_valid.reshape(1, -1), alignment.pair_is_correct.reshape(1, -1),
        alignment.student_exact_partition_mask.reshape(1, -1), alignment.teacher_exact_partition_mask.reshape(1, -1),
        torch.where(alignment.student_chunk_id >= 0, alignment.student_chunk_id + offset, -1).reshape(1, -1),
        torch.where(alignment.teacher_chunk_id >= 0, alignment.teacher_chunk_id + offset, -1).reshape(1, -1),
        torch.tensor([2 * pairs]), None,
        alignment.student_byte_end.reshape(1, -1), alignment.teacher_byte_end.reshape(1, -1),
    )  # fmt: skip
    parts = prefix_kl(
        z.reshape(1, 2 * s, -1), TeacherScores(logits=y.reshape(1, 2 * t, -1)), joined, trie=trie(),
        student_input_ids=ids_s.reshape(1, -1), teacher_input_ids=ids_t.reshape(1, -1),
        segment_ids=torch.tensor([[1] * s + [2] * s]), teacher_segment_ids=torch.tensor([[1] * t + [2] * t]),
        sample_mask=torch.tensor([1.0, 0.5]),
    )  # fmt: skip
    z_apart = z.detach().clone().requires_grad_()
    apart = value(texts, z=z_apart, sample_mask=torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(parts.total, apart.total)
    assert float(parts.count) == float(apart.count)
    for ours, theirs in zip(
        torch.autograd.grad(parts.total, z), torch.autograd.grad(apart.total, z_apart), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_nothing_supervised_is_zero_with_a_graph() -> None:
    alignment, ids_s, ids_t, z, _ = case(TEXTS)
    for broken in (
        replace(alignment, pair_valid=torch.zeros_like(alignment.pair_valid)),
        replace(alignment, teacher_byte_end=torch.full_like(alignment.teacher_byte_end, -1),
                teacher_chunk_id=torch.full_like(alignment.teacher_chunk_id, -1)),
    ):  # fmt: skip
        parts = value(TEXTS, alignment=broken, z=z)
        assert float(parts.count) == 0.0
        assert torch.autograd.grad(parts.total, z)[0].eq(0).all()
    with pytest.raises(ValueError, match="byte_offsets=True"):
        plan_prefix(replace(alignment, student_byte_end=None), trie(), ids_s, ids_t)
    with pytest.raises(ValueError, match="trie knows"):
        plan_prefix(alignment, trie(), ids_s + 5, ids_t)


def test_skipped_positions_stay_in_the_count() -> None:
    every, picky = value(TEXTS, min_mass=0.0), value(TEXTS, min_mass=0.9)
    assert float(every.count) == float(picky.count)
    assert every.metrics["skipped"].value == 0.0
    assert 0 < picky.metrics["skipped"].value < 1
    assert float(picky.total.detach()) < float(every.total.detach())


@pytest.mark.parametrize("reverse", [False, True])
def test_infinities_and_extremes_stay_finite(reverse: bool) -> None:
    _, _, _, z, y = case(TEXTS)
    z, y = z.detach().clone(), y.clone()
    y[:, ::2, :2], z[:, ::3, 1:4] = -torch.inf, -torch.inf
    z[0, 0, 0], z[1, 1, 4], y[0, 1, 2] = 1e4, -1e4, 1e4
    z.requires_grad_()
    for keep in (1, 24):
        parts = value(TEXTS, z=z, scores=TeacherScores(logits=y), reverse=reverse, keep=keep)
        assert parts.total.isfinite()
        assert torch.autograd.grad(parts.total, z)[0].isfinite().all()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("keep", [2, 24])
def test_gradcheck(reverse: bool, keep: int) -> None:
    *_, z, _ = case([b"abca"])
    assert torch.autograd.gradcheck(
        lambda x: 3.0 * value([b"abca"], z=x, reverse=reverse, keep=keep, temperature=2.0).total, z
    )


def test_mass_and_tail_sum_to_one() -> None:
    alignment, ids_s, ids_t, _, y = case(TEXTS)
    plan = plan_prefix(alignment, trie(), ids_s, ids_t)
    for k in (2, len(TEACHER)):
        for missing in ("tail_bucket", "renormalise"):
            made = prefix_targets(plan, TeacherScores(logits=y).topk(k), trie(), keep=3, missing=missing)
            known = made.kept > 0
            torch.testing.assert_close((made.mass.sum(-1) + made.tail)[known], torch.ones(int(known.sum())).double())


def test_left_padding_is_not_read() -> None:
    alignment, ids_s, ids_t, _, _ = case([b"abca"])
    plain = plan_prefix(alignment, trie(), ids_s, ids_t)
    mask = torch.ones_like(ids_s)
    mask[:, 0] = 0
    assert float(plan_prefix(alignment, trie(), ids_s, ids_t, token_mask=mask).count) == float(plain.count) - 1


def test_real_tokenizers_are_supervised_almost_everywhere(byte_bpe, sentencepiece_bpe) -> None:
    from spanwise.xtoken.aligner import TokenAligner

    text = "The quick brown fox jumps over the lazy dog.\n\tdef f(x): return x + 1  # naïve"
    for student, teacher in ((byte_bpe, sentencepiece_bpe), (sentencepiece_bpe, byte_bpe)):
        ids_s = torch.tensor([[*student(text)["input_ids"], student.eos_token_id]])
        ids_t = torch.tensor([[*teacher(text)["input_ids"], teacher.eos_token_id]])
        table = PrefixTrie.from_tokenizers(student, teacher)
        alignment = TokenAligner(student, teacher, byte_offsets=True).align(ids_s, ids_t)
        plan = plan_prefix(alignment, table, ids_s, ids_t)
        assert float(plan.count) >= ids_s.shape[1] - 4
        assert student.eos_token_id in plan.targets.tolist()
        scores = TeacherScores(logits=torch.zeros(*ids_t.shape, table.teacher_vocab_size)).topk(64)
        z = torch.zeros(*ids_s.shape, table.student_vocab_size, requires_grad=True)
        assert prefix_kl(z, scores, trie=table, plan=plan).total.isfinite()
