"""What leaves the run's folder: no secrets in what is written, and on the hub what was trained, alone and loadable."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import hub

from spanwise.loading import load_model
from spanwise.train.evaluation import measure
from spanwise.train.recipe import SECRETS_LEFT_OUT, load_recipe, parse_recipe, without_secrets
from spanwise.train.run import train
from spanwise.train.run_folder import checkpoints
from tests import tiny_tokenizers
from tests.train import runs

# transformers turns the hub's progress bars on again after a run; the tests' environment forbids them.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot enable progress bars")

SECRETS = ("hf_of_the_hub", "hf_of_the_teacher", "sk-of-the-server", "pass-of-the-proxy")


class FakeHub:
    """A hub that is a folder; ``upload_folder`` takes and deletes what the real one would."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.root.mkdir()
        self.commits: list[tuple[str, list[str]]] = []
        self.tokens: set[str | None] = set()

    def create_repo(self, name: str, *, token: str | None = None, **_: Any) -> Any:
        self.tokens.add(token)
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(
        self,
        *,
        folder_path: str,
        commit_message: str,
        token: str | None,
        run_as_future: bool = False,
        path_in_repo: str = "",
        ignore_patterns: list[str] | None = None,
        delete_patterns: list[str] | None = None,
        **_: Any,
    ) -> Any:
        self.tokens.add(token)
        files = [str(file.relative_to(folder_path)) for file in Path(folder_path).rglob("*") if file.is_file()]
        sent = sorted(filter_repo_objects(files, ignore_patterns=ignore_patterns))
        self.commits.append((commit_message, sent))
        if delete_patterns:
            for name in filter_repo_objects(self.files(), allow_patterns=delete_patterns):
                (self.root / name).unlink()
        for name in sent:
            target = self.root / path_in_repo / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(folder_path, name), target)
        done: Future[None] = Future()
        done.set_result(None)
        return done if run_as_future else None

    def files(self) -> list[str]:
        return sorted(str(file.relative_to(self.root)) for file in self.root.rglob("*") if file.is_file())


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(hub, "_hf_api", fake)
    return fake


@pytest.mark.parametrize("merge", [False, True], ids=["plain", "merge"])
def test_the_hub_gets_what_was_trained_and_nothing_that_is_unpickled(
    tmp_path: Path, fake_hub: FakeHub, merge: bool
) -> None:
    content = runs.recipe(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, push_to_hub=True)
    content["train"] |= {"save_strategy": "steps", "save_steps": 1, "hub_token": SECRETS[0], "learning_rate": 0.05}
    if merge:
        base = runs.save_teacher(tmp_path / "base", tiny_tokenizers.byte_level_bpe(400))
        content["student"] = {"model": str(base), "peft": {"r": 4, "target_modules": "all-linear"}, "merge": True}
    result = train(parse_recipe(content))

    assert [message for message, _ in fake_hub.commits][-1] == "End of training", "the last commit is the whole folder"
    assert len(fake_hub.commits) == 3, "one for each checkpoint and one at the end"
    assert fake_hub.tokens == {SECRETS[0]}
    for _, sent in fake_hub.commits:
        assert "tokenizer.json" in sent
        assert not [name for name in sent if name.endswith((".bin", ".pt", ".pth", ".pkl")) or name.startswith(".")]
    files = fake_hub.files()
    assert {"README.md", "model.safetensors", "config.json", "tokenizer.json", "recipe.yaml"} <= set(files)
    assert not [name for name in files if name.startswith(("adapter_", "checkpoint-", "tokenizer/"))]
    folder = Path(result["output"])
    assert not list(folder.rglob("training_args.bin"))
    assert not list((folder / ".staging").rglob("*.safetensors")), "what was staged for an upload is gone"

    model, tokenizer = AutoModelForCausalLM.from_pretrained(fake_hub.root), AutoTokenizer.from_pretrained(fake_hub.root)
    assert not hasattr(model, "peft_config")
    held_out = runs.held_out(1)
    again = measure(model, tokenizer, held_out)
    assert again.bits_per_byte == pytest.approx(result["bits_per_byte"], rel=1e-4)
    card = (fake_hub.root / "README.md").read_text()
    assert "data builtin:python-docs, held-out data builtin:python-docs:eval." in card
    assert f"- bits_per_byte: {result['bits_per_byte']:.4g}" in card
    assert f"- next_token_accuracy: {result['next_token_accuracy']:.4g}" in card


def test_a_whole_checkpoint_is_pushed_where_it_was_asked_for(tmp_path: Path, fake_hub: FakeHub) -> None:
    content = runs.recipe(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, push_to_hub=True)
    content["train"]["hub_strategy"] = "checkpoint"
    train(parse_recipe(content))
    assert {"last-checkpoint/optimizer.pt", "last-checkpoint/manifest.json"} <= set(fake_hub.files())
    assert "optimizer.pt" not in fake_hub.files()


def with_secrets(tmp_path: Path, teacher: Path, token: str) -> dict[str, Any]:
    content = runs.recipe(tmp_path, teacher, max_steps=2, save_strategy="steps", save_steps=1, hub_token=token)
    content["teachers"][0]["options"] = {"token": SECRETS[1]}
    content["teachers"].append(
        {"url": f"http://me:{SECRETS[3]}@127.0.0.1:9/v1", "tokenizer": str(teacher), "options": {"token": SECRETS[2]}}
    )
    content["loss"] = {"kd_weight": 0}  # so that the server is not asked
    return content


def test_no_secret_is_written_and_the_run_resumes_with_another_one(tmp_path: Path) -> None:
    teacher = runs.save_teacher(tmp_path / "teacher")
    result = train(parse_recipe(with_secrets(tmp_path, teacher, SECRETS[0])))
    folder = Path(result["output"])
    for file in folder.rglob("*"):
        if file.is_file() and file.suffix not in (".safetensors", ".pt", ".pth"):
            written = file.read_text()
            assert not [secret for secret in SECRETS if secret in written], file
    assert "teacher http://127.0.0.1:9/v1: prefix_kl" in (folder / "README.md").read_text()
    text = (folder / "recipe.yaml").read_text()
    assert text.startswith(SECRETS_LEFT_OUT)
    load_recipe(folder / "recipe.yaml")

    shutil.rmtree(checkpoints(folder)[-1])
    again = train(parse_recipe(with_secrets(tmp_path, teacher, "hf_a_newer_one")), resume=True)
    assert again["loss_per_step"] == result["loss_per_step"]


@pytest.mark.parametrize(
    "content",
    [
        {"hub_token": "x"},
        {"options": {"token": "x", "api_key": "x", "headers": {"Authorization": "x", "X-Api-Key": "x"}}},
        {"storage": [{"secret": "x"}, {"aws_secret_access_key": "x"}, {"Password": "x"}]},
    ],
)
def test_what_is_a_secret_is_left_out(content: dict[str, Any]) -> None:
    assert '"x"' not in json.dumps(without_secrets(content))


def test_what_only_sounds_like_a_secret_stays() -> None:
    content = {
        "tokenizer": {"vocab_size": 300},
        "student": {"bos_token": "<s>", "image_token": "<i>", "pad_token_id": 3, "use_auth_token": True},
        "url": "http://127.0.0.1:9/v1",
        "data": ["a@b.txt"],
    }
    assert without_secrets(content) == content


def test_a_quantised_file_is_trained_merged_and_loads(tmp_path: Path) -> None:
    """GGUF weights can be neither trained nor saved as they are loaded; ours are a dequantised clone."""
    content = runs.recipe(tmp_path, max_steps=1, per_device_train_batch_size=1, learning_rate=1e-2)
    content["student"] = {"model": "builtin:smollm2", "peft": {"r": 2, "target_modules": ["q_proj"]}, "merge": True}
    content["data"] |= {"eval": None, "window_bytes": 60}
    folder = Path(train(parse_recipe(content))["output"])
    assert not list(folder.glob("adapter_*"))
    merged = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(merged, "peft_config")
    assert not getattr(merged, "is_quantized", False)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    before = load_model("builtin:smollm2").state_dict()
    changed = {name for name, value in merged.state_dict().items() if not torch.equal(value, before[name])}
    assert changed, "what was trained is in the weights"
    assert all("q_proj" in name for name in changed)
