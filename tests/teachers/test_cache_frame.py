"""A document as bytes: k follows the mass, the error is known, damage is seen."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.teachers.cache_frame import CacheError, FrameHeader, TopK, decode, encode
from spanwise.teachers.documents import document_key, documents_of, join_scores, split_scores
from spanwise.teachers.scores import TeacherScores
from spanwise.teachers.teacher import ScoreRequest
from tests.reference.ragged_topk import adaptive_topk
from tests.teachers.tiny import padded, random_rows, tiny_teacher


def scored(rows: list[list[int]], k: int = 32):
    request = replace(padded(rows), top_k=k, statistics=True)
    return request, tiny_teacher().score(request)


@settings(max_examples=40)
@given(
    st.integers(0, 1000),
    st.integers(1, 8),
    st.integers(0, 24),
    st.floats(0.01, 1.0),
)
def test_k_follows_the_mass_as_the_slow_twin_says(seed: int, floor: int, more: int, mass: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 4, 40, generator=generator, dtype=torch.float64) * 3
    ids = torch.randint(40, (1, 4), generator=generator)
    request = ScoreRequest(ids, torch.ones_like(ids))
    scores = TeacherScores(logits=logits.float()).with_statistics(ids).topk(24)
    cap = floor + more
    (part,) = split_scores(documents_of(request), scores)
    cut = TopK(floor, cap, mass).cut(part)
    places = np.split(cut.logp, np.cumsum(cut.counts)[:-1])
    for position in range(3):
        kept, tail = adaptive_topk(
            scores.top_logp[0, position].tolist(), float(scores.log_tail[0, position]), floor, cap, mass
        )
        assert places[position].tolist() == kept
        assert cut.log_tail[position] == pytest.approx(tail, abs=1e-5)


def test_the_error_of_what_is_stored_is_the_one_documented() -> None:
    request, scores = scored(random_rows(6))
    documents = documents_of(request)
    for document, part in zip(documents, split_scores(documents, scores), strict=True):
        header, back = decode(encode(document.key, len(document.ids), part))
        assert header.key == document.key
        assert header.tokens == len(document.ids)
        np.testing.assert_array_equal(back.counts, part.counts)
        np.testing.assert_array_equal(back.ids, part.ids)
        np.testing.assert_array_equal(back.observed_logp, part.observed_logp)
        for name in ("logp", "log_tail", "entropy"):
            stored, exact = getattr(back, name), getattr(part, name)
            assert (np.abs(stored - exact) <= np.abs(exact) / 2048 + 1e-7).all(), name


def test_minus_infinity_wide_ids_and_an_empty_document_survive() -> None:
    ids = torch.tensor([[5, 200_000]])
    scores = TeacherScores(
        top_ids=torch.tensor([[[200_000, 3], [0, 1]]]),
        top_logp=torch.tensor([[[0.0, -torch.inf], [0.0, 0.0]]]),
        log_tail=torch.full((1, 2), -torch.inf),
        observed_logp=torch.zeros(1, 2),
    )
    (part,) = split_scores(documents_of(ScoreRequest(ids, torch.ones_like(ids))), scores)
    _, back = decode(encode(b"k" * 16, 2, part))
    assert back.ids.tolist() == [200_000, 3]
    assert back.logp.tolist() == [0.0, -math.inf]
    assert back.log_tail.tolist() == [-math.inf]
    nothing = replace(part, **{n: getattr(part, n)[:0] for n in ("counts", "ids", "logp", "log_tail", "observed_logp")})
    assert len(decode(encode(b"k" * 16, 1, nothing))[1].counts) == 0


@settings(max_examples=60)
@given(st.data())
def test_any_flipped_bit_or_missing_byte_is_seen(data: st.DataObject) -> None:
    request, scores = scored([[1, 2, 3, 4, 5]])
    (document,) = documents_of(request)
    frame = bytearray(encode(document.key, 5, split_scores([document], scores)[0]))
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(frame) * 8 - 1))
        frame[place // 8] ^= 1 << place % 8
    else:
        frame = frame[: data.draw(st.integers(0, len(frame) - 1))]
    assert decode(bytes(frame)) is None


def test_a_header_that_is_none_is_none() -> None:
    assert FrameHeader.read(b"") is None
    assert FrameHeader.read(b"x" * 100) is None


def test_join_undoes_split_for_padded_and_packed_rows() -> None:
    rows = random_rows(5)
    request, scores = scored(rows)
    documents = documents_of(request)
    parts = split_scores(documents, scores)
    back = join_scores(request, documents, parts, temperature=1.0)
    for place, row in enumerate(rows):
        real = len(row) - 1
        for name in ("top_ids", "top_logp", "log_tail", "observed_logp", "entropy", "max_probability"):
            expected = getattr(scores, name)[place, :real]
            torch.testing.assert_close(getattr(back, name)[place, :real], expected, rtol=1e-5, atol=1e-6)
        assert (back.top_ids[place, real:] == -1).all()
        assert (back.log_tail[place, real:] == 0).all()
    lengths = [len(rows[3]), len(rows[1])]
    packed = ScoreRequest(
        torch.tensor([rows[3] + rows[1] + [0, 0]]),
        torch.tensor([[1] * sum(lengths) + [0, 0]]),
        segment_ids=torch.tensor([[1] * lengths[0] + [2] * lengths[1] + [0, 0]]),
    )
    in_pack = documents_of(packed)
    assert [document.key for document in in_pack] == [documents[3].key, documents[1].key]
    joined = join_scores(packed, in_pack, [parts[3], parts[1]], temperature=1.0)
    torch.testing.assert_close(
        joined.top_logp[0, lengths[0] : lengths[0] + lengths[1] - 1], scores.top_logp[1, : lengths[1] - 1]
    )
    assert joined.log_tail[0, lengths[0] - 1] == 0


def test_a_batch_without_documents_joins_to_nothing_listed() -> None:
    request = padded([[7], []])
    assert documents_of(request) == []
    scores = join_scores(request, [], [], temperature=2.0)
    assert scores.shape == (2, 1)
    assert (scores.top_ids == -1).all()
    assert scores.temperature == 2.0


def test_padding_on_the_left_is_refused() -> None:
    request = ScoreRequest(torch.tensor([[1, 2, 3], [0, 1, 2]]), torch.tensor([[1, 1, 1], [0, 1, 1]]))
    with pytest.raises(ValueError, match="row 1 has padding before"):
        documents_of(request)


def test_dense_scores_cannot_be_split() -> None:
    request = padded([[1, 2]])
    with pytest.raises(ValueError, match="'dense' without observed_logp"):
        split_scores(documents_of(request), tiny_teacher().score(request))


@pytest.mark.parametrize("wrong", [(0, 4, 0.5), (5, 4, 0.5), (1, 4, 0.0), (1, 4, 1.5), (1, 70_000, 0.5)])
def test_a_rule_without_sense_is_refused(wrong: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match="floor ≤ cap"):
        TopK(*wrong)


def test_equal_ids_are_one_document_whatever_their_type() -> None:
    assert document_key(np.array([1, 300], dtype=np.int64)) == document_key(np.array([1, 300], dtype=np.int16))
    assert document_key(np.array([1, 2])) != document_key(np.array([2, 1]))
    assert issubclass(CacheError, ValueError)
