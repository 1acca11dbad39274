"""TeacherScores: its forms agree with each other, and what cannot be known is refused."""

from __future__ import annotations

import pytest
import torch

from spanwise.teachers.scores import TeacherScores


def dense(rows: int = 2, length: int = 5, width: int = 11, dtype: torch.dtype = torch.float32) -> TeacherScores:
    torch_generator = torch.Generator().manual_seed(3)
    return TeacherScores(logits=torch.randn(rows, length, width, generator=torch_generator).to(dtype))


def all_rows(scores: TeacherScores) -> torch.Tensor:
    return torch.arange(scores.shape[0] * scores.shape[1])


def test_topk_of_everything_is_the_dense_distribution() -> None:
    scores = dense()
    expected = torch.log_softmax(scores.logits / 2.0, -1).flatten(0, 1)
    full = scores.topk(11, temperature=2.0)
    torch.testing.assert_close(full.log_probabilities(all_rows(scores), 11, 2.0), expected)
    assert (full.log_tail < -15).all()


@pytest.mark.parametrize("missing", ["tail_bucket", "renormalise"])
def test_topk_keeps_total_mass_one(missing: str) -> None:
    scores = dense().topk(4)
    mass = scores.log_probabilities(all_rows(scores), 11, 1.0, missing).exp().sum(-1)
    torch.testing.assert_close(mass, torch.ones(10))


def test_tail_is_the_mass_of_what_is_not_listed() -> None:
    scores = dense()
    cut = scores.topk(3)
    p = torch.softmax(scores.logits, -1)
    torch.testing.assert_close(cut.log_tail.exp(), 1 - p.gather(2, cut.top_ids).sum(-1))


def test_truncated_scores_refuse_another_temperature() -> None:
    cut = dense().topk(3, temperature=2.0)
    with pytest.raises(ValueError, match="taken at 2"):
        cut.log_probabilities(all_rows(cut), 11, 1.0)
    shared = dense().share(torch.arange(4).expand(2, 4), temperature=1.0)
    with pytest.raises(ValueError, match="taken at 1"):
        shared.at_temperature(3.0)
    assert dense().at_temperature(3.0).temperature == 3.0


def test_observed_is_the_next_token_and_topk_says_minus_infinity_for_the_unlisted() -> None:
    scores = dense()
    ids = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(0))
    expected = torch.log_softmax(scores.logits, -1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(scores.observed(ids)[:, :-1], expected)
    cut = scores.topk(3)
    listed = (cut.top_ids[:, :-1] == ids[:, 1:, None]).any(-1)
    seen = cut.observed(ids)[:, :-1]
    torch.testing.assert_close(seen[listed], expected[listed])
    assert (seen[~listed] == -torch.inf).all()
    assert (~listed).any()


def test_statistics() -> None:
    scores = dense(dtype=torch.bfloat16)
    word_start = torch.arange(11) % 2 == 0
    ids = torch.zeros(2, 5, dtype=torch.long)
    known = scores.with_statistics(ids, word_start=word_start)
    p = torch.softmax(scores.logits.float(), -1)
    torch.testing.assert_close(known.entropy, -(p * p.log()).sum(-1))
    torch.testing.assert_close(known.max_probability, p.amax(-1))
    torch.testing.assert_close(known.next_word_mass, p[..., word_start].sum(-1))
    assert known.logits.dtype == torch.bfloat16


def test_shared_columns_are_the_documents_columns() -> None:
    scores = dense()
    ids = torch.tensor([[0, 3, 5], [1, 2, 9]])
    document = torch.tensor([[0, 0, 1, 1, -1], [1, 1, 1, 1, 1]])
    shared = scores.share(ids, document)
    torch.testing.assert_close(shared.columns[0, 2], scores.logits[0, 2, [1, 2, 9]])
    assert (shared.columns[0, 4] == 0).all()
    assert shared.form == "shared"


def test_slice_select_to() -> None:
    scores = dense(rows=3).topk(2)
    assert scores.slice(1, 3).shape == (2, 5)
    torch.testing.assert_close(scores.select([2, 0]).top_logp, scores.top_logp[[2, 0]])
    assert scores.to("cpu").device.type == "cpu"
    packed = dense(rows=1).share(torch.tensor([[0, 1], [1, 2]]), torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="packed"):
        packed.slice(0, 1)


def test_minus_infinity_rows_stay_finite_where_they_can() -> None:
    logits = torch.zeros(1, 2, 4)
    logits[0, 0, 1] = -torch.inf
    logits[0, 1] = -torch.inf
    out = TeacherScores(logits=logits).log_probabilities(torch.arange(2), 4, 1.0)
    assert not out.isnan().any()
    assert out[0, 1] == -torch.inf


def test_forms_must_be_whole_and_single() -> None:
    with pytest.raises(ValueError, match="exactly one whole form"):
        TeacherScores(top_ids=torch.zeros(1, 1, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="exactly one whole form"):
        TeacherScores()
    with pytest.raises(ValueError, match="positive"):
        TeacherScores(logits=torch.zeros(1, 1, 1), temperature=0.0)
    observed = TeacherScores(observed_logp=torch.zeros(1, 3))
    assert observed.form == "observed"
    with pytest.raises(ValueError, match="whole vocabulary"):
        observed.log_probabilities(torch.arange(3), 4, 1.0)


def test_widths() -> None:
    scores = dense()
    with pytest.raises(ValueError, match="at least as wide"):
        scores.log_probabilities(all_rows(scores), 12, 1.0)
    cut = scores.log_probabilities(all_rows(scores), 7, 1.0)
    torch.testing.assert_close(cut, torch.log_softmax(scores.logits[..., :7], -1).flatten(0, 1))
    with pytest.raises(ValueError, match="names token"):
        scores.topk(11).log_probabilities(all_rows(scores), 7, 1.0)
    before = scores.logits.clone()
    scores.log_probabilities(all_rows(scores), 11, 0.5)
    assert torch.equal(before, scores.logits)


def test_strided_logits_read_as_contiguous_ones() -> None:
    """Every second position of a longer batch, and a head that was cut."""
    whole = dense(rows=3, length=10, width=14).logits
    strided = TeacherScores(logits=whole[:, ::2, :11])
    packed = TeacherScores(logits=strided.logits.contiguous())
    assert not strided.logits.is_contiguous()
    rows, ids = torch.tensor([0, 3, 14, 7]), torch.tensor([0, 5, 9])
    assert torch.equal(strided.log_probabilities(rows, 9, 2.0), packed.log_probabilities(rows, 9, 2.0))
    assert torch.equal(strided.columns_at(rows, ids), packed.columns_at(rows, ids))
    assert torch.equal(packed.columns_at(rows, ids), packed.logits.flatten(0, 1)[rows][:, ids])
    assert torch.equal(strided.topk(4).top_logp, packed.topk(4).top_logp)


def test_listed_tokens_hold_all_mass_with_the_rest() -> None:
    scores = dense().topk(4)
    ids, mass, rest = scores.listed_at(all_rows(scores), 11)
    torch.testing.assert_close(mass.sum(-1) + rest, torch.ones(10))
    assert torch.equal(ids, scores.top_ids.flatten(0, 1))
    with pytest.raises(ValueError, match="expected top-k scores"):
        dense().listed_at(all_rows(scores), 11)
    with pytest.raises(ValueError, match="names token"):
        dense().topk(11).listed_at(all_rows(scores), 7)


def test_empty_batch() -> None:
    scores = TeacherScores(logits=torch.zeros(0, 3, 4)).topk(2)
    assert scores.top_ids.shape == (0, 3, 2)
