"""The jagged codec: padded columns in a process, ragged ones on the wire, padding only where a reader asks.

Writers turn rectangles and lengths into jagged nested tensors (``to_nested_by_length``, ``pack_jagged_fields``);
readers turn them back (``materialize``). The names and arguments are those of NeMo RL's codec; where this one is
stricter it says so in docs/compatibility.md. Everything costs one pass over the bytes kept plus O(N) per column. What
a column *is* lives next door: nested.py, object_columns.py, rectangles.py.

Shapes: N rows, S padded width, L_i the length of row i, ``*tail`` further dimensions of one token.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from spanwise.batch import BatchedDataDict
from spanwise.dataplane.nested import nested_from_rows, nested_parts, whole_lengths
from spanwise.dataplane.object_columns import column_of, object_stack, unwrap_wire_stripped_payload
from spanwise.dataplane.ragged import gather_spans
from spanwise.dataplane.rectangles import exact_pad, rectangle
from spanwise.dataplane.schema import LAYOUTS, Layout

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "materialize",
    "maybe_pack_jagged",
    "pack_jagged_fields",
    "pack_per_token_field",
    "response_from_nested",
    "stack_or_nest",
    "to_nested_by_length",
    "unwrap_wire_stripped_payload",
]


def to_nested_by_length(padded: Tensor, lengths: Tensor, *, strict: bool = True) -> Tensor:
    """Strip the right padding off a rectangle.

    Args:
        padded: [N, S, *tail], any dtype and device. Gradients flow through.
        lengths: int [N]. CUDA lengths cost exactly one copy to the host.
        strict: a length beyond S is an error; False clamps it to S.

    Returns:
        A ``torch.jagged`` nested tensor whose row i is ``padded[i, :lengths[i]]``, with int64 offsets and its shortest
        and longest length cached. No rows give an empty nested tensor of shape (0, j, *tail).

    >>> nested = to_nested_by_length(torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([2, 1]))
    >>> nested.values().tolist(), nested.offsets().tolist()
    ([1, 2, 3], [0, 2, 3])
    """
    if padded.dim() < 2 or padded.is_nested:
        raise ValueError(
            f"to_nested_by_length was given {'a nested tensor of ' if padded.is_nested else ''}shape "
            f"{tuple(padded.shape)}; expected a rectangle (N, S, ...) with one padded row per sample. A per-sample "
            "column was probably passed as a per-token one, or one that is packed already. Fix: leave it as it is."
        )
    if lengths.shape != padded.shape[:1]:
        raise ValueError(
            f"lengths shape is {tuple(lengths.shape)}; expected ({padded.shape[0]},), one length per row of "
            f"{tuple(padded.shape)}. The lengths probably belong to another batch. Fix: pass this batch's lengths."
        )
    counts = _checked_lengths(lengths, padded.shape[1], strict)
    rows, width = padded.shape[:2]
    flat = padded.reshape(rows * width, *padded.shape[2:])
    return nested_from_rows(gather_spans(flat, range(0, rows * width, width) if width else [0] * rows, counts), counts)


def stack_or_nest(tensors: list[Tensor]) -> Tensor:
    """Stack equal-shape rows; make ragged ones a jagged nested tensor.

    An empty list gives ``torch.empty(0)``. Rows may differ in their first dimension only; anything else, also mixed
    dtypes, is a ValueError that names the rows.

    >>> stack_or_nest([torch.zeros(2), torch.zeros(2)]).shape
    torch.Size([2, 2])
    """
    if not tensors:
        return torch.empty(0)
    kinds = [(row.dim(), row.dtype, row.shape[1:]) for row in tensors]
    odd = [row for row, kind in enumerate(kinds) if kind != kinds[0]]
    if odd:
        raise ValueError(
            f"rows {odd[:5]} have (dimensions, dtype, tail) {kinds[odd[0]]} where row 0 has {kinds[0]}; expected rows "
            "that differ in their first dimension only. Two columns were probably mixed. "
            "Fix: stack each column by itself, in one dtype."
        )
    if len({row.shape for row in tensors}) == 1:
        return torch.stack(tensors)
    return nested_from_rows(torch.cat(tensors), [row.shape[0] for row in tensors])


def maybe_pack_jagged(val: Tensor, lengths: Tensor) -> Tensor:
    """Make ``val`` jagged if it looks like a per-token column: at least 2-D, N rows, S equal to ``max(lengths)``.

    Otherwise ``val.detach().contiguous()``. A nested input whose rows have these lengths is returned as it is. The
    shape can deceive (a top-k of max(lengths) entries): prefer names, see :func:`pack_jagged_fields`.

    >>> maybe_pack_jagged(torch.zeros(2, 3), torch.tensor([3, 1])).is_nested
    True
    """
    lengths = lengths.cpu()
    if val.is_nested:
        return _nested_of(val, lengths)
    if _looks_per_token(val, lengths):
        return to_nested_by_length(val, lengths)
    return val.detach().contiguous()


def pack_per_token_field(val: Tensor, lengths: Tensor) -> Tensor:
    """Make a known per-token column jagged, tolerating extra width on the right (sequence-parallel padding).

    Needs at least 2-D, N rows and S >= ``max(lengths)``; otherwise ``val.detach().contiguous()``.

    >>> pack_per_token_field(torch.ones(2, 8), torch.tensor([3, 1])).values().shape
    torch.Size([4])
    """
    lengths = lengths.cpu()
    if val.is_nested:
        return _nested_of(val, lengths)
    longest = _longest(lengths)
    if val.dim() >= 2 and val.shape[0] == len(lengths) and val.shape[1] >= longest:
        return to_nested_by_length(val, lengths)
    return val.detach().contiguous()


def pack_jagged_fields(
    fields: Mapping[str, Any], *, lengths: Tensor | None, token_aligned_fields: Collection[str] | None = None
) -> TensorDict:
    """Pack columns into the wire layout.

    Args:
        fields: name → tensor (rectangular or nested) or ``ndarray(dtype=object)``; N rows each.
        lengths: int [N]; None leaves every rectangle as it is and takes N from the columns.
        token_aligned_fields: the per-token columns by name (an empty set: none). None falls back on the shape
            heuristic of :func:`maybe_pack_jagged` and warns, once per field, when that cuts a column of three or more
            dimensions.

    Returns:
        A TensorDict of batch size [N] ([0] when there is neither a column nor a length).
    """
    from tensordict import TensorDict

    lengths = None if lengths is None else lengths.cpu()
    rows = _row_count(fields, lengths)
    unknown = set(token_aligned_fields or ()) - set(fields)
    if unknown:
        raise ValueError(
            f"token_aligned_fields names {sorted(unknown)}, which are not among the fields {sorted(fields)}; expected "
            "names of columns in this call. A column was probably renamed. Fix: name the columns that are passed."
        )
    packed: dict[str, Any] = {}
    for name, column in fields.items():
        if isinstance(column, np.ndarray):
            packed[name] = object_stack(column)
        elif lengths is None:
            packed[name] = column if column.is_nested else column.detach().contiguous()
        elif token_aligned_fields is None:
            _warn_of_a_guess(name, column, lengths)
            packed[name] = maybe_pack_jagged(column, lengths)
        elif name in token_aligned_fields:
            packed[name] = _pack_by_name(name, column, lengths)
        else:
            packed[name] = column if column.is_nested else column.detach().contiguous()
    return TensorDict(packed, batch_size=[rows])


def response_from_nested(full: Tensor, response_mask: Tensor) -> Tensor:
    """The response part of a (prompt + response) column, shifted left by one token.

    Row i is ``values[end - response - 1 : end - 1]``: the outputs that predict the response's tokens.

    Args:
        full: jagged [N, prompt + response, *tail].
        response_mask: jagged [N, response]; only its row lengths count.

    >>> full = to_nested_by_length(torch.tensor([[5, 6, 7, 8]]), torch.tensor([4]))
    >>> mask = to_nested_by_length(torch.ones(1, 2), torch.tensor([2]))
    >>> response_from_nested(full, mask).values().tolist()
    [6, 7]
    """
    for name, part in (("full", full), ("response_mask", response_mask)):
        if not part.is_nested:
            raise ValueError(
                f"{name} is a rectangle of shape {tuple(part.shape)}; expected a jagged nested tensor. It was probably "
                "materialized before. Fix: call to_nested_by_length first."
            )
    values, counts = nested_parts(full)
    _, wanted = nested_parts(response_mask)
    if len(counts) != len(wanted):
        raise ValueError(
            f"full has {len(counts)} rows and response_mask {len(wanted)}; expected one mask row per sample. The two "
            "probably come from different batches. Fix: select the same samples on both sides."
        )
    short = [row for row, (have, take) in enumerate(zip(counts, wanted, strict=True)) if take and take + 1 > have]
    if short:
        row = short[0]
        raise ValueError(
            f"row {row} has {counts[row]} tokens and a response of {wanted[row]}; expected at least response + 1, "
            "since the first response token is predicted by the token before it. The prompt was probably stripped. "
            "Fix: pass the column over prompt and response."
        )
    ends = accumulate(counts)
    starts = [max(end - take - 1, 0) for end, take in zip(ends, wanted, strict=True)]
    return nested_from_rows(gather_spans(values, starts, wanted), wanted)


def materialize(
    td: Mapping[str, Any] | TensorDict,
    layout: Layout | str = "padded",
    pad_value_dict: Mapping[str, int | float] | None = None,
    pad_to_seqlen: int = 0,
    *,
    seq_fields: Collection[str] | None = None,
    no_pad_fields: Collection[str] = (),
    out: Mapping[str, Tensor] | None = None,
) -> BatchedDataDict:
    """Turn wire columns into what a trainer reads.

    Args:
        td: a TensorDict or any mapping of columns: tensors, nested tensors, object columns.
        layout: "padded" makes nested columns rectangles; "jagged" passes them through.
        pad_value_dict: per column, what to pad with (0 otherwise), cast exactly to the column's dtype.
        pad_to_seqlen: widen dim 1 to at least this; below a column's own width it has no effect. Not for "jagged".
        seq_fields: the columns that ``pad_to_seqlen`` widens; None means every column of two or more dimensions.
        no_pad_fields: columns that it never widens.
        out: per column, a buffer of the column's dtype and tail with at least N rows and the width needed; the result
            is a view of its corner. Rectangles are copied there too.

    Returns:
        BatchedDataDict of rectangles ((N, 0) if every row is empty), nested columns for "jagged", and object arrays of
        shape (N,). Rectangles that need no padding share storage with ``td``.

    >>> columns = {"ids": to_nested_by_length(torch.tensor([[1, 2], [3, 0]]), torch.tensor([2, 1]))}
    >>> materialize(columns, pad_value_dict={"ids": -1})["ids"].tolist()
    [[1, 2], [3, -1]]
    """
    if layout not in LAYOUTS:
        raise ValueError(
            f"layout is {layout!r}; expected one of {list(LAYOUTS)}. It was probably misspelled. "
            "Fix: 'padded' for rectangles, 'jagged' to keep ragged columns as they are."
        )
    batch = BatchedDataDict()
    for name, leaf in td.items():
        column = column_of(name, leaf)
        if isinstance(column, Tensor) and layout == "padded":
            widened = (seq_fields is None or name in seq_fields) and name not in no_pad_fields
            pad = exact_pad((pad_value_dict or {}).get(name, 0), column.dtype, name)
            column = rectangle(name, column, pad, pad_to_seqlen if widened else 0, (out or {}).get(name))
        batch[name] = column
    return batch


def _checked_lengths(lengths: Tensor, width: int, strict: bool) -> list[int]:
    counts = whole_lengths(lengths)
    for row, count in enumerate(counts):
        if count < 0:
            raise ValueError(
                f"row {row} has length {count}; expected 0 to {width}. The lengths were probably computed by a "
                "subtraction that went below zero. Fix: recompute them from the attention mask."
            )
        if count > width and strict:
            raise ValueError(
                f"row {row} has length {count} in a column only {width} wide; expected at most the width. The column "
                "was probably truncated after its lengths were taken. Fix: recompute the lengths, or pass strict=False "
                "to clamp them."
            )
    return [min(count, width) for count in counts]


def _longest(lengths: Tensor) -> int:
    return max(whole_lengths(lengths), default=0)


def _looks_per_token(val: Tensor, lengths: Tensor) -> bool:
    longest = _longest(lengths)
    return val.dim() >= 2 and val.shape[0] == len(lengths) and val.shape[1] == longest


def _nested_of(val: Tensor, lengths: Tensor) -> Tensor:
    _, counts = nested_parts(val)
    wanted = whole_lengths(lengths)
    if counts != wanted:
        raise ValueError(
            f"a nested column has row lengths {counts[:5]}… where the batch says {wanted[:5]}…; expected "
            "equal lengths. The column probably belongs to another batch or to other tokens (a teacher's). "
            "Fix: pack it with its own lengths."
        )
    return val


def _pack_by_name(name: str, column: Tensor, lengths: Tensor) -> Tensor:
    if not column.is_nested and (column.dim() < 2 or column.shape[1] < _longest(lengths)):
        raise ValueError(
            f"field '{name}' is named as token-aligned and has shape {tuple(column.shape)}; expected (N, S, ...) with "
            f"S of at least {_longest(lengths)}, the longest row. A per-sample column was probably named. "
            "Fix: take it out of token_aligned_fields."
        )
    return pack_per_token_field(column, lengths)


def _warn_of_a_guess(name: str, column: Tensor, lengths: Tensor) -> None:
    if not column.is_nested and column.dim() >= 3 and _looks_per_token(column, lengths):
        warnings.warn(
            # Without the shape, which differs by batch: Python shows a message once per line of the caller's.
            f"field '{name}' of {column.dim()} dimensions was cut to the row lengths because its second dimension "
            "equals the longest row. If it holds a top-k or a grid, data was lost: name the per-token columns in "
            "token_aligned_fields.",
            UserWarning,
            stacklevel=3,
        )


def _row_count(fields: Mapping[str, Any], lengths: Tensor | None) -> int:
    rows = None if lengths is None else len(whole_lengths(lengths))
    for name, column in fields.items():
        is_objects = isinstance(column, np.ndarray) and column.dtype == object
        if not isinstance(column, Tensor) and not is_objects:
            kind = f"ndarray of {column.dtype}" if isinstance(column, np.ndarray) else type(column).__name__
            raise TypeError(
                f"field '{name}' is a {kind}; expected a Tensor or an ndarray of dtype object. A list or a numeric "
                "array was probably passed. Fix: torch.as_tensor(...) for numbers, np.array(..., dtype=object) for "
                "objects."
            )
        have = len(column) if column.ndim else -1
        rows = have if rows is None else rows
        if have != rows or (is_objects and column.ndim != 1):
            raise ValueError(
                f"field '{name}' has shape {tuple(column.shape)}; expected {rows} rows, as the lengths or the first "
                "column say. It was probably taken from another batch. Fix: select the same rows everywhere."
            )
    return rows or 0
