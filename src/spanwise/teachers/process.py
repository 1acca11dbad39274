"""SharedLogitsBuffer: one process writes teacher logits, others read them in place.

The buffer [B_r, T, V] is allocated once and outlives training steps; each step's logits are copied into it, and a
reader maps the same memory: CUDA IPC on a GPU, shared memory on the CPU. A handle is a plain dict of numbers and bytes
(picklable), and stays the same over steps. Attaching costs no copy; readers are told apart from the dead by the
producer's process id and start time, and from the stale by a generation number kept beside the logits, with their shape
and dtype. A wrong shape or dtype, a dead producer and a closed buffer are named errors at once.

Shapes: B_r rows of the producer's rank, T teacher length, V teacher vocabulary.
"""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

HANDLE_VERSION = 2
# What logits come in; a dtype's place here is what stands beside the buffer, so only append.
SHARED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LABEL_SIZE = 5


class DeadProducerError(RuntimeError):
    """The process that owns the logits is gone."""


class StaleHandleError(RuntimeError):
    """The handle names a buffer that was closed or replaced."""


class SharedLogitsBuffer:
    """The producer's side.

    Args:
        shape: (B_r, T, V).
        dtype: of the logits; readers see the same.
        device: a CUDA device, or the CPU.

    >>> buffer = SharedLogitsBuffer((2, 3, 4), dtype=torch.float32)
    >>> buffer.write(torch.ones(2, 3, 4))
    >>> attach_logits(buffer.handle()).sum().item()
    24.0
    >>> buffer.close()
    """

    def __init__(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
    ) -> None:
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(
                f"the shape of the logits buffer is {tuple(shape)}; expected three positive sizes (rows, length, "
                "vocabulary). One of them was probably not known yet. Fix: allocate after the first batch's sizes "
                "are known."
            )
        if dtype not in SHARED_DTYPES:
            raise ValueError(
                f"the dtype of the logits buffer is {dtype}; expected one of {[str(each) for each in SHARED_DTYPES]}. "
                "Quantised scores or ids were probably meant to be shared. Fix: cast them, or send them as a message."
            )
        self.device = torch.device(device)
        self.logits = torch.zeros(tuple(shape), dtype=dtype, device=self.device)
        # The generation lives in its own shared page: a closed buffer is marked there for everyone who holds a handle.
        # The sizes and the dtype stand beside it, since a segment of bytes would open under any that fit in it.
        self._label = torch.tensor(
            [int(secrets.randbits(62)) + 1, *shape, SHARED_DTYPES.index(dtype)], dtype=torch.int64
        )
        label = _share_cpu(self._label)
        self._handle = {
            "version": HANDLE_VERSION,
            "kind": self.device.type,
            "storage": _share_cuda(self.logits) if self.device.type == "cuda" else _share_cpu(self.logits),
            "shape": tuple(self.logits.shape),
            "dtype": str(dtype).removeprefix("torch."),
            "generation": int(self._label[0]),
            "generation_storage": label,
            "process": process_identity(os.getpid()),
        }

    def handle(self) -> dict[str, Any]:
        """What a reader needs; the same at every step."""
        if int(self._label[0]) == 0:
            raise StaleHandleError(
                "a handle was asked of a closed SharedLogitsBuffer; expected an open one. Fix: make a new buffer."
            )
        return self._handle

    def sample_handles(self, rows: int | None = None) -> list[dict[str, Any]]:
        """One entry per row, as ``teacher_full_logits_ipc`` carries them."""
        count = len(self.logits) if rows is None else rows
        handle = self.handle()
        return [{"rank_logits_ipc": handle, "sample_idx_within_rank": row} for row in range(count)]

    def write(self, logits: Float[Tensor, "B T V"]) -> None:
        """Copy a step's logits into the first rows; they may be shorter and narrower than the buffer."""
        fits = logits.ndim == 3 and all(
            given <= room for given, room in zip(logits.shape, self.logits.shape, strict=True)
        )
        if not fits or logits.dtype != self.logits.dtype:
            raise ValueError(
                f"logits {tuple(logits.shape)} {logits.dtype} were written to a buffer of {tuple(self.logits.shape)} "
                f"{self.logits.dtype}; expected sizes within it and its dtype. The batch probably grew after the "
                "buffer was made. Fix: allocate the buffer for the largest batch, and cast the logits to its dtype."
            )
        rows, length, width = logits.shape
        self.logits[:rows, :length, :width].copy_(logits)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Mark every handle stale. The memory is freed when the last reader lets go."""
        self._label[0] = 0


_ATTACHED: OrderedDict[tuple[Any, ...], tuple[Tensor, Tensor]] = OrderedDict()
_MOST_ATTACHED = 8


def attach_logits(handle: Mapping[str, Any]) -> Tensor:
    """The producer's buffer, mapped into this process: no copy, dtype preserved.

    Raises:
        ValueError: it is not such a handle, or states another shape or dtype than the buffer's.
        DeadProducerError: the process that made it is gone.
        StaleHandleError: the buffer was closed.
    """
    shape, dtype = _read_handle(handle)
    key = (tuple(handle["process"]), handle["generation"])
    try:
        _check_alive(handle)
    except DeadProducerError:
        _ATTACHED.pop(key, None)  # its memory is freed once nobody maps it
        raise
    if key not in _ATTACHED:
        label = _opened(handle, _attach_cpu, handle["generation_storage"], (_LABEL_SIZE,), torch.int64)
        _check_label(handle, label, shape, dtype)
        open_storage = _attach_cuda if handle["kind"] == "cuda" else _attach_cpu
        _ATTACHED[key] = (_opened(handle, open_storage, handle["storage"], shape, dtype), label)
        while len(_ATTACHED) > _MOST_ATTACHED:
            _ATTACHED.popitem(last=False)
    logits, label = _ATTACHED[key]
    try:
        _check_label(handle, label, shape, dtype)
    except StaleHandleError:
        del _ATTACHED[key]
        raise
    return logits


def _opened(handle: Mapping[str, Any], open_storage: Callable[..., Tensor], *what: Any) -> Tensor:
    """The mapped memory; whatever keeps it from being mapped means a dead producer or a stale handle."""
    try:
        return open_storage(*what)
    except (RuntimeError, OSError, TypeError) as error:
        _check_alive(handle)
        raise StaleHandleError(
            f"the teacher's logits could not be mapped ({str(error).splitlines()[0]}); expected a live buffer. "
            "The handle probably outlived its SharedLogitsBuffer. Fix: ask the producer for fresh handles."
        ) from error


def _read_handle(handle: Mapping[str, Any]) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and dtype that a handle states; anything else than a handle is refused."""
    fields = ("version", "kind", "storage", "shape", "dtype", "generation", "generation_storage", "process")
    missing = sorted(set(fields) - set(handle))
    wrong = [] if missing else [name for name, fits in _handle_fields(handle).items() if not fits]
    if missing or wrong or handle["version"] != HANDLE_VERSION:
        found = (
            f"lacks {missing}"
            if missing
            else "states " + ", ".join(f"{name} = {handle[name]!r}" for name in wrong)
            if wrong
            else f"has version {handle['version']}"
        )
        raise ValueError(
            f"a logits handle {found}; expected one made by SharedLogitsBuffer.handle() of this version of Spanwise "
            f"(version {HANDLE_VERSION}). It was probably made by something else, or changed on the way. Fix: produce "
            "the logits with spanwise.teachers.process.SharedLogitsBuffer, and pass its handles on as they are."
        )
    return tuple(handle["shape"]), getattr(torch, handle["dtype"])


def _handle_fields(handle: Mapping[str, Any]) -> dict[str, bool]:
    """Whether each field of a handle is of its kind."""

    def numbers(value: Any, count: int) -> bool:
        return isinstance(value, (tuple, list)) and len(value) == count and all(type(each) is int for each in value)

    return {
        "kind": handle["kind"] in ("cpu", "cuda"),
        "storage": isinstance(handle["storage"], (tuple, list)),
        "shape": numbers(handle["shape"], 3) and min(handle["shape"]) > 0,
        "dtype": handle["dtype"] in {str(dtype).removeprefix("torch.") for dtype in SHARED_DTYPES},
        "generation": type(handle["generation"]) is int,
        "generation_storage": isinstance(handle["generation_storage"], (tuple, list)),
        "process": numbers(handle["process"], 2),
    }


def _check_label(handle: Mapping[str, Any], label: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Compare a handle with what the producer wrote beside its logits."""
    generation, *sizes, number = label.tolist()
    if generation != handle["generation"]:
        raise StaleHandleError(
            "the handle names teacher logits whose buffer was closed; expected a handle of the buffer in use. The "
            "producer was probably restarted or resized. Fix: ask it for fresh handles "
            "(SharedLogitsBuffer.sample_handles)."
        )
    if tuple(sizes) != shape or SHARED_DTYPES[number] != dtype:
        raise ValueError(
            f"the handle states logits {shape} {dtype} and the producer's buffer is {tuple(sizes)} "
            f"{SHARED_DTYPES[number]}; expected the same. The handle was probably edited, or put together from two. "
            "Fix: pass handles on as SharedLogitsBuffer.handle() made them, and slice the logits after attaching."
        )


def _check_alive(handle: Mapping[str, Any]) -> None:
    pid = handle["process"][0]
    if process_identity(pid) != tuple(handle["process"]):
        raise DeadProducerError(
            f"the process {pid} that holds the teacher's logits is gone; expected it to live as long as its readers. "
            "It probably crashed or was stopped. Fix: look at its log, restart it, and ask it for fresh handles."
        )


def process_identity(pid: int) -> tuple[int, int]:
    """A process id and its start time in clock ticks (0 where the system does not tell); (pid, -1) for a dead one."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            return (pid, -1)
        return (pid, -1 if fields[0] in "ZX" else int(fields[19]))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return (pid, -1)
    except PermissionError:
        return (pid, 0)
    return (pid, 0)


def _share_cpu(tensor: Tensor) -> tuple[Any, ...]:
    """Move a CPU tensor into a named shared segment and return its name."""
    storage: Any = tensor.untyped_storage()  # its sharing methods are private and not annotated
    return tuple(storage._share_filename_cpu_())


def _attach_cpu(name: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    kind: Any = torch.UntypedStorage
    storage = kind._new_shared_filename_cpu(*name)
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)


def _share_cuda(tensor: Tensor) -> tuple[Any, ...]:
    storage: Any = tensor.untyped_storage()
    return (*storage._share_cuda_(), tensor.storage_offset())


def _attach_cuda(name: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    torch.cuda.init()
    kind: Any = torch.UntypedStorage
    *parts, offset = name
    storage = kind._new_shared_cuda(*parts)
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)
