"""The words the data plane shares: layouts, fields of a partition, and the dtypes that may travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

Layout = Literal["padded", "jagged"]
"""How a reader wants ragged columns: rectangles, or as they are."""

Columns = Any
"""Name → column: a TensorDict (which is no ``Mapping``) or any mapping of tensors, nested tensors and object arrays."""

LAYOUTS: tuple[str, ...] = get_args(Layout)

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
        "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
        "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    )
    if hasattr(torch, name)
}  # fmt: skip
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

LENGTH_TAG = "input_lengths"
"""The tag that says how many tokens a sample has."""

OBJECT = "object"
"""The dtype name of a column of Python objects."""


@dataclass(frozen=True)
class Field:
    """What a partition knows about one column.

    Attributes:
        name: the column's name.
        dtype: a torch dtype, its name, ``"object"``, or None while unknown.
        tail_shape: the dimensions of one token (ragged) or of one row (rectangular); None while unknown.
        ragged: whether rows have their own lengths; None while unknown.

    >>> Field("input_ids", torch.int64, (), ragged=True).known
    True
    >>> Field("reward").known  # learns its schema from the first put
    False
    """

    name: str
    dtype: torch.dtype | str | None = None
    tail_shape: tuple[int, ...] | None = None
    ragged: bool | None = None

    def __post_init__(self) -> None:
        if self.tail_shape is not None:
            object.__setattr__(self, "tail_shape", tuple(self.tail_shape))

    @property
    def known(self) -> bool:
        """Whether a put can be checked against this field."""
        return self.dtype is not None

    @property
    def dtype_name(self) -> str | None:
        """The dtype as it is written on the wire."""
        return DTYPE_NAMES.get(self.dtype, str(self.dtype)) if isinstance(self.dtype, torch.dtype) else self.dtype

    def to_wire(self) -> list[Any]:
        """Plain values for a record."""
        tail = None if self.tail_shape is None else list(self.tail_shape)
        return [self.name, self.dtype_name, tail, self.ragged]

    @classmethod
    def from_wire(cls, value: Sequence[Any]) -> Field:
        """The field behind :meth:`to_wire`."""
        name, dtype, tail, ragged = value
        return cls(name, dtype, None if tail is None else tuple(tail), ragged)


def as_field(field: Field | str) -> Field:
    """A bare name is a field that learns its schema from the first put."""
    if isinstance(field, str):
        return Field(field)
    if field.dtype is not None and field.dtype_name not in (OBJECT, *DTYPES):
        raise ValueError(
            f"field '{field.name}' has dtype {field.dtype!r}; expected a torch dtype or its name, of {sorted(DTYPES)}, "
            "or 'object'. It was probably taken from another library, or is a quantized one. Fix: pass a torch dtype."
        )
    return field
