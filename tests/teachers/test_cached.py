"""A teacher on disk: the same scores as the live one, within the known error; anything stale or damaged is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spanwise.teachers.cache_build import build_cache
from spanwise.teachers.cache_frame import CacheError, TopK
from spanwise.teachers.cached import CachedTeacher
from spanwise.teachers.fingerprint import model_fingerprint
from spanwise.teachers.teacher import ScoreRequest
from tests.teachers.tiny import WIDTH, batches, identity, padded, random_rows, tiny_model, tiny_teacher

ROWS = random_rows(24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cache")
    build_cache(tiny_teacher(), batches(ROWS), path, identity=identity(k=TopK(2, 16, 1.0)), shard_bytes=2_000)
    return path


def copy(folder: Path, tmp_path: Path) -> Path:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("top_k", [None, 5])
def test_it_says_what_the_live_teacher_says_in_any_order(folder: Path, top_k: int | None) -> None:
    request = padded([ROWS[place] for place in (20, 3, 11, 3)])
    cached = CachedTeacher(folder, tokenizer="v", teacher="t")
    scores = cached.score(replace(request, top_k=top_k, statistics=True))
    live = tiny_teacher().score(replace(request, top_k=top_k or 16, statistics=True))
    for row, length in enumerate(request.token_mask.sum(1).tolist()):
        place = (row, slice(length - 1))
        assert torch.equal(scores.top_ids[place], live.top_ids[place])
        for name in ("top_logp", "log_tail", "entropy", "max_probability"):
            torch.testing.assert_close(getattr(scores, name)[place], getattr(live, name)[place], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(scores.observed_logp[place], live.observed_logp[place], rtol=1e-6, atol=1e-6)
    cached.close()


def test_packed_rows_and_truncated_equals_find_their_documents(folder: Path) -> None:
    a, b = ROWS[0], ROWS[1]
    packed = ScoreRequest(
        torch.tensor([a + b]), torch.ones(1, len(a + b), dtype=torch.long), torch.tensor([[1] * len(a) + [2] * len(b)])
    )
    cached = CachedTeacher(folder)
    scores = cached.score(packed)
    apart = cached.score(padded([a, b]))
    width = min(scores.top_ids.shape[2], apart.top_ids.shape[2])
    torch.testing.assert_close(scores.log_tail[0, : len(a) - 1], apart.log_tail[0, : len(a) - 1])
    torch.testing.assert_close(
        scores.top_ids[0, len(a) : len(a + b) - 1, :width], apart.top_ids[1, : len(b) - 1, :width]
    )
    cached.close()


def test_the_error_of_the_distribution_falls_with_k(tmp_path: Path) -> None:
    request = padded(ROWS[:8])
    exact = torch.log_softmax(tiny_teacher().score(request).logits, -1)
    real = torch.cat([row * request.input_ids.shape[1] + torch.arange(len(ROWS[row]) - 1) for row in range(8)])
    divergences = []
    for k in (2, 8, 32, WIDTH):
        build_cache(tiny_teacher(), batches(ROWS[:8]), tmp_path / str(k), identity=identity(k=TopK(k, k, 1.0)))
        cached = CachedTeacher(tmp_path / str(k))
        stored = cached.score(request).log_probabilities(real, WIDTH, 1.0)
        truth = exact.flatten(0, 1)[real]
        divergences.append(float((truth.exp() * (truth - stored)).sum(-1).mean()))
        cached.close()
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[0] > 10 * divergences[2]
    assert abs(divergences[-1]) < 1e-3


def test_next_word_mass_is_kept_and_asking_a_cache_without_it_is_said(folder: Path, tmp_path: Path) -> None:
    word_start = torch.arange(WIDTH) % 3 == 0
    kept = identity(fields=("entropy", "next_word_mass"))
    build_cache(tiny_teacher(), batches(ROWS[:4]), tmp_path, identity=kept, word_start=word_start)
    request = replace(padded(ROWS[:4]), statistics=True, word_start=word_start)
    cached, live = CachedTeacher(tmp_path).score(request), tiny_teacher().score(request)
    for row in range(4):
        place = (row, slice(len(ROWS[row]) - 1))
        torch.testing.assert_close(cached.next_word_mass[place], live.next_word_mass[place], rtol=0, atol=2**-11)
    with pytest.raises(ValueError, match="starts a word was asked of"):
        CachedTeacher(folder).score(request)


@pytest.mark.parametrize("what", ["tokenizer", "teacher"])
def test_another_tokenizer_or_teacher_is_refused(folder: Path, what: str) -> None:
    with pytest.raises(CacheError, match=f"this run has the {what} other"):
        CachedTeacher(folder, **{what: "other"})


def test_whose_scores_they_are_and_how_much_they_hold_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "spanwise")
    cached = CachedTeacher(folder, teacher="t")
    assert f"cached teacher (fingerprint t) from '{folder}'" in caplog.text
    held, header = cached.precision(), cached.manifest.summary()
    assert (held.name, held.fingerprint) == ("cached teacher", "t")
    for name in ("mean_k", "mean_tail_mass", "largest_tail_mass"):
        assert getattr(held, name) == header[name] > 0
    cached.close()


def test_another_text_is_refused_by_name(folder: Path) -> None:
    cached = CachedTeacher(folder)
    changed = [*ROWS[5][:-1], (ROWS[5][-1] + 1) % WIDTH]
    with pytest.raises(CacheError, match=rf"no scores for row 1 of the batch, {len(changed)} tokens \[{changed[0]}, "):
        cached.score(padded([ROWS[4], changed]))
    cached.close()


def test_what_topk_cannot_give_is_refused_by_name(folder: Path) -> None:
    cached = CachedTeacher(folder)
    assert "dense" not in cached.forms
    with pytest.raises(ValueError, match="temperature 2 were asked"):
        cached.score(replace(padded(ROWS[:1]), temperature=2.0))
    with pytest.raises(ValueError, match="shared set of ids"):
        cached.score(replace(padded(ROWS[:1]), shared_ids=torch.zeros(1, 3, dtype=torch.long)))
    cached.close()


def test_a_truncated_shard_is_refused_when_opened(folder: Path, tmp_path: Path) -> None:
    shard = sorted(copy(folder, tmp_path).glob("shard-*"))[1]
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CacheError, match=r"shard-00001\.scores' is .* bytes long"):
        CachedTeacher(tmp_path)
    shard.unlink()
    with pytest.raises(CacheError, match="is missing"):
        CachedTeacher(tmp_path)


def test_a_flipped_bit_is_refused_when_read_and_by_verify(folder: Path, tmp_path: Path) -> None:
    shard = min(copy(folder, tmp_path).glob("shard-*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    cached = CachedTeacher(tmp_path)
    with pytest.raises(CacheError, match=r"shard-00000\.scores' is damaged"):
        cached.score(padded(ROWS))
    with pytest.raises(CacheError, match=r"shard-00000\.scores' is damaged"):
        cached.verify()
    cached.close()
    CachedTeacher(folder).verify()


@pytest.mark.parametrize("file", ["index.bin", "manifest.json"])
def test_a_damaged_index_or_manifest_is_refused(folder: Path, tmp_path: Path, file: str) -> None:
    path = copy(folder, tmp_path) / file
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CacheError, match=file.replace(".", r"\.")):
        CachedTeacher(tmp_path)


def test_no_cache_and_a_format_of_the_future_are_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="no cache of teacher scores"):
        CachedTeacher(tmp_path / "nothing")
    path = copy(folder, tmp_path) / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(CacheError, match="expected spanwise-scores of version 1"):
        CachedTeacher(tmp_path)


def test_the_fingerprint_is_of_the_weights_not_of_their_place(tmp_path: Path) -> None:
    model = tiny_model()
    before = model_fingerprint(model)
    model.save_pretrained(tmp_path)
    assert model_fingerprint(type(model).from_pretrained(tmp_path)) == before
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert model_fingerprint(model) != before
    assert model_fingerprint(tiny_model().to(torch.bfloat16)) != before


# Reads every document of a cache once and prints by how much that raised the peak of its memory.
READ_ALL = """
import sys
from pathlib import Path
import torch
from spanwise.teachers.cached import CachedTeacher
from spanwise.teachers.teacher import ScoreRequest
torch.set_num_threads(1)
cached, count = CachedTeacher(sys.argv[1]), int(sys.argv[2])
def read(number):
    ids = torch.arange(number, number + 200)[None]
    return cached.score(ScoreRequest(ids, torch.ones_like(ids)))
def peak():  # in KiB; getrusage's figure would be the parent's where that is larger
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
for number in range(20):
    read(number)
begin = peak()
for number in range(count):
    read(number)
print(peak() - begin)
"""


def test_memory_does_not_grow_with_the_cache(tmp_path: Path) -> None:
    import numpy as np

    from spanwise.teachers.cache_writer import CacheWriter
    from spanwise.teachers.documents import DocumentScores

    rng = np.random.default_rng(0)
    sizes, growth = {}, {}
    for count in (60, 600):
        path = tmp_path / str(count)
        with CacheWriter(path, identity(k=TopK(64, 64, 1.0), fields=()), shard_bytes=1 << 20) as writer:
            for number in range(count):
                p = rng.dirichlet(np.ones(65), size=199)
                p[:, :64].sort(axis=1)
                writer.add(
                    np.arange(number, number + 200),
                    DocumentScores(
                        counts=np.full(199, 64),
                        ids=rng.integers(0, 150_000, 199 * 64),
                        logp=np.log(p[:, 63::-1]).reshape(-1),
                        log_tail=np.log(p[:, 64]),
                        observed_logp=np.log(p[:, 0]),
                    ),
                )
            sizes[count] = writer.finish()["bytes"]
        result = subprocess.run(
            [sys.executable, "-c", READ_ALL, str(path), str(count)], capture_output=True, text=True, check=True
        )
        growth[count] = 1024 * int(result.stdout)
    assert sizes[600] > 9.5 * sizes[60]
    assert sizes[600] > 20e6
    # After the first documents, reading ten times more raises the peak by no more than noise.
    assert growth[600] < 0.2 * sizes[600]
