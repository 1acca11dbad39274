"""One ragged batch as bytes and back: pickle, safetensors, Arrow and tensordict beside our frames.

Packed columns (values and offsets) become one buffer, and the buffer tensors of the same values, which is checked.
These libraries are dependencies of ours, so all sides run here, in turn, on one thread. Frames and Arrow are read as
views; the others copy.
"""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.peer_comparisons.row import Row, ratio, releases

Tensors = dict[str, Any]
PEERS = {
    "pickle 5": [],
    "safetensors": ["safetensors"],
    "Arrow IPC": ["pyarrow"],
    "tensordict, consolidated and pickled": ["tensordict"],
}


def compare(quick: bool) -> list[Row]:
    """Seconds to write and to read, and bytes, for 512 rows of up to 4,096 tokens."""
    import platform
    from importlib.metadata import version

    import torch

    from benchmarks.dataplane import batch, payload_bytes
    from spanwise.dataplane import to_nested_by_length

    torch.set_num_threads(1)
    columns, lengths = batch(512, 4_096)
    packed = {key: to_nested_by_length(column, lengths) for key, column in columns.items()}
    ways = formats(packed)
    written = {name: write() for name, (write, _) in ways.items()}
    for name, (_, read) in ways.items():
        check(packed, read(written[name]), name)
    sizes = {name: memoryview(data).nbytes for name, data in written.items()}
    writes = milliseconds({name: write for name, (write, _) in ways.items()}, 5 if quick else 25)
    reads = milliseconds(
        {name: (lambda r=read, d=written[name]: r(d)) for name, (_, read) in ways.items()}, 5 if quick else 25
    )
    shape = f"512 rows of up to 4,096 tokens, fill 0.22, 4 columns, {payload_bytes(packed) / 1e6:.1f} MB of values"
    rows: list[Row] = []
    for name, packages in PEERS.items():
        found = {package: version(package) for package in packages} or {"Python": platform.python_version()}
        context = f"{shape}; {releases(found)}"
        rows.append(ratio(f"writing, ours / {name}", writes["frame"], writes[name], "ms of CPU", context))
        rows.append(ratio(f"reading, ours / {name}", reads["frame"], reads[name], "ms of CPU", context))
        rows.append(ratio(f"bytes, ours / {name}", sizes["frame"] / 1e6, sizes[name] / 1e6, "MB", context))
    return rows


def formats(packed: Tensors) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Tensors]]]:
    """Format → (write one buffer, read it as ``key.values`` and ``key.offsets``)."""
    import pyarrow as pa
    import safetensors.torch
    import torch
    from tensordict import TensorDict

    from spanwise.dataplane import decode_frame, encode_frame

    flat = {f"{key}.values": column.values() for key, column in packed.items()}
    flat |= {f"{key}.offsets": column.offsets() for key, column in packed.items()}
    kinds = {key: (column.dtype, column.shape) for key, column in flat.items()}

    def read_frame(data: Any) -> Tensors:
        frame = decode_frame(data)
        found = {f"{key}.values": frame.columns[key].values for key in packed}
        return found | {f"{key}.offsets": frame.offsets[frame.columns[key].group] for key in packed}

    def write_pickle() -> bytes:
        return pickle.dumps({key: column.view(torch.uint8).numpy() for key, column in flat.items()}, 5)

    def read_pickle(data: bytes) -> Tensors:
        arrays = pickle.loads(data)
        return {key: torch.from_numpy(array).view(kinds[key][0]) for key, array in arrays.items()}

    def write_arrow() -> Any:
        table = pa.record_batch({key: arrow_list(column) for key, column in packed.items()})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_batch(table)
        return sink.getvalue()

    def arrow_list(column: Any) -> Any:
        values = column.values().contiguous().view(torch.uint8).reshape(-1).numpy()
        width = values.nbytes // max(column.values().shape[0], 1)
        items = pa.Array.from_buffers(pa.binary(width), len(values) // width, [None, pa.py_buffer(values)])
        return pa.LargeListArray.from_arrays(pa.array(column.offsets().numpy()), items)

    def read_arrow(data: Any) -> Tensors:
        table = next(iter(pa.ipc.open_stream(data)))
        found = {}
        for key in packed:
            column = table[key]
            _, offsets, _, values = column.buffers()
            kind, shape = kinds[f"{key}.values"]
            found[f"{key}.values"] = torch.frombuffer(memoryview(values), dtype=kind).view(shape)
            found[f"{key}.offsets"] = torch.frombuffer(memoryview(offsets), dtype=torch.int64)[: len(column) + 1]
        return found

    def read_tensordict(data: bytes) -> Tensors:
        return dict(pickle.loads(data).items())

    return {
        "frame": (lambda: encode_frame(packed), read_frame),
        "pickle 5": (write_pickle, read_pickle),
        "safetensors": (lambda: safetensors.torch.save(flat), safetensors.torch.load),
        "Arrow IPC": (write_arrow, read_arrow),
        "tensordict, consolidated and pickled": (
            lambda: pickle.dumps(TensorDict(flat, batch_size=[]).consolidate(), 5),
            read_tensordict,
        ),
    }


def check(packed: Tensors, read: Tensors, name: str) -> None:
    """A format that returns other values than it was given is not compared."""
    import torch

    for key, column in packed.items():
        for part in ("values", "offsets"):
            if not torch.equal(getattr(column, part)(), read[f"{key}.{part}"]):
                raise AssertionError(f"{name} returned other {key}.{part} than it was given")


def milliseconds(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median CPU time of each side, in turn, after one call that is not timed."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        gc.collect()
        for name, run in sides.items():
            run()  # every side starts with its own code and data in the caches
            began = time.process_time_ns()
            result = run()
            if turn:
                taken[name].append((time.process_time_ns() - began) / 1e6)
            del result
    return {name: median(times) for name, times in taken.items()}
