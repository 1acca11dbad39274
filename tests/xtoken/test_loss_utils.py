"""The kept names: projection files and caches, the float32 sparse product, reductions."""

from __future__ import annotations

import builtins
import os

import pytest
import torch

from spanwise.xtoken import loss_utils
from spanwise.xtoken.loss_utils import (
    Fp32SparseMM,
    build_exact_token_map,
    dp_all_reduce_sum,
    get_sparse_projection_matrix,
    get_topk_projection,
    parse_projection_file,
)

CPU = torch.device("cpu")


def dense_file(path, weight: float = 1.0):
    torch.save(
        {"indices": torch.tensor([[3, -1], [0, 2]]), "likelihoods": torch.tensor([[weight, 0.0], [0.25, 0.75]])}, path
    )
    return path


def test_parse_dense_and_sparse(tmp_path) -> None:
    indices, values, students, teachers = parse_projection_file(dense_file(tmp_path / "d.pt"))
    assert indices.tolist() == [[0, 0, 1, 1], [3, -1, 0, 2]]
    assert values.tolist() == [1.0, 0.0, 0.25, 0.75]
    assert (students, teachers) == (2, 4)
    torch.save({(4, 1): 2, (0, 7): 1.5}, tmp_path / "s.pt")
    indices, values, students, teachers = parse_projection_file(str(tmp_path / "s.pt"))
    assert indices.tolist() == [[4, 0], [1, 7]]
    assert (students, teachers) == (5, 8)
    torch.save({"indices": torch.full((2, 1), -1), "likelihoods": torch.zeros(2, 1)}, tmp_path / "none.pt")
    assert parse_projection_file(tmp_path / "none.pt")[3] == 0
    with pytest.raises(FileNotFoundError):
        parse_projection_file(tmp_path / "absent.pt")
    torch.save({"weights": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="not in a recognized format"):
        parse_projection_file(tmp_path / "other.pt")


def test_sparse_matrix_sizes_and_sentinels(tmp_path) -> None:
    file = dense_file(tmp_path / "d.pt")
    matrix = get_sparse_projection_matrix(file, CPU, student_vocab_size=5, teacher_vocab_size=2)
    assert matrix.shape == (5, 4)
    assert matrix.is_coalesced()
    assert matrix.dtype == torch.float32
    assert matrix._nnz() == 3
    again = get_sparse_projection_matrix(file, CPU, student_vocab_size=5, teacher_vocab_size=2)
    assert again is matrix


def test_a_hit_reads_nothing_and_a_rewritten_file_is_noticed(tmp_path, monkeypatch) -> None:
    file = dense_file(tmp_path / "d.pt")
    first = get_topk_projection(file, CPU)
    exact = build_exact_token_map(file, CPU, xtoken_loss=False, teacher_vocab_size=4)
    assert exact["common_student"].tolist() == [0]
    stats: list[object] = []
    real_stat = os.stat
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", lambda *a, **k: pytest.fail("a cached projection was read again"))
        patch.setattr(os, "stat", lambda *a, **k: (stats.append(a), real_stat(*a, **k))[1])
        assert get_topk_projection(file, CPU) is first
    assert len(stats) == 1
    dense_file(tmp_path / "new.pt", weight=0.5)
    os.replace(tmp_path / "new.pt", file)
    assert float(get_topk_projection(file, CPU)[1][0, 0]) == 0.5
    assert build_exact_token_map(file, CPU, xtoken_loss=False, teacher_vocab_size=4)["common_student"].tolist() == []
    file.unlink()
    with pytest.raises(FileNotFoundError):
        get_topk_projection(file, CPU)


def test_caches_are_keyed_as_documented_and_bounded(tmp_path) -> None:
    file = dense_file(tmp_path / "d.pt")
    build_exact_token_map(file, CPU, xtoken_loss=True, teacher_vocab_size=4)
    get_sparse_projection_matrix(file, CPU, student_vocab_size=2, teacher_vocab_size=4)
    assert (str(file), CPU, True, 4) in loss_utils._EXACT_TOKEN_MAP_CACHE
    assert (str(file), CPU) in loss_utils._TOPK_PROJECTION_CACHE
    assert (str(file), CPU, 2, 4) in loss_utils._SPARSE_PROJECTION_CACHE
    for size in range(10, 40):
        get_sparse_projection_matrix(file, CPU, student_vocab_size=size, teacher_vocab_size=4)
    assert len(loss_utils._SPARSE_PROJECTION_CACHE) <= 8


def test_the_topk_loader_refuses_the_sparse_form(tmp_path) -> None:
    torch.save({(0, 1): 1.0}, tmp_path / "s.pt")
    with pytest.raises(ValueError, match="sparse form"):
        get_topk_projection(tmp_path / "s.pt", CPU)


def sparse_product(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(6, 9, generator=generator).to(device).relu().to_sparse()
    dense = torch.randn(6, 3, generator=generator).to(device).requires_grad_()
    expected = matrix.to_dense().t() @ dense
    (wanted,) = torch.autograd.grad(expected.sin().sum(), dense)
    with torch.autocast(device, torch.bfloat16):
        inside = Fp32SparseMM.apply(matrix, dense)
        assert inside.dtype == torch.float32
        (got,) = torch.autograd.grad(inside.sin().sum(), dense)
        half = dense.detach().bfloat16().requires_grad_()
        out = Fp32SparseMM.apply(matrix, half)
        assert out.dtype == torch.float32
        out.sum().backward()
    assert half.grad.dtype == torch.bfloat16
    torch.testing.assert_close(inside, expected)
    torch.testing.assert_close(got, wanted)
    outside = Fp32SparseMM.apply(matrix, dense)
    torch.testing.assert_close(torch.autograd.grad(outside.sin().sum(), dense)[0], wanted)
    assert not outside.isnan().any()


def test_sparse_product_ignores_autocast() -> None:
    sparse_product("cpu")


@pytest.mark.gpu
def test_sparse_product_ignores_autocast_on_cuda() -> None:
    sparse_product("cuda")


def test_reduce_without_distributed_is_a_copy() -> None:
    local = torch.tensor(3, dtype=torch.long)
    total = dp_all_reduce_sum(local)
    assert total.dtype == torch.float32
    total += 1
    assert int(local) == 3
