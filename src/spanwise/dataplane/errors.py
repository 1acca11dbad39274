"""One tree of errors for every client and transport: catch DataPlaneError, or the one thing you can heal.

Each also inherits the built-in error it is a case of, so that ``except TimeoutError`` or ``except LookupError`` works.
The names say what happened and carry no "Error" at their end, as the client's interface prescribes.
"""

# ruff: noqa: N818

from __future__ import annotations

from collections.abc import Iterable, Sequence


class DataPlaneError(Exception):
    """The root of everything that a data-plane client raises on purpose."""


class PartitionNotFound(DataPlaneError, LookupError):
    """No partition of this name was registered."""


class TaskNotFound(DataPlaneError, LookupError):
    """The partition was registered without this consumer task."""


class SampleNotFound(DataPlaneError, LookupError):
    """An id that the partition does not hold (never put, or cleared)."""


class FieldNotReady(DataPlaneError, LookupError):
    """A field that nobody has produced yet for some samples. ``missing`` maps each id to its absent fields."""

    def __init__(self, message: str, missing: dict[str, list[str]] | None = None) -> None:
        super().__init__(message)
        self.missing = missing or {}


class SchemaMismatch(DataPlaneError, ValueError):
    """A column that contradicts what the partition knows about its field, or whose rows do not match the ids."""


class SampleConflict(DataPlaneError, ValueError):
    """One id twice in a put, or a field that exists already under ``on_conflict="error"``."""


class PartitionConflict(DataPlaneError, ValueError):
    """A partition or plane that exists already with other settings."""


class PartitionExhausted(DataPlaneError):
    """A task has consumed every sample of its partition: nothing more will come."""


class CapacityExceeded(DataPlaneError):
    """The put would pass a limit of bytes or rows and may not, or cannot ever, wait. Nothing was changed."""


class PutTimeout(DataPlaneError, TimeoutError):
    """A put did not find room, or its transport did not answer, before the deadline. Nothing was changed."""


class GetTimeout(DataPlaneError, TimeoutError):
    """The transport did not answer a read before the deadline."""


class ClaimTimeout(DataPlaneError, TimeoutError):
    """Too few samples became ready before the deadline."""


class LeaseExpired(DataPlaneError):
    """The lease behind this claim has run out or was given back; others may hold its samples now."""


class NotSupported(DataPlaneError):
    """This transport does not offer the operation."""


class TransportDown(DataPlaneError, ConnectionError):
    """The other side is gone: storage killed, plane closed by its owner, cluster unreachable."""


class ClientClosed(DataPlaneError, ValueError):
    """A client was used after its close()."""


class CorruptFrame(DataPlaneError, ValueError):
    """Bytes that are no valid frame. ``offset`` and ``section`` say where."""

    def __init__(self, problem: str, *, offset: int = 0, section: str = "prefix") -> None:
        super().__init__(
            f"corrupt frame at byte {offset} ({section}): {problem}. The buffer was probably cut short, overwritten, "
            "or is no frame at all. Fix: write the samples again; a re-put replaces them."
        )
        self.offset = offset
        self.section = section


class UnsafeObject(DataPlaneError, TypeError):
    """An object that may not travel. ``field``, ``row`` and ``path`` say which."""

    def __init__(self, problem: str, *, field: str, row: int, path: str) -> None:
        super().__init__(
            f"field '{field}', row {row}, at {path}: {problem}. Objects travel as msgpack of None, bool, int, float, "
            "str, bytes, list, tuple, dict with str keys, datetime, ndarray and tensor, never as pickle. A library "
            "object or a NumPy scalar was probably left inside. Fix: convert it to one of these types before the put."
        )
        self.field = field
        self.row = row
        self.path = path


def few(names: Iterable[object], limit: int = 5) -> str:
    """The first names of a list, for a message: ``a, b, c and 97 more``."""
    every: Sequence[object] = list(names)
    shown = ", ".join(str(name) for name in every[:limit])
    return shown if len(every) <= limit else f"{shown} and {len(every) - limit} more"
