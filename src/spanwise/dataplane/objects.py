"""Python objects as msgpack, from an allow-list and never pickle: reading a stranger's bytes cannot run code.

None, bool, int, float, str, bytes, list and dict with str keys are msgpack's own; five extension types carry the rest
(docs/wire-format.md). Writing anything else raises UnsafeObject with field, row and path. Reading checks every count
and size against the bytes that are there before a decoder may allocate for it. O(items) time both ways.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from spanwise.dataplane.errors import CorruptFrame, UnsafeObject
from spanwise.dataplane.ragged import byte_view, plain
from spanwise.dataplane.schema import DTYPE_NAMES, DTYPES

EXT_TUPLE, EXT_DATETIME, EXT_NDARRAY, EXT_TENSOR, EXT_BIG_INT = 1, 2, 3, 4, 5
MAX_DEPTH = 64
MAX_BIG_INT_BYTES = 4096
MAX_ELEMENTS = 1 << 58  # times 16 bytes, a signed 64-bit number
NUMPY_KINDS = frozenset("biufc")
CONTAINER_BYTES = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
_ENCODER = msgspec.msgpack.Encoder()


def encode_object(value: Any, *, field: str, row: int) -> bytes:
    """``value`` as msgpack; UnsafeObject names ``field``, ``row`` and the path inside ``value``.

    >>> decode_object(encode_object({"answer": (1, None)}, field="info", row=0))
    {'answer': (1, None)}
    """
    return _ENCODER.encode(_plain_value(value, field, row, "$", 0))


def encode_tags(tags: Mapping[str, Any], row: int) -> dict[str, bytes]:
    """One row's tags as name → msgpack, under the rules of :func:`encode_object`.

    >>> decode_tags(encode_tags({"prompt": 3, "pair": (1, 2)}, row=0))
    {'prompt': 3, 'pair': (1, 2)}
    """
    plain_tags: dict[str, Any] = _plain_value(dict(tags), "tags", row, "$", 0)
    return {name: _ENCODER.encode(value) for name, value in plain_tags.items()}


def decode_tags(tags: Mapping[str, bytes]) -> dict[str, Any]:
    """The inverse of :func:`encode_tags`; every call gives values of its own."""
    return {name: decode_object(value, section="tags") for name, value in tags.items()}


def decode_object(data: bytes | memoryview, *, section: str = "objects", offset: int = 0) -> Any:
    """The inverse of :func:`encode_object`; CorruptFrame for anything that it could not have written."""
    try:
        value = _decode(data, 0)
        if _containers(data) > MAX_DEPTH:  # most objects need no closer look
            _check_depth(value)
        return value
    except CorruptFrame:
        raise
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError, MemoryError) as problem:
        raise CorruptFrame(f"an object does not decode ({problem})", offset=offset, section=section) from problem


def _containers(data: bytes | memoryview) -> int:
    """At most so many arrays and maps are in there: the bytes that could begin one."""
    raw = bytes(data)
    return len(raw) - len(raw.translate(None, CONTAINER_BYTES))


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 2):
        level = [
            inner
            for outer in level
            if isinstance(outer, (list, tuple, dict))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if level:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")


def check_counts(data: bytes | memoryview) -> None:
    """Refuse msgpack whose array and map headers promise more items than there are bytes left.

    A decoder allocates what a header promises. Only 32-bit headers can promise much, so bytes without their markers
    pass at once; the rest is walked item by item.
    """
    raw = bytes(data)
    if b"\xdd" not in raw and b"\xdf" not in raw:
        return
    position, pending = 0, 1
    while pending:
        if position >= len(raw):
            raise ValueError("it ends in the middle of an item")
        pending -= 1
        size, items = _item(raw, position)
        position += size
        pending += items
        if pending > len(raw) - position:
            raise ValueError("it promises more items than it has bytes")


def _item(raw: bytes, at: int) -> tuple[int, int]:
    """Bytes of the item at ``at`` without its children, and how many children follow."""
    kind = raw[at]
    if kind < 0x80 or kind >= 0xE0 or kind in (0xC0, 0xC2, 0xC3):
        return 1, 0
    if kind < 0x90:
        return 1, 2 * (kind & 0x0F)
    if kind < 0xA0:
        return 1, kind & 0x0F
    if kind < 0xC0:
        return 1 + (kind & 0x1F), 0
    fixed = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
    fixed |= {0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18}
    if kind in fixed:
        return fixed[kind], 0
    width = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}.get(kind)
    if width is not None:
        length = int.from_bytes(raw[at + 1 : at + 1 + width], "big")
        return 1 + width + length + (kind in (0xC7, 0xC8, 0xC9)), 0
    width = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}[kind]
    count = int.from_bytes(raw[at + 1 : at + 1 + width], "big")
    return 1 + width, count * (2 if kind >= 0xDE else 1)


def _plain_value(value: Any, field: str, row: int, path: str, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if depth > MAX_DEPTH:
        raise UnsafeObject(f"nested deeper than {MAX_DEPTH}, or contains itself", field=field, row=row, path=path)
    if kind is str:
        return _checked_text(value, field, row, path)
    if kind is int:
        return value if -(2**63) <= value < 2**64 else _big_int(value, field, row, path)
    if kind is list or kind is tuple:
        items = [_plain_value(item, field, row, f"{path}[{place}]", depth + 1) for place, item in enumerate(value)]
        return items if kind is list else msgspec.msgpack.Ext(EXT_TUPLE, _ENCODER.encode(items))
    if kind is dict:
        return {
            _checked_key(key, field, row, path): _plain_value(item, field, row, f"{path}.{key}", depth + 1)
            for key, item in value.items()
        }
    if kind is datetime:
        return msgspec.msgpack.Ext(EXT_DATETIME, bytes([value.fold]) + value.isoformat().encode())
    if kind is np.ndarray and value.dtype.kind in NUMPY_KINDS:
        parts = [value.dtype.str, list(value.shape), value.tobytes()]
        return msgspec.msgpack.Ext(EXT_NDARRAY, _ENCODER.encode(parts))
    if isinstance(value, Tensor) and value.layout == torch.strided and value.dtype in DTYPE_NAMES:
        flat = plain(value.cpu())
        parts = [DTYPE_NAMES[value.dtype], list(value.shape), bytes(byte_view(flat))]
        return msgspec.msgpack.Ext(EXT_TENSOR, _ENCODER.encode(parts))
    raise UnsafeObject(f"{kind.__module__}.{kind.__qualname__} may not travel", field=field, row=row, path=path)


def _checked_text(value: str, field: str, row: int, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as problem:
        raise UnsafeObject(f"a str that is no valid Unicode ({problem})", field=field, row=row, path=path) from problem
    return value


def _checked_key(key: Any, field: str, row: int, path: str) -> str:
    if type(key) is not str:
        raise UnsafeObject(f"a dict key of type {type(key).__name__}, not str", field=field, row=row, path=path)
    return _checked_text(key, field, row, path)


def _big_int(value: int, field: str, row: int, path: str) -> msgspec.msgpack.Ext:
    size = value.bit_length() // 8 + 1
    if size > MAX_BIG_INT_BYTES:
        raise UnsafeObject(f"an int of {size} bytes (limit {MAX_BIG_INT_BYTES})", field=field, row=row, path=path)
    return msgspec.msgpack.Ext(EXT_BIG_INT, value.to_bytes(size, "big", signed=True))


def _decode(data: bytes | memoryview, depth: int) -> Any:
    if depth > MAX_DEPTH + 1:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    check_counts(data)

    def extension(code: int, payload: memoryview) -> Any:
        return _extension(code, payload, depth + 1)

    return msgspec.msgpack.decode(data, ext_hook=extension)


def _extension(code: int, payload: memoryview, depth: int) -> Any:
    if code == EXT_TUPLE:
        items = _decode(payload, depth)
        if not isinstance(items, list):
            raise ValueError("a tuple that is no list of items")
        return tuple(items)
    if code == EXT_DATETIME:
        return datetime.fromisoformat(bytes(payload[1:]).decode()).replace(fold=payload[0])
    if code == EXT_BIG_INT:
        if len(payload) > MAX_BIG_INT_BYTES:
            raise ValueError("an int beyond the size limit")
        return int.from_bytes(payload, "big", signed=True)
    if code in (EXT_NDARRAY, EXT_TENSOR):
        return _array(code, _decode(payload, depth))
    raise ValueError(f"unknown extension type {code}")


def _array(code: int, parts: Any) -> Any:
    if not isinstance(parts, list) or len(parts) != 3:
        raise ValueError("an array that is not [dtype, shape, bytes]")
    name, shape, raw = parts
    if not isinstance(name, str) or not isinstance(raw, bytes) or not _is_shape(shape):
        raise ValueError("an array that is not [dtype, shape, bytes]")
    if code == EXT_TENSOR:
        dtype = DTYPES[name]
        _expect_bytes(shape, dtype.itemsize, raw)
        if not raw:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(tuple(shape))
    numpy_dtype = np.dtype(name) if len(name) <= 4 else None
    if numpy_dtype is None or numpy_dtype.kind not in NUMPY_KINDS:
        raise ValueError(f"an array of dtype {name[:20]!r}")
    _expect_bytes(shape, numpy_dtype.itemsize, raw)
    return np.frombuffer(bytearray(raw), dtype=numpy_dtype).reshape(tuple(shape))


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(type(n) is int for n in shape) and is_tensor_shape(shape)


def is_tensor_shape(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape can exist: torch multiplies the dimensions of an empty one too."""
    return len(shape) <= 64 and all(n >= 0 for n in shape) and math.prod(max(n, 1) for n in shape) <= MAX_ELEMENTS


def _expect_bytes(shape: Sequence[int], itemsize: int, raw: bytes) -> None:
    if math.prod(shape) * itemsize != len(raw):
        raise ValueError(f"shape {list(shape)} does not fit {len(raw)} bytes")
