"""Helpers of the cross-tokenizer losses, under the names and with the contracts they have in NeMo RL.

Thin: averages live in ``chunks.py``, projection files in ``projection_file.py``, the exact map in ``exact_map.py``,
shared logits in ``spanwise.teachers.process``. The module-level caches keep the keys they have there and carry the
file's stat beside the value: a hit costs one stat and no read, and a rewritten file is noticed. Each holds a few
entries, oldest dropped first.

Shapes: Vs, Vt vocabularies, K entries per row, B rows, T length, C chunks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float, Float32, Int, Int64
from torch import Tensor
from typing_extensions import override

from spanwise.teachers.process import attach_logits
from spanwise.xtoken.chunks import alignment_from_flat_batch, chunk_average_log_probs, valid_chunk_mask
from spanwise.xtoken.exact_map import exact_token_map
from spanwise.xtoken.projection import coalesce
from spanwise.xtoken.projection_file import read_projection_file, sparse_entries

__all__ = [
    "Fp32SparseMM",
    "alignment_from_flat_batch",
    "build_exact_token_map",
    "chunk_average_log_probs",
    "dp_all_reduce_sum",
    "get_sparse_projection_matrix",
    "get_topk_projection",
    "parse_projection_file",
    "rebuild_teacher_full_logits_from_ipc",
    "valid_chunk_mask",
]

Value = TypeVar("Value")
Stat = tuple[int, int, int]

_SPARSE_PROJECTION_CACHE: dict[tuple[str, torch.device, int, int], tuple[Stat, Tensor]] = {}
_TOPK_PROJECTION_CACHE: dict[tuple[str, torch.device], tuple[Stat, tuple[Tensor, Tensor]]] = {}
_EXACT_TOKEN_MAP_CACHE: dict[tuple[str, torch.device, bool, int], tuple[Stat, dict[str, Tensor]]] = {}
_MOST_CACHED = 8


def rebuild_teacher_full_logits_from_ipc(data: Mapping[str, Any]) -> Tensor:
    """The micro-batch's teacher logits [mb_B, T, V] as a view of the producer's memory: no copy, dtype preserved.

    Args:
        data: ``teacher_full_logits_ipc``, one dict per sample: ``rank_logits_ipc``, the producer's stable handle, and
            ``sample_idx_within_rank``. The samples must be consecutive there and of one rank.
    """
    samples = data.get("teacher_full_logits_ipc")
    if not samples:
        raise ValueError(
            "the batch has no teacher_full_logits_ipc entries; expected one per sample. The teacher was probably not "
            "asked for shared logits. Fix: data['teacher_full_logits_ipc'] = buffer.sample_handles() of a "
            "SharedLogitsBuffer."
        )
    lacking = {
        name for sample in samples for name in ("rank_logits_ipc", "sample_idx_within_rank") if name not in sample
    }
    if lacking:
        raise ValueError(
            f"some teacher_full_logits_ipc entries lack {', '.join(sorted(lacking))}; expected both in each. The "
            "buffer's own handle was probably repeated. Fix: data['teacher_full_logits_ipc'] = buffer.sample_handles()."
        )
    rows = [int(sample["sample_idx_within_rank"]) for sample in samples]
    first = samples[0]["rank_logits_ipc"]
    logits = attach_logits(first)
    apart = sum(sample["rank_logits_ipc"] != first for sample in samples)
    if apart or rows != list(range(rows[0], rows[0] + len(rows))):
        raise ValueError(
            f"the micro-batch's samples lie at rows {rows}, {apart} of them in another buffer; expected consecutive "
            "rows of one, since a view cannot gather. The batch was probably shuffled after the teacher's pass. Fix: "
            "slice micro-batches in the order of the producer's rows, or gather explicitly with "
            "attach_logits(handle)[rows]."
        )
    if rows[0] < 0 or rows[-1] >= len(logits):
        raise ValueError(
            f"the micro-batch asks for rows {rows[0]} to {rows[-1]} of a buffer of {len(logits)}; expected rows "
            "inside it. The handles probably belong to a larger batch. Fix: take them from the producer that wrote "
            "these logits."
        )
    return logits[rows[0] : rows[-1] + 1]


class Fp32SparseMM(torch.autograd.Function):
    """``sparse_M.t() @ dense`` in float32, whatever autocast surrounds forward and backward.

    There is no bf16 kernel for sparse products in either direction. The projection is frozen: its gradient is None.

    >>> matrix = torch.eye(2).to_sparse()
    >>> Fp32SparseMM.apply(matrix, torch.ones(2, 1)).tolist()
    [[1.0], [1.0]]
    """

    @staticmethod
    @override
    def forward(*arguments: Any, **_: Any) -> Tensor:
        ctx, sparse_M, dense = cast("tuple[Any, Tensor, Tensor]", arguments)
        ctx.save_for_backward(sparse_M)
        ctx.dense_dtype = dense.dtype
        with torch.autocast(dense.device.type, enabled=False):
            return torch.sparse.mm(sparse_M.float().t(), dense.float())

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (sparse_M,) = ctx.saved_tensors
        (grad_out,) = grad_outputs
        with torch.autocast(grad_out.device.type, enabled=False):
            grad = torch.sparse.mm(sparse_M.float(), grad_out.float())
        return None, grad.to(ctx.dense_dtype)


def dp_all_reduce_sum(
    local: Float[Tensor, "*shape"] | Int[Tensor, "*shape"], *, group: Any | None = None
) -> Float32[Tensor, "*shape"]:
    """Sum a count over the data-parallel ranks.

    Args:
        local: this rank's count; not modified.
        group: the data-parallel process group. Tensor- and context-parallel replicas hold the same chunks and must
            not be in it: summing over them divides loss and gradient by their number. None is the default group.

    Returns:
        A fresh float32 tensor; a copy of ``local`` when torch.distributed is not initialised.

    >>> dp_all_reduce_sum(torch.tensor(3))
    tensor(3.)
    """
    total = local.detach().to(torch.float32, copy=True)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(total, group=group)
    return total


def parse_projection_file(
    path: str | os.PathLike[str],
) -> tuple[Int64[Tensor, "2 E"], Float32[Tensor, " E"], int, int]:
    """A projection file as COO components.

    Args:
        path: safetensors, or a dense or sparse ``.pt`` (never unpickled beyond tensors and plain containers).

    Returns:
        indices (student, teacher; the -1 sentinels of the dense form are kept), values, and the sizes that the file
        alone implies: rows (dense) or the largest student id plus one (sparse), and the largest teacher id plus one (0
        if none).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not in a recognized format.
    """
    content, _ = read_projection_file(path)
    indices, values = sparse_entries(content)
    if "indices" in content:
        students = len(content["indices"])
    else:
        students = int(indices[0].max()) + 1 if indices.numel() else 0
    teachers = max(0, int(indices[1].max()) + 1) if indices.numel() else 0
    return indices, values, students, teachers


def get_sparse_projection_matrix(
    path: str | os.PathLike[str], device: torch.device, *, student_vocab_size: int, teacher_vocab_size: int
) -> Tensor:
    """The projection as a coalesced float32 sparse COO tensor (V_s, V_t) on ``device``; cached.

    V_s and V_t are at least the sizes given and at least the largest id in the file plus one. -1 entries are dropped.
    """

    def load() -> Tensor:
        indices, values, students, teachers = parse_projection_file(path)
        shape = (max(student_vocab_size, students), max(teacher_vocab_size, teachers))
        kept = indices[1] >= 0
        entries = coalesce(indices[0][kept], indices[1][kept], values[kept], shape[1])
        ids = torch.stack([entries.student, entries.teacher])
        with warnings.catch_warnings():
            # Said once by some versions of torch even where the choice is made explicitly.
            warnings.filterwarnings("ignore", message="Sparse invariant checks")
            matrix = torch.sparse_coo_tensor(ids, entries.weight, shape, check_invariants=False)
        return matrix.to(device).coalesce()

    key = (_name(path), torch.device(device), student_vocab_size, teacher_vocab_size)
    return _cached(_SPARSE_PROJECTION_CACHE, key, path, load)


def get_topk_projection(path: str | os.PathLike[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """The dense top-k ``(indices, likelihoods)``, [V_s, K] int64 and float32, on ``device``; cached.

    Raises:
        ValueError: the file is not in the dense top-k form.
    """

    def load() -> tuple[Tensor, Tensor]:
        content, _ = read_projection_file(path)
        if "indices" not in content:
            raise ValueError(
                f"'{path}' holds the sparse form (student, teacher) -> count; expected the dense top-k form, since "
                "the exact map needs each row's weights. Fix: Projection.load(FILE).save(NEW_FILE), or spanwise "
                "project build STUDENT TEACHER -o FILE."
            )
        return content["indices"].to(device), content["likelihoods"].to(device)

    return _cached(_TOPK_PROJECTION_CACHE, (_name(path), torch.device(device)), path, load)


def build_exact_token_map(
    path: str | os.PathLike[str], device: torch.device, *, xtoken_loss: bool, teacher_vocab_size: int
) -> dict[str, Tensor]:
    """The common and uncommon parts of the two vocabularies; cached.

    Args:
        path: a projection in the dense top-k form.
        device: of the result.
        xtoken_loss: False pairs exact rows only, True rows whose first weight is at least 0.6.
        teacher_vocab_size: V_t; teacher ids outside it are dropped.

    Returns:
        ``common_student``, ``common_teacher`` (paired), ``uncommon_student``, ``uncommon_teacher`` (sorted), int64.
    """

    def load() -> dict[str, Tensor]:
        indices, likelihoods = get_topk_projection(path, device)
        return exact_token_map(indices, likelihoods, xtoken_loss=xtoken_loss, teacher_vocab_size=teacher_vocab_size)

    key = (_name(path), torch.device(device), xtoken_loss, teacher_vocab_size)
    return _cached(_EXACT_TOKEN_MAP_CACHE, key, path, load)


def _name(path: str | os.PathLike[str]) -> str:
    return os.fspath(path)


def _cached(
    cache: dict[Any, tuple[Stat, Value]], key: Hashable, path: str | os.PathLike[str], load: Callable[[], Value]
) -> Value:
    """The value under ``key`` if the file is still the one it was read from, else a fresh one."""
    try:
        status = os.stat(path)
        stat = (status.st_mtime_ns, status.st_size, status.st_ino)
    except FileNotFoundError:
        cache.pop(key, None)
        return load()  # raises, and says what to do
    held = cache.get(key)
    if held is not None and held[0] == stat:
        return held[1]
    value = load()
    cache.pop(key, None)
    cache[key] = (stat, value)
    while len(cache) > _MOST_CACHED:
        cache.pop(next(iter(cache)))
    return value
