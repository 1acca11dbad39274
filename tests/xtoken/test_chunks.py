"""Chunk averages, validity, flat batches."""

from __future__ import annotations

import pytest
import torch

from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.loss_utils import alignment_from_flat_batch, chunk_average_log_probs, valid_chunk_mask
from tests.reference.losses import chunk_means
from tests.xtoken.cases import random_alignment


def test_average_equals_the_one_hot_product(generator) -> None:
    values = torch.randn(3, 9, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = random_alignment(3, 9, 9, 4, generator).student_chunk_id
    means, sizes = chunk_average_log_probs(values, ids, 4)
    expected, counts = chunk_means(values, ids, 4)
    torch.testing.assert_close(means, expected)
    torch.testing.assert_close(sizes, counts)
    torch.testing.assert_close(
        torch.autograd.grad(means.sin().sum(), values)[0], torch.autograd.grad(expected.sin().sum(), values)[0]
    )


def test_averages_stay_float32_under_autocast(generator) -> None:
    values = torch.randn(1, 64, 3, generator=generator)
    ids = torch.zeros(1, 64, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        means, _ = chunk_average_log_probs(values, ids, 1)
        narrow, _ = chunk_average_log_probs(values.bfloat16(), ids, 1)
    assert means.dtype == narrow.dtype == torch.float32
    torch.testing.assert_close(means[0, 0], values[0].mean(0))


def test_no_chunks_and_wrong_ids() -> None:
    means, sizes = chunk_average_log_probs(torch.zeros(2, 3, 4), torch.full((2, 3), -1), 0)
    assert means.shape == (2, 0, 4)
    assert sizes.shape == (2, 0)
    for shape in ((2, 3, 0), (2, 0, 4), (0, 3, 4)):
        means, sizes = chunk_average_log_probs(torch.zeros(shape), torch.zeros(shape[:2], dtype=torch.long), 5)
        assert means.shape == (shape[0], 5, shape[2])
        assert sizes.sum() == shape[0] * shape[1]
    with pytest.raises(ValueError, match="max_chunks is 2"):
        chunk_average_log_probs(torch.zeros(1, 1, 1), torch.tensor([[2]]), 2)


def test_valid_chunks_have_two_sides() -> None:
    valid = torch.tensor([[True, True, True, False]])
    got = valid_chunk_mask(torch.tensor([[1.0, 0.0, 2.0, 1.0]]), torch.tensor([[1.0, 1.0, 0.0, 1.0]]), valid)
    assert got.tolist() == [[True, False, False, False]]


@pytest.mark.parametrize(("index", "prefix"), [(None, "alignment_"), (1, "alignment_1_")])
def test_flat_batch(generator, index, prefix: str) -> None:
    alignment = random_alignment(2, 4, 4, 3, generator)
    flat = {prefix + name: value for name, value in vars(alignment).items() if value is not None}
    back = alignment_from_flat_batch(flat, teacher_index=index)
    assert isinstance(back, AlignmentBatch)
    assert torch.equal(back.student_chunk_id, alignment.student_chunk_id)
    assert back.quality is None
    with pytest.raises(ValueError, match="lacks alignment_"):
        alignment_from_flat_batch(flat, teacher_index=3)
