"""``spanwise serve`` as a real process: what it answers, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from spanwise.cli import main
from spanwise.loading import load_model
from spanwise.teachers.serve import is_loopback, serve
from spanwise.teachers.served import ServedTeacher
from tests.teachers.serving import save_model, server
from tests.teachers.tiny import padded

# One worker runs them all: the processes they share are started once.
pytestmark = pytest.mark.xdist_group("server")

SECRET = "a secret"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, byte_bpe: PreTrainedTokenizerBase) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), byte_bpe)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    options = ("--port", "0", "--token", SECRET, "--max-logprobs", "8", "--max-request-bytes", "4096")
    with server(folder, *options) as (url, _), httpx.Client(base_url=url, trust_env=False) as client:
        client.headers["Authorization"] = f"Bearer {SECRET}"
        yield client


def complete(client: httpx.Client, **body: object) -> httpx.Response:
    return client.post("/v1/completions", json=body)


def test_it_answers_with_the_models_log_probabilities(client: httpx.Client, folder: Path) -> None:
    ids = [5, 100, 7, 300, 2]
    model = load_model(folder)
    with torch.no_grad():
        exact = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    answer = complete(client, prompt=ids, prompt_logprobs=4, max_tokens=1, return_token_ids=True, spanwise=True).json()
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == ids
    assert choice["prompt_logprobs"][0] is None
    for place in range(1, 5):
        entries = choice["prompt_logprobs"][place]
        values, top = exact[place - 1].topk(4)
        ranked = sorted((entry["rank"], int(token)) for token, entry in entries.items() if entry["rank"] <= 4)
        assert [token for _, token in ranked] == top.tolist()
        assert entries[str(ids[place])]["logprob"] == pytest.approx(float(exact[place - 1, ids[place]]), abs=1e-4)
        tail = choice["spanwise"]["log_tail"][place - 1]
        assert tail == pytest.approx(float((1 - values.exp().sum()).log()), abs=1e-3)
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
    assert all(isinstance(entry["decoded_token"], str) for entry in choice["prompt_logprobs"][1].values())


def test_the_older_form_says_the_same(client: httpx.Client) -> None:
    ids = [5, 100, 7]
    new = complete(client, prompt=ids, prompt_logprobs=3).json()["choices"][0]["prompt_logprobs"]
    asked = {"echo": True, "logprobs": 3, "return_tokens_as_token_ids": True, "max_tokens": 0}
    old = complete(client, prompt=ids, **asked).json()["choices"][0]["logprobs"]
    assert old["tokens"] == ["token_id:5", "token_id:100", "token_id:7"]
    assert old["token_logprobs"][1:] == [new[place][str(ids[place])]["logprob"] for place in (1, 2)]
    assert {int(name[9:]) for name in old["top_logprobs"][2]} == {int(token) for token in new[2]}


def test_several_prompts_text_and_single_tokens_are_answered_in_order(
    client: httpx.Client, byte_bpe: PreTrainedTokenizerBase
) -> None:
    choices = complete(client, prompt=[[5], [5, 6], [9, 9, 9]], prompt_logprobs=1).json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [1, 2, 3]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    text = "the import system"
    ids = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert ids == byte_bpe(text, add_special_tokens=False)["input_ids"]
    choice = complete(client, prompt=text, prompt_logprobs=0, add_special_tokens=False).json()["choices"][0]
    assert [list(entries) for entries in choice["prompt_logprobs"][1:]] == [[str(token)] for token in ids[1:]]


def test_what_it_serves_is_described(client: httpx.Client, folder: Path) -> None:
    (described,) = client.get("/v1/models").json()["data"]
    assert described["id"] == str(folder)
    assert described["max_model_len"] == 256
    assert described["spanwise"]["max_logprobs"] == 8


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"prompt": [1, 2], "prompt_logprobs": 9}, 400, "max_logprobs of this server is 8"),
        ({"prompt": [1, 2], "prompt_logprobs": True}, 400, "expected 0 to 8"),
        ({"prompt": [1, 2], "prompt_logprobs": 1, "max_tokens": 16}, 400, "generates nothing"),
        ({"prompt": [1, 2], "prompt_logprobs": 1, "stream": True}, 400, "generates nothing"),
        ({"prompt": [1, 2], "logprobs": 1, "echo": True}, 400, "return_tokens_as_token_ids"),
        ({"prompt": [], "prompt_logprobs": 1}, 400, "non-empty list"),
        ({"prompt": [1, "a"], "prompt_logprobs": 1}, 400, "list of token ids"),
        ({"prompt": [1, 600], "prompt_logprobs": 1}, 400, "expected 0 to 599"),
        ({"prompt": [1, -1], "prompt_logprobs": 1}, 400, "expected 0 to 599"),
        ({"prompt": [1] * 257, "prompt_logprobs": 1}, 400, "this model takes 256"),
        ({"prompt": [[1]] * 65, "prompt_logprobs": 1}, 400, "takes 64 at once"),
        ({"prompt": [1, 2], "prompt_logprobs": 1, "model": "other"}, 404, "does not exist"),
        ({"prompt": [1, 2], "prompt_logprobs": 1, "score_temperature": 0}, 400, "score_temperature is 0"),
        ({"prompt": [1] * 3000, "prompt_logprobs": 1}, 413, "longer than 4,096 bytes"),
    ],
)
def test_what_it_cannot_do_is_refused_with_words(client: httpx.Client, body: dict, status: int, says: str) -> None:
    answer = complete(client, **body)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


HALF_A_PAIR = b'{"prompt": "\\ud800", "prompt_logprobs": 1}'


@pytest.mark.parametrize("content", [b"{", b"[1]", b"[" * 3000, b"\xff\xfe", HALF_A_PAIR])
def test_a_body_that_is_no_object_or_no_text_is_refused(client: httpx.Client, content: bytes) -> None:
    assert client.post("/v1/completions", content=content).status_code == 400


@pytest.mark.parametrize("given", ["", "Bearer other", "Bearer", "Basic YTpi", "Bearer né"])
def test_without_the_token_nothing_is_said(client: httpx.Client, given: str) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/tokenize")):
        answer = client.request(method, path, headers={"Authorization": given.encode()}, json={})
        assert answer.status_code == 401
    assert client.get("/health", headers={"Authorization": ""}).status_code == 200


def test_a_student_teaches_with_the_servers_token_given_or_from_the_environment(
    client: httpx.Client, byte_bpe: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, request = str(client.base_url), padded([[5, 100, 7], [2, 9]])
    monkeypatch.delenv("SPANWISE_TOKEN", raising=False)
    for options in ({}, {"token": "another"}):
        with pytest.raises(PermissionError, match=r"refuses the token \(status 401\).*set the variable SPANWISE_TOKEN"):
            ServedTeacher(url, byte_bpe, top_k=4, **options)
    given = ServedTeacher(url, byte_bpe, top_k=4, token=SECRET)
    monkeypatch.setenv("SPANWISE_TOKEN", SECRET)
    found = ServedTeacher(url, byte_bpe, top_k=4)
    assert torch.equal(given.score(request).top_ids, found.score(request).top_ids)
    with pytest.raises(PermissionError, match="refuses the token"):  # what is given counts, not the variable
        ServedTeacher(url, byte_bpe, top_k=4, token="another")
    given.close()
    found.close()


@pytest.mark.parametrize("package", ["uvicorn", "starlette"])
def test_without_the_serve_extra_what_to_install_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as leave:
        main(["serve", "no/such/model", "--port", "0", "--json"])
    assert leave.value.code == 2
    said = json.loads(capsys.readouterr().out)["error"]
    assert f"needs the package {package}, which is not installed. Fix: pip install 'spanwise[serve]'" in said


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "teacher.example"])
def test_other_machines_need_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPANWISE_TOKEN", raising=False)
    assert not is_loopback(host)
    with pytest.raises(ValueError, match="without a token"):
        serve("nothing is loaded", host=host, ready=lambda _: None)


def test_loopback_is_what_this_machine_alone_reaches() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")


def test_a_port_that_is_taken_and_a_model_that_is_not_there_exit_with_2(
    client: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    for port, says in (str(client.base_url.port), "cannot be listened on"), ("0", "could be loaded"):
        with pytest.raises(SystemExit) as leave:
            main(["serve", "no/such/model", "--port", port, "--json"])
        assert leave.value.code == 2
        assert says in json.loads(capsys.readouterr().out)["error"]
