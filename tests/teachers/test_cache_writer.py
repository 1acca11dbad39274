"""Writing a cache: killed, out of disk, begun again, damaged, mistaken for another."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spanwise.teachers.cache_build import CacheProgress, build_cache
from spanwise.teachers.cache_frame import CacheError, TopK
from spanwise.teachers.cache_store import CacheReader, Manifest
from spanwise.teachers.cache_writer import CacheDiskError, CacheWriter
from spanwise.teachers.documents import DocumentScores, document_key
from tests.teachers.tiny import batches, identity, random_rows, tiny_teacher

# Adds documents for ever and says after each that it is in.
ENDLESS = """
import sys
import numpy as np
from spanwise.teachers.cache_store import CacheIdentity
from spanwise.teachers.cache_writer import CacheWriter
from spanwise.teachers.documents import DocumentScores
writer = CacheWriter(sys.argv[1], CacheIdentity("t", "v", 300, fields=()), shard_bytes=20_000)
number = len(writer)
while True:
    ids = np.arange(number, number + 50)
    p = np.ones(49)
    scores = DocumentScores(np.ones(49, dtype=np.int64), ids[1:], np.log(p * 0.5), np.log(p * 0.5), np.log(p * 0.5))
    writer.add(ids, scores)
    print(number, flush=True)
    number += 1
"""
ENDLESS_IDENTITY = identity(k=TopK(), fields=())


def plain_scores(length: int, seed: int = 0) -> DocumentScores:
    rng = np.random.default_rng(seed)
    p = rng.uniform(0.2, 0.4, (length - 1, 2))
    return DocumentScores(
        counts=np.full(length - 1, 2),
        ids=rng.integers(0, 300, 2 * (length - 1)),
        logp=np.log(np.sort(p, axis=1)[:, ::-1]).reshape(-1),
        log_tail=np.log1p(-p.sum(1)),
        observed_logp=np.log(p[:, 0]),
        entropy=p[:, 0],
    )


def test_killed_in_the_middle_it_keeps_every_document_and_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDLESS, str(tmp_path / "c")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(150):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
    last = int(rest[-1]) if rest else last
    with pytest.raises(CacheError, match="unfinished"):
        CacheReader(tmp_path / "c")
    open_shard = next((tmp_path / "c").glob("*.open"), None)
    if open_shard is not None:  # what a torn write of the next document would leave
        with open_shard.open("ab") as file:
            file.write(b"SWd1 and then nothing")
    with CacheWriter(tmp_path / "c", ENDLESS_IDENTITY, shard_bytes=20_000) as writer:
        assert len(writer) >= last + 1
        for number in range(last + 1):
            assert writer.read(document_key(np.arange(number, number + 50))) is not None
        writer.add(np.arange(5), replace(plain_scores(5), entropy=None))
        summary = writer.finish()
    reader = CacheReader(tmp_path / "c")
    reader.verify()
    assert document_key(np.arange(5)) in reader
    assert summary["documents"] == len(writer)
    assert summary["mean_tail_mass"] == pytest.approx(0.5, abs=0.01)
    reader.close()


@pytest.mark.parametrize("renamed", [False, True])
def test_a_shard_that_no_manifest_names_is_taken_over(tmp_path: Path, renamed: bool) -> None:
    with CacheWriter(tmp_path, identity()) as writer:
        manifest = writer.manifest
        for seed in range(3):
            writer.add(np.arange(seed, seed + 9), plain_scores(9, seed))
    manifest.write(tmp_path)  # as if the process had died before the manifest was replaced
    shard = tmp_path / "shard-00000.scores"
    if not renamed:
        shard.rename(tmp_path / "shard-00000.scores.open")
    with CacheWriter(tmp_path, identity()) as writer:
        assert len(writer) == 3
        assert writer.finish()["documents"] == 3


@contextlib.contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file may grow beyond ``size``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill(writer: CacheWriter, count: int) -> None:
    with writer:
        for seed in range(count):
            writer.add(np.arange(seed, seed + 40), plain_scores(40, seed))


def test_a_full_disk_is_said_and_the_next_run_goes_on(tmp_path: Path) -> None:
    first = CacheWriter(tmp_path, identity())
    with disk_of(8_000), pytest.raises(CacheDiskError, match="could not grow") as caught:
        fill(first, 1000)
    assert isinstance(caught.value, OSError)
    added = len(first)
    assert 0 < added < 1000
    with CacheWriter(tmp_path, identity()) as writer:
        assert len(writer) == added
        writer.add(np.arange(2000, 2040), plain_scores(40))
        assert writer.finish()["documents"] == added + 1
    reader = CacheReader(tmp_path)
    assert reader.read(document_key(np.arange(added - 1, added + 39))) is not None
    reader.close()


def test_a_disk_that_is_full_at_the_first_document_leaves_no_shard(tmp_path: Path) -> None:
    writer = CacheWriter(tmp_path, identity())
    with disk_of(10), pytest.raises(CacheDiskError):
        fill(writer, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "manifest.json"]


def test_two_writers_are_refused_and_the_lock_ends_with_the_first(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, identity()), pytest.raises(CacheError, match="another process is writing"):
        CacheWriter(tmp_path, identity())
    CacheWriter(tmp_path, identity()).close()


@pytest.mark.parametrize(
    "change",
    [{"teacher": "other"}, {"tokenizer": "other"}, {"temperature": 2.0}, {"k": TopK(1, 2, 0.5)}, {"fields": ()}],
)
def test_going_on_with_another_identity_is_refused(tmp_path: Path, change: dict) -> None:
    CacheWriter(tmp_path, identity()).close()
    with pytest.raises(CacheError, match=next(iter(change))):
        CacheWriter(tmp_path, identity(**change))


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("words")
    for wrong in (tmp_path / "file", tmp_path / "file" / "cache", Path("/proc/nowhere")):
        with pytest.raises(CacheError, match=r"cannot be written .*Fix: name another folder in cache\.folder"):
            CacheWriter(wrong, identity())


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("words")
    with pytest.raises(CacheError, match=r"holds thesis\.tex"):
        CacheWriter(tmp_path, identity())


def test_building_twice_scores_again_only_batches_that_hold_something_new(tmp_path: Path) -> None:
    asked: list[int] = []

    class Counting:
        name, vocab_size, forms = "counting", 300, frozenset({"topk"})

        def score(self, request):
            asked.append(len(request.input_ids))
            return tiny_teacher().score(request)

        def close(self):
            pass

    rows = random_rows(10)
    build_cache(Counting(), batches(rows[:6]), tmp_path, identity=identity())
    first = sum(asked)
    seen: list[CacheProgress] = []
    summary = build_cache(
        Counting(), batches(rows), tmp_path, identity=identity(), total=10, report=seen.append, shard_bytes=500
    )
    assert first == 6
    # Batches of four: the first is known; the second holds new rows and is scored whole, padded as it always was.
    assert asked == [4, 2, 4, 2]
    assert summary["documents"] == 10
    assert summary["tokens"] == sum(map(len, rows))
    assert seen[-1].done == 10
    assert seen[-1].seconds_left == 0
    assert "bytes per token" in str(seen[-1])
    header = json.loads((tmp_path / "manifest.json").read_text())
    assert header["summary"] == summary
    assert len(header["shards"]) > 1
    asked.clear()
    assert build_cache(Counting(), batches(rows), tmp_path, identity=identity()) == summary
    assert asked == []


def test_the_header_says_how_many_tokens_are_kept_and_how_much_mass_is_not(tmp_path: Path) -> None:
    first = DocumentScores(
        counts=np.array([1, 3]),
        ids=np.array([7, 1, 2, 3]),
        logp=np.log([0.5, 0.5, 0.25, 0.125]),
        log_tail=np.log([0.5, 0.125]),
        observed_logp=np.log([0.5, 0.25]),
    )
    second = replace(first, counts=np.array([4, 4]), ids=np.arange(8), logp=np.log(np.full(8, 0.125)))
    rule = identity(k=TopK(1, 4, 1.0), fields=())
    with CacheWriter(tmp_path, rule, shard_bytes=1) as writer:  # a shard each
        writer.add(np.arange(3), first)
        writer.add(np.arange(1, 4), replace(second, log_tail=np.log([0.75, 0.5])))
        writer.finish()
    header = json.loads((tmp_path / "manifest.json").read_text())
    assert [shard["largest_k"] for shard in header["shards"]] == [3, 4]
    assert header["identity"]["k"] == {"floor": 1, "cap": 4, "mass": 1.0}
    held = header["summary"]
    assert (held["mean_k"], held["largest_k"]) == (3.0, 4)
    assert held["mean_tail_mass"] == pytest.approx((0.5 + 0.125 + 0.75 + 0.5) / 4, rel=1e-3)
    assert held["largest_tail_mass"] == pytest.approx(0.75, rel=1e-3)


def test_word_starts_and_fields_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="word_start was left out"):
        build_cache(tiny_teacher(), [], tmp_path, identity=identity(fields=("entropy", "next_word_mass")))


def test_a_document_without_a_field_that_is_kept_is_refused(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, identity()) as writer, pytest.raises(CacheError, match="lack entropy"):
        writer.add(np.arange(9), replace(plain_scores(9), entropy=None))


def test_an_empty_text_makes_an_empty_cache(tmp_path: Path) -> None:
    summary = build_cache(tiny_teacher(), [], tmp_path, identity=identity())
    assert summary["documents"] == 0
    reader = CacheReader(tmp_path)
    assert reader.read(b"0" * 16) is None
    assert Manifest.read(tmp_path).complete


def test_resuming_over_a_damaged_shard_names_it(tmp_path: Path) -> None:
    build_cache(tiny_teacher(), batches(random_rows(8)), tmp_path, identity=identity())
    os.truncate(tmp_path / "shard-00000.scores", 100)
    with pytest.raises(CacheError, match=r"shard-00000\.scores' is damaged"):
        CacheWriter(tmp_path, identity())
