"""SharedLogitsBuffer: one process writes teacher logits, others read them in place.

The buffer [B_r, T, V] is allocated once and outlives training steps; each step's logits are copied into it, and a
reader maps the same memory: CUDA IPC on a GPU, shared memory on the CPU. A handle is a plain dict of numbers and bytes
(picklable), and stays the same over steps. Attaching costs no copy; readers are told apart from the dead by the
producer's process id and start time, and from the stale by a generation number kept beside the logits. A wrong shape or
dtype, a dead producer and a closed buffer are named errors at once.

Shapes: B_r rows of the producer's rank, T teacher length, V teacher vocabulary.
"""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

HANDLE_VERSION = 1


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
        self.device = torch.device(device)
        self.logits = torch.zeros(tuple(shape), dtype=dtype, device=self.device)
        # The generation lives in its own shared page: a closed buffer is marked there for everyone who holds a handle.
        self._generation = torch.tensor([int(secrets.randbits(62)) + 1], dtype=torch.int64)
        self._generation_handle = _share_cpu(self._generation)
        self._handle = {
            "version": HANDLE_VERSION,
            "kind": self.device.type,
            "storage": _share_cuda(self.logits) if self.device.type == "cuda" else _share_cpu(self.logits),
            "shape": tuple(self.logits.shape),
            "dtype": str(dtype).removeprefix("torch."),
            "generation": int(self._generation),
            "generation_storage": self._generation_handle,
            "process": process_identity(os.getpid()),
        }

    def handle(self) -> dict[str, Any]:
        """What a reader needs; the same at every step."""
        if int(self._generation) == 0:
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
        fits = all(given <= room for given, room in zip(logits.shape, self.logits.shape, strict=True))
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
        self._generation.zero_()


_ATTACHED: OrderedDict[tuple[Any, ...], tuple[Tensor, Tensor]] = OrderedDict()
_MOST_ATTACHED = 8


def attach_logits(handle: Mapping[str, Any]) -> Tensor:
    """The producer's buffer, mapped into this process: no copy, dtype preserved.

    Raises:
        ValueError: it is not such a handle.
        DeadProducerError: the process that made it is gone.
        StaleHandleError: the buffer was closed.
    """
    missing = {"version", "kind", "storage", "shape", "dtype", "generation", "process"} - set(handle)
    if missing or handle["version"] != HANDLE_VERSION:
        raise ValueError(
            f"a logits handle lacks {sorted(missing)} or has version {handle.get('version')}; expected one made by "
            "SharedLogitsBuffer.handle() of this version of Spanwise. It was probably made by something else. Fix: "
            "produce the logits with spanwise.teachers.process.SharedLogitsBuffer."
        )
    key = (handle["process"], handle["generation"])
    _check_alive(handle)
    if key not in _ATTACHED:
        try:
            generation = _attach_cpu(handle["generation_storage"], (1,), torch.int64)
            dtype = getattr(torch, handle["dtype"])
            open_storage = _attach_cuda if handle["kind"] == "cuda" else _attach_cpu
            _ATTACHED[key] = (open_storage(handle["storage"], tuple(handle["shape"]), dtype), generation)
        except (RuntimeError, OSError) as error:
            _check_alive(handle)
            raise StaleHandleError(
                f"the teacher's logits could not be mapped ({str(error).splitlines()[0]}); expected a live buffer. "
                "The handle probably outlived its SharedLogitsBuffer. Fix: ask the producer for fresh handles."
            ) from error
        while len(_ATTACHED) > _MOST_ATTACHED:
            _ATTACHED.popitem(last=False)
    logits, generation = _ATTACHED[key]
    if int(generation) != handle["generation"]:
        del _ATTACHED[key]
        raise StaleHandleError(
            "the handle names teacher logits whose buffer was closed; expected a handle of the buffer in use. The "
            "producer was probably restarted or resized. Fix: ask it for fresh handles "
            "(SharedLogitsBuffer.sample_handles)."
        )
    return logits


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
