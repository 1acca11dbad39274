"""The data plane against its reference, its peers and one memcpy of the payload.

Shapes (N, S) = (512, 4096), (4096, 512), (64, 16384) with log-normal lengths at fill 0.22; per token an int64 id, an
fp32 log-probability, a bool mask and 8 bf16 features (29 bytes). CPU time on one thread, both sides interleaved in one
run, medians; through TransferQueue wall time, since other processes work too. The figure that counts is the multiple
of one memcpy of the payload (warm buffers).
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import io
import logging
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
logging.getLogger("torch.fx").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")

from benchmarks.record import record
from spanwise.dataplane import Field, decode_frame, encode_frame, materialize, open_client, to_nested_by_length
from tests.reference import dataplane_codec as reference

torch.set_num_threads(1)
SHAPES = [(512, 4096), (4096, 512), (64, 16384)]
FILL = 0.22
Columns = dict[str, torch.Tensor]


def batch(rows: int, width: int) -> tuple[Columns, torch.Tensor]:
    """Padded columns and their lengths; the longest row is full."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.exp(0.8 * torch.randn(rows, generator=generator))
    low, high = 0.0, 1e6
    for _ in range(60):  # the scale at which clamping keeps the fill
        scale = (low + high) / 2
        low, high = (scale, high) if (raw * scale).clamp(1, width).mean() < FILL * width else (low, scale)
    lengths = (raw * low).clamp(1, width).long()
    lengths[0] = width
    columns = {
        "ids": torch.randint(0, 150_000, (rows, width), generator=generator),
        "logp": torch.randn(rows, width, generator=generator),
        "mask": torch.rand(rows, width, generator=generator) > 0.5,
        "features": torch.randn(rows, width, 8, generator=generator).bfloat16(),
    }
    return columns, lengths


def medians(
    sides: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Milliseconds per side: interleaved, so that a slow moment of the machine hits all alike."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    gc.disable()
    for _ in range(repeats):
        for name, run in sides.items():
            run()  # untimed: every side starts with its own code and data in the caches
            start = clock()
            result = run()
            taken[name].append(1e3 * (clock() - start))
            del result
        gc.collect()
    gc.enable()
    return {name: sorted(times)[len(times) // 2] for name, times in taken.items()}


def payload_bytes(packed: Columns) -> int:
    return sum(column.values().nbytes for column in packed.values())


def memcpy(size: int) -> Callable[[], Any]:
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    return lambda: target.copy_(source)


def queue_encoded(packed: Columns) -> list[Any]:
    """What TransferQueue sends for a jagged batch: its own msgpack encoder."""
    from tensordict import TensorDict
    from transfer_queue.utils.serial_utils import MsgpackEncoder

    rows = next(iter(packed.values())).shape[0]
    frames: list[Any] = list(MsgpackEncoder().encode({"data": TensorDict(packed, batch_size=[rows])}))
    return [bytes(b"".join(bytes(frame) for frame in frames))]  # one buffer, as ours


def row(figure: str, value: float, unit: str, target: str, reached: bool | None, context: str) -> dict[str, Any]:
    return {
        "figure": figure,
        "value": round(value, 4),
        "unit": unit,
        "target": target,
        "reached": "-" if reached is None else ("yes" if reached else "no"),
        "context": context,
    }


def codec_rows(repeats: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    targets = {"wire": (6.0, 20.0, 3.5), "fresh": (1.0, 1.5, 1.0), "out": (2.0, 4.0, 1.2)}
    for place, shape in enumerate(SHAPES):
        columns, lengths = batch(*shape)
        name = f"N,S = {shape}"

        def pack_ours(columns: Columns = columns, lengths: torch.Tensor = lengths) -> Columns:
            return {key: to_nested_by_length(column, lengths) for key, column in columns.items()}

        def pack_reference(columns: Columns = columns, lengths: torch.Tensor = lengths) -> Columns:
            return {key: reference.to_nested(column, lengths) for key, column in columns.items()}

        packed = pack_ours()
        size = payload_bytes(packed)
        buffer = encode_frame(columns, {"tok": lengths}, group_of=dict.fromkeys(columns, "tok"))
        times = medians(
            {
                "memcpy": memcpy(size),
                "pack": pack_ours,
                "pack reference": pack_reference,
                "wire": lambda c=columns, n=lengths: encode_frame(c, {"tok": n}, group_of=dict.fromkeys(c, "tok")),
                "wire reference": lambda: queue_encoded(pack_reference()),
                "decode": lambda b=buffer: decode_frame(b),
            },
            repeats,
        )
        copy = times["memcpy"]
        ratio = times["pack reference"] / times["pack"]
        rows.append(row("pack vs per-row slices", ratio, "x", ">= 2, aim 4", ratio >= 2, name))
        rows.append(row("pack", times["pack"] / copy, "memcpy", "-", None, f"{name}, {size / 1e6:.1f} MB"))
        ratio, goal = times["wire reference"] / times["wire"], targets["wire"][place]
        rows.append(
            row("pack + serialise vs reference + queue's encoder", ratio, "x", f">= {goal}", ratio >= goal, name)
        )
        times_copy = times["wire"] / copy
        goal_text, reached = ("aim <= 3", times_copy <= 3) if place == 0 else ("-", None)
        rows.append(row("pack + serialise", times_copy, "memcpy", goal_text, reached, name))
        rows.append(row("decode to views", times["decode"], "ms", "<= 0.3", times["decode"] <= 0.3, name))
        overhead = len(buffer) / size
        rows.append(row("wire bytes / payload bytes", overhead, "x", "<= 1.001", overhead <= 1.001, name))
        rows += materialize_rows(packed, name, targets["fresh"][place], targets["out"][place], repeats)
    return rows


def materialize_rows(
    packed: Columns, name: str, fresh_goal: float, out_goal: float, repeats: int
) -> list[dict[str, Any]]:
    width = max(column._max_seqlen for column in packed.values())  # type: ignore[attr-defined]

    def like_torch(pad_to: int = 0) -> Columns:
        return {key: reference.materialize_like_torch(column, 0.0, pad_to) for key, column in packed.items()}

    out = {key: column.clone() for key, column in materialize(packed).items()}
    wide = {key: column.clone() for key, column in materialize(packed, pad_to_seqlen=2 * width).items()}
    times = medians(
        {
            "reference": like_torch,
            "fresh": lambda: materialize(packed),
            "out": lambda: materialize(packed, out=out),
            "reference 2x": lambda: like_torch(2 * width),
            "fresh 2x": lambda: materialize(packed, pad_to_seqlen=2 * width),
            "out 2x": lambda: materialize(packed, pad_to_seqlen=2 * width, out=wide),
        },
        repeats,
    )
    goals = [
        ("materialize, fresh memory", times["reference"] / times["fresh"], fresh_goal),
        ("materialize, out=", times["reference"] / times["out"], out_goal),
        ("pad_to_seqlen = 2 max, fresh", times["reference 2x"] / times["fresh 2x"], 1.3),
        ("pad_to_seqlen = 2 max, out=", times["reference 2x"] / times["out 2x"], 3.0),
    ]
    return [
        row(f"{figure} vs reference", ratio, "x", f">= {goal}", ratio >= goal, name) for figure, ratio, goal in goals
    ]


def peers(packed: Columns) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Serialise and read back the same values and offsets: name → (write, read)."""
    import pyarrow as pa
    import safetensors.torch
    from tensordict import TensorDict

    flat = {f"{key}.values": column.values() for key, column in packed.items()}
    flat |= {f"{key}.offsets": column.offsets() for key, column in packed.items()}

    def arrow_array(key: str) -> Any:
        values = packed[key].values().contiguous().view(torch.uint8).reshape(-1).numpy()
        width = values.nbytes // max(packed[key].values().shape[0], 1)
        items = pa.Array.from_buffers(pa.binary(width), len(values) // width, [None, pa.py_buffer(values)])
        return pa.LargeListArray.from_arrays(pa.array(packed[key].offsets().numpy()), items)

    def write_arrow() -> Any:
        table = pa.record_batch({key: arrow_array(key) for key in packed})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_batch(table)
        return sink.getvalue()

    def write_consolidated() -> Any:
        return TensorDict(flat, batch_size=[]).consolidate()

    def write_queue() -> Any:
        return queue_encoded(packed)[0]

    return {
        "frame": (lambda: encode_frame(packed), decode_frame),
        "pickle 5": (lambda: pickle.dumps({k: v.view(torch.uint8).numpy() for k, v in flat.items()}, 5), pickle.loads),
        "safetensors": (lambda: safetensors.torch.save(flat), safetensors.torch.load),
        "Arrow IPC": (write_arrow, lambda data: pa.ipc.open_stream(data).read_all()),
        "tensordict consolidate": (write_consolidated, lambda data: data),
        "torch.save": (lambda: _torch_saved(flat), lambda data: torch.load(io.BytesIO(data), weights_only=True)),
        "TransferQueue's encoder": (write_queue, lambda data: data),
    }


def _torch_saved(flat: Columns) -> bytes:
    stream = io.BytesIO()
    torch.save(flat, stream)
    return stream.getvalue()


def peer_rows(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for shape in SHAPES[:2]:
        columns, lengths = batch(*shape)
        packed = {key: to_nested_by_length(column, lengths) for key, column in columns.items()}
        sides = peers(packed)
        written = {name: write() for name, (write, _) in sides.items()}
        copy = memcpy(payload_bytes(packed))
        writes = medians({"memcpy": copy, **{name: write for name, (write, _) in sides.items()}}, repeats)
        reads = medians({name: (lambda r=read, d=written[name]: r(d)) for name, (_, read) in sides.items()}, repeats)
        for name in sides:
            context = f"N,S = {shape}, packed columns into one buffer; reading {reads[name]:.2f} ms"
            rows.append(row(f"serialise with {name}", writes[name] / writes["memcpy"], "memcpy", "-", None, context))
    return rows


def queue_rows(repeats: int) -> list[dict[str, Any]]:
    """Put, get and materialize through a local cluster: our frame layout against the queue's native jagged columns."""
    import ray
    import transfer_queue as queue
    from tensordict import TensorDict

    with tempfile.TemporaryDirectory(prefix="sw", dir="/tmp") as folder:
        os.environ["HOME"] = folder
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=f"{folder}/r",
            object_store_memory=256 << 20,
        )
        client: Any = open_client("tq://auto", layout="frame")
        rows = []
        for shape in SHAPES:
            columns, lengths = batch(*shape)
            rounds = iter(range(10_000))
            fields = [
                Field("ids", torch.int64, (), ragged=True),
                Field("logp", torch.float32, (), ragged=True),
                Field("mask", torch.bool, (), ragged=True),
                Field("features", torch.bfloat16, (8,), ragged=True),
            ]

            def ours(
                columns: Columns = columns, lengths: torch.Tensor = lengths, rounds: Any = rounds, fields: Any = fields
            ) -> Any:
                partition = f"ours-{len(lengths)}-{next(rounds)}"
                ids = [f"s{i}" for i in range(len(lengths))]
                client.register_partition(partition, fields, len(ids), ["t"])
                client.put_samples(ids, partition, {k: to_nested_by_length(v, lengths) for k, v in columns.items()})
                return materialize(client.get_samples(ids, partition, list(columns)))

            def native(columns: Columns = columns, lengths: torch.Tensor = lengths, rounds: Any = rounds) -> Any:
                partition = f"native-{len(lengths)}-{next(rounds)}"
                ids = [f"s{i}" for i in range(len(lengths))]
                packed = {k: reference.to_nested(v, lengths) for k, v in columns.items()}
                queue.kv_batch_put(ids, partition, TensorDict(packed, batch_size=[len(ids)]))
                data = queue.kv_batch_get(ids, partition, list(columns))
                return {k: torch.nested.to_padded_tensor(data[k], 0) for k in columns}

            assert all(torch.equal(native()[key].sum(), column.sum()) for key, column in ours().items())
            times = medians({"ours": ours, "native": native}, repeats, time.perf_counter)
            ratio = times["native"] / times["ours"]
            context = f"N,S = {shape}; {times['ours']:.0f} against {times['native']:.0f} ms of wall time"
            rows.append(
                row("through TransferQueue, frame vs native columns", ratio, "x", ">= 3, aim 5", ratio >= 3, context)
            )
        client.close()
        ray.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--no-queue", action="store_true", help="leave out TransferQueue on Ray")
    arguments = parser.parse_args()
    repeats = 5 if arguments.quick else 15
    rows = codec_rows(repeats) + peer_rows(repeats)
    if not arguments.no_queue:
        rows += queue_rows(3 if arguments.quick else 7)
    record("dataplane", rows)


if __name__ == "__main__":
    main()
