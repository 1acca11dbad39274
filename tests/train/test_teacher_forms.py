"""Teachers in every form, end to end: a cache needs no weights and nears the live run as k grows, and forms mix."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedTokenizerBase

from spanwise.cli import main
from spanwise.loading import load_model, load_tokenizer
from spanwise.report.page import shown
from spanwise.spans.table import token_table
from spanwise.teachers.cache_build import CacheProgress
from spanwise.teachers.cache_frame import CacheError
from spanwise.teachers.cache_store import Manifest
from spanwise.teachers.cached import CachedTeacher
from spanwise.teachers.fingerprint import model_fingerprint
from spanwise.teachers.local import LocalTeacher
from spanwise.teachers.worker import TeacherWorker, new_address
from spanwise.train import distill
from spanwise.train.cache_run import ProgressLine, cache_teachers, word_starts
from spanwise.train.distill_recipe import TaskRecipe
from spanwise.train.distill_terms import LOSS_NAMES, SAME_TOKENIZER, LossFamily, make_term
from spanwise.train.recipe import RecipeError, load_recipe
from spanwise.train.run import train
from spanwise.xtoken.projection_report import build_and_save
from tests.teachers.serving import save_model, server
from tests.tiny_tokenizers import byte_level_bpe, sentencepiece_bpe

# One worker runs them all: the processes they share are started once.
pytestmark = pytest.mark.xdist_group("teacher_forms")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a recipe, and four teachers: two share a tokenizer, one has the student's."""
    place = tmp_path_factory.mktemp("forms")
    texts = [topics[name][:400] for name in sorted(topics)[:6]]
    (place / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    save_model(place / "teacher", sentencepiece_bpe())
    save_model(place / "sibling", sentencepiece_bpe(), seed=3)
    save_model(place / "other", byte_level_bpe(), seed=1)
    save_model(place / "twin", byte_level_bpe(500, start=4), seed=2)
    byte_level_bpe(500, start=4).save_pretrained(place / "student")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    recipe = {
        "task": "distill",
        "output": str(place / "run"),
        "student": {"model": {"model_type": "llama", **sizes}, "tokenizer": str(place / "student")},
        "teachers": [{"model": str(place / "teacher"), "loss": {"name": "prefix_kl", "min_mass": 0.0}}],
        "data": {"train": str(place / "text.jsonl"), "window_bytes": 150, "context_length": 128},
        "loss": {"temperature": 2.0},
        "train": {"max_steps": 3, "per_device_train_batch_size": 3, "use_cpu": True, "report_to": [], "save_steps": 9},
    }
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return place


def recipe_with(place: Path, *overrides: str) -> TaskRecipe:
    return load_recipe(place / "recipe.yaml", overrides)


def run(place: Path, name: str, *overrides: str) -> list[float]:
    losses: list[float] = train(recipe_with(place, f"output={place / name}", *overrides))["loss_per_step"]
    return losses


def term(place: Path, *overrides: str) -> float:
    """The first teacher's term on one batch, without a trainer."""
    torch.manual_seed(0)
    task = distill.build(recipe_with(place, *overrides), place)
    batch = task.collator([task.train_rows[number] for number in range(4)])
    (found,) = [parts for name, parts in task.losses(task.model, batch, {"kd/0": 1.0}).items() if name == "kd/0"]
    task.close()
    assert found.count > 0
    return float(found.total.detach() / found.count)


def from_cache(path: str | Path, teacher: Path) -> list[str]:
    return ["teachers.0.model=null", f"teachers.0.cache={path}", f"teachers.0.tokenizer={teacher}"]


def build(place: Path, name: str, *overrides: str) -> dict[str, Any]:
    return cache_teachers(recipe_with(place, f"cache.folder={place / name}", *overrides))


def test_a_run_from_the_cache_needs_no_weights_and_nears_the_live_run_as_k_grows(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = "teachers.0.loss.top_k=700"
    live = run(place, "live", everything)
    paths = {}
    for k in (8, 64, 700):
        rule = [f"cache.folder={place / f'k{k}'}", f"cache.cap={k}", f"cache.floor={k}"]
        with pytest.raises(SystemExit) as leave:
            main(["cache", str(place / "recipe.yaml"), *rule, "--json"])
        assert leave.value.code == 0
        said = capsys.readouterr()
        result = json.loads(said.out)
        assert {"tokens", "bytes_per_token", "path"} <= set(result)
        assert "bytes per token" in said.err
        header = json.loads((Path(result["path"]) / "manifest.json").read_text())
        assert header["summary"]["largest_k"] == k
        assert header["identity"]["temperature"] == 2.0
        paths[k] = result["path"]
    weights = place / "teacher" / "model.safetensors"
    weights.rename(place / "away")
    try:
        overrides = {k: [everything, *from_cache(path, place / "teacher")] for k, path in paths.items()}
        cached = {k: run(place, f"cached{k}", *given) for k, given in overrides.items()}
    finally:
        (place / "away").rename(weights)
    off = {k: max(abs(a - b) for a, b in zip(live, losses, strict=True)) for k, losses in cached.items()}
    assert off[8] > off[64] > off[700]
    assert off[700] < 2e-3


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_every_loss_learns_from_a_cache_and_with_all_of_k_as_from_the_live_teacher(place: Path, loss: str) -> None:
    teacher = place / ("twin" if loss in SAME_TOKENIZER else "teacher")
    named = [f"teachers.0.loss={loss}", f"teachers.0.model={teacher}"]
    rule = ["cache.cap=700", "cache.floor=700", "cache.mass=1.0"]
    path = build(place, f"all-{teacher.name}-{loss == 'alm'}", *named, *rule)["path"]  # ALM is at temperature 1
    from_disk = term(place, *named, *from_cache(path, teacher))
    assert from_disk == pytest.approx(term(place, *named), rel=2e-3)


def test_packed_training_finds_what_unpacked_rows_were_cached_as(place: Path) -> None:
    path = build(place, "for-packing", "cache.floor=64")["path"]
    packed = term(place, "data.packing=true", *from_cache(path, place / "teacher"))
    assert packed == pytest.approx(term(place, "data.packing=true"), rel=2e-3)


def test_a_cache_says_at_how_many_tokens_its_documents_were_cut(place: Path) -> None:
    short = ["data.window_bytes=null", "data.context_length=40", "teachers.0.context_length=50"]
    path = build(place, "cut", *short, "cache.floor=64")["path"]
    assert CachedTeacher(path).context_length == 50
    without_saying_so = [*short[:2], *from_cache(path, place / "teacher")]
    assert term(place, *without_saying_so) == pytest.approx(term(place, *short), rel=2e-3)
    with pytest.raises(CacheError, match=r"no scores for row .* the context length"):
        term(place, *without_saying_so, "teachers.0.context_length=49")


def test_a_teacher_reads_no_more_tokens_than_it_has_positions(place: Path) -> None:
    named = load_tokenizer(place / "teacher")
    small = save_model(place / "small", sentencepiece_bpe())
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 48}))
    rows = ["data.window_bytes=null", "data.context_length=40", f"teachers.0.model={small}"]
    task = distill.build(recipe_with(place, *rows), place)
    batch = task.collator([task.train_rows[number] for number in range(4)])
    assert batch["teacher_0_input_ids"].shape[1] == 48, "of the 160 that four times the student's are"
    assert len(named(task.train_rows[0]["text"])["input_ids"]) > 48
    task.close()
    with pytest.raises(ValueError, match=r"context_length is 49 for .*small, which takes 48 tokens.*lower it to 48"):
        distill.build(recipe_with(place, *rows, "teachers.0.context_length=49"), place)


def test_forms_mix_in_one_run_and_say_the_same(place: Path) -> None:
    teacher = place / "teacher"
    path = build(place, "mixed", "cache.floor=64")["path"]
    loss = {"name": "prefix_kl", "min_mass": 0.0}
    with server(teacher, "--port", "0") as (url, _):
        forms = [
            {"model": str(teacher), "loss": loss},
            {"cache": path, "tokenizer": str(teacher), "loss": loss},
            {"url": url, "tokenizer": str(teacher), "loss": loss, "options": {"top_k": 64, "concurrency": 2}},
            {"process": str(teacher), "loss": loss},
            {"model": str(place / "other"), "loss": "alm"},
        ]
        named = recipe_with(place, f"output={place / 'mix'}", "train.max_steps=2")
        train(type(named).model_validate(named.model_dump(exclude={"teachers"}) | {"teachers": forms}))
        served = ["teachers.0.model=null", f"teachers.0.url={url}", f"teachers.0.tokenizer={teacher}"]
        kept = build(place, "served", *served, "cache.floor=64")
    report = (place / "mix" / "report.html").read_text()
    header = Manifest.read(Path(path))
    # Two of them have scores that were cut: the cache, and the server, which says that it has the same model.
    assert report.count(f"({header.identity.teacher})") == 2
    assert report.count(f'<td class="number">{shown(header.summary()["mean_tail_mass"])}</td>') >= 1
    assert report.count('<td class="number">64</td>') >= 2
    steps = [json.loads(line) for line in (place / "mix" / "log.jsonl").read_text().splitlines()]
    for step in (entry for entry in steps if entry["kind"] == "step"):
        terms = [step[f"kd/{number}"] for number in range(4)]
        assert terms == pytest.approx([terms[0]] * 4, rel=5e-3)
        assert step["kd/4"] > 0
    # What the server said is a cache like any other.
    assert term(place, *from_cache(kept["path"], teacher)) == pytest.approx(term(place), rel=2e-3)


def test_a_running_worker_teaches_by_its_address(place: Path) -> None:
    tokenizer = load_tokenizer(place / "teacher")
    teacher = LocalTeacher(load_model(place / "teacher"), vocab_size=len(tokenizer))
    address = new_address()
    threading.Thread(target=TeacherWorker(teacher, address, torch.device("cpu")).run, daemon=True).start()
    joined = ["teachers.0.model=null", f"teachers.0.process=unix:{address}"]
    assert term(place, *joined, f"teachers.0.tokenizer={place / 'teacher'}") == pytest.approx(term(place), rel=1e-4)


def test_two_teachers_are_cached_at_once_and_a_cache_is_left_alone(place: Path) -> None:
    recipe = recipe_with(place, f"cache.folder={place / 'two'}")
    other = {"model": str(place / "other"), "loss": "alm"}
    both = type(recipe).model_validate(
        recipe.model_dump(exclude={"teachers"})
        | {"teachers": [recipe.teachers[0].model_dump(exclude_unset=True), other]}
    )
    result = cache_teachers(both)
    assert result["path"] == str(place / "two")
    assert [Path(one["path"]).name for one in result["caches"]] == ["teacher-0", "teacher-1"]
    assert result["tokens"] == sum(one["tokens"] for one in result["caches"])
    assert cache_teachers(both) == result


def test_stale_caches_are_refused(place: Path) -> None:
    path = build(place, "stale")["path"]
    with pytest.raises(CacheError, match="this run has the tokenizer"):
        term(place, *from_cache(path, place / "other"))
    with pytest.raises(CacheError, match="no scores for row"):
        term(place, "data.window_bytes=140", *from_cache(path, place / "teacher"))
    with pytest.raises(ValueError, match="temperature 1 were asked"):
        term(place, "loss.temperature=1.0", *from_cache(path, place / "teacher"))
    with pytest.raises(CacheError, match=r"temperature: 2\.0 in the cache, 1\.0 now"):
        build(place, "stale", "loss.temperature=1.0")


def test_a_cache_of_another_teacher_with_the_same_tokenizer_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher, sibling = place / "teacher", place / "sibling"
    (made,) = build(place, "of-one")["caches"]
    assert f"teachers.fingerprint={made['fingerprint']}\n" in capsys.readouterr().err
    assert made["fingerprint"] == model_fingerprint(load_model(teacher))
    other = model_fingerprint(load_model(sibling))
    cached = from_cache(made["path"], sibling)
    with pytest.raises(
        CacheError, match=rf"the teacher {made['fingerprint']} \({teacher}\) and .* the teacher {other}"
    ):
        term(place, *cached, f"teachers.0.fingerprint={other}")
    named = [*cached, f"teachers.0.fingerprint={made['fingerprint']}"]
    assert term(place, *named) == term(place, *cached)
    # Named or not, the report says whose scores they are.
    task = distill.build(recipe_with(place, *cached), place)
    (section,) = (one for one in task.report_sections() if one.heading.startswith("Precision"))
    assert f"<td>{teacher} ({made['fingerprint']})</td>" in section.html
    for name in ("mean_k", "mean_tail_mass", "largest_tail_mass"):
        assert f'<td class="number">{shown(made[name])}</td>' in section.html
    task.close()
    live = distill.build(recipe_with(place), place)
    assert [one.heading for one in live.report_sections()] == ["Alignment of the first rows"]


def test_answers_of_a_server_are_kept_by_one_process_only(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    served = ["teachers.0.model=null", "teachers.0.url=http://127.0.0.1:1", f"teachers.0.tokenizer={place / 'teacher'}"]
    with pytest.raises(
        ValueError, match=r"options\.cache is 'kept' in a run of 2 processes.*Fix: leave options\.cache out"
    ):
        term(place, *served, "teachers.0.options.cache=kept")


def test_a_teacher_that_gives_too_little_for_its_loss_is_refused_by_name(place: Path) -> None:
    class Observed(CachedTeacher):
        forms = frozenset({"observed"})

        def __init__(self) -> None:
            self.name, self.vocab_size = "a plain server", 700

    tokenizers = {f"{side}_tokenizer": load_tokenizer(place / side) for side in ("student", "teacher")}
    how = {"projection": None, "temperature": 1.0}
    says = r"teacher 1 \(a plain server\) gives observed scores and the loss 'gold' needs dense or topk\. Fix: .* alm"
    with pytest.raises(ValueError, match=says):
        make_term(1, LossFamily(name="gold"), Observed(), **tokenizers, **how)
    assert make_term(1, LossFamily(name="alm"), Observed(), **tokenizers, **how).teacher.name == "a plain server"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["cache.floor=9", "cache.cap=8"], "expected floor ≤ cap"),
        (["teachers.0.model=null", "teachers.0.cache=x"], "needs tokenizer"),
        (["teachers.0.model=null", "teachers.0.process=unix:/x"], "needs tokenizer"),
        (["teachers.0.model=null", "teachers.0.cache=x", "teachers.0.tokenizer=y", "teachers.0.options.a=1"], "no opt"),
        (["teachers.0.fingerprint=x"], "compared with a cache's teacher and this is a model"),
        *(
            ([f"teachers.0.loss={loss}", "teachers.0.projection=x"], f"the loss '{loss}' has no projection; expected")
            for loss in ("prefix_kl", "alm", "uld", "kl", "jsd")
        ),
        (
            [
                "teachers.0.model=null",
                "teachers.0.url=http://x",
                "teachers.0.tokenizer=y",
                "teachers.0.options.cache=z",
                "ray.workers=2",
            ],
            "in a run of 2 processes; expected one process",
        ),
    ],
)
def test_recipes_that_cannot_work_are_refused_at_once(place: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        load_recipe(place / "recipe.yaml", overrides)


def test_a_projection_of_other_tokenizers_is_refused_before_the_first_step(place: Path) -> None:
    pair = [load_tokenizer(place / side) for side in ("student", "other")]
    build_and_save(*pair, str(place / "other.safetensors"), top_k=2)
    named = ["teachers.0.loss=gold", f"teachers.0.projection={place / 'other.safetensors'}"]
    with pytest.raises(ValueError, match=r"was built for the teacher tokenizer.*spanwise project build"):
        term(place, *named)
    assert term(place, *named, f"teachers.0.model={place / 'other'}") > 0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["teachers.0.model=base"], "name the model itself"),
        (["teachers.0.model=null", "teachers.0.cache=x", "teachers.0.tokenizer=y"], "has no teacher to be cached"),
        (["teachers.0.model=null", "teachers.0.url=http://x", "teachers.0.options.top_p=1"], "expected names among"),
    ],
)
def test_what_cannot_be_cached_is_said(place: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build(place, "never", *overrides, f"teachers.0.tokenizer={place / 'teacher'}")


def test_word_starts_are_spaces_and_the_end(byte_bpe: PreTrainedTokenizerBase) -> None:
    starts = word_starts(token_table(byte_bpe), byte_bpe.eos_token_id)
    assert starts.dtype == torch.bool
    assert starts[byte_bpe.eos_token_id]
    assert starts[byte_bpe(" the")["input_ids"][0]]
    assert not starts[byte_bpe("the")["input_ids"][0]]


def test_progress_is_said_now_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine("teacher")
    for done in range(1, 4):
        line(CacheProgress(done, 3, 100 * done, float(done), 12.5))
    line.end()
    assert capsys.readouterr().err.splitlines() == [
        "teacher: 1 of 3 documents, 100 tokens/s, 0:02 left, 12.5 bytes per token",
        "teacher: 3 of 3 documents, 100 tokens/s, 0:00 left, 12.5 bytes per token",
    ]
