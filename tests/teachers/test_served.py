"""A teacher behind HTTP: our own server as a real process, killed and started again; servers of other kinds by their
documented answers, replayed by a real HTTP server."""

from __future__ import annotations

import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from spanwise.loading import load_model
from spanwise.teachers.cached import CachedTeacher
from spanwise.teachers.fingerprint import model_fingerprint
from spanwise.teachers.local import LocalTeacher
from spanwise.teachers.served import PROBE, ServedTeacher, TeacherUnreachableError
from spanwise.teachers.served_options import OPTIONS, checked_options
from spanwise.teachers.served_shapes import ServedScoresError
from tests.teachers.serving import free_port, save_model, server
from tests.teachers.tiny import padded, random_rows
from tests.tiny_tokenizers import byte_level_bpe

# One worker runs them all: the processes they share are started once.
pytestmark = pytest.mark.xdist_group("served")

ROWS = random_rows(12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, byte_bpe: PreTrainedTokenizerBase) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), byte_bpe)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with server(folder, "--port", "0", "--max-logprobs", "8") as (url, _):
        yield url


@pytest.fixture(scope="module")
def live(folder: Path, byte_bpe: PreTrainedTokenizerBase) -> LocalTeacher:
    return LocalTeacher(load_model(folder), vocab_size=len(byte_bpe))


def assert_like_the_live_one(scores, live: LocalTeacher, request, k: int, tolerance: float = 1e-4) -> None:
    expected = live.score(replace(request, top_k=k, statistics=True))
    for row, length in enumerate(request.token_mask.sum(1).tolist()):
        place = (row, slice(length - 1))
        assert torch.equal(scores.top_ids[place], expected.top_ids[place])
        for name in ("top_logp", "log_tail", "observed_logp", "entropy", "max_probability"):
            torch.testing.assert_close(
                getattr(scores, name)[place], getattr(expected, name)[place], rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_it_says_what_the_live_teacher_says(
    url: str, live: LocalTeacher, byte_bpe: PreTrainedTokenizerBase, temperature: float
) -> None:
    teacher = ServedTeacher(f"{url}/v1", byte_bpe, top_k=8, temperature=temperature)
    request = replace(padded([*ROWS, ROWS[0]]), temperature=temperature, statistics=True)
    assert_like_the_live_one(teacher.score(request), live, request, 8)
    assert teacher.score(replace(request, top_k=3)).top_ids.shape[2] == 3
    with pytest.raises(ValueError, match="temperature 3 were asked"):
        teacher.score(replace(request, temperature=3.0))
    teacher.close()
    teacher.close()


def test_answers_are_kept_and_then_teach_without_the_server(
    url: str,
    live: LocalTeacher,
    byte_bpe: PreTrainedTokenizerBase,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "spanwise")
    teacher = ServedTeacher(url, byte_bpe, top_k=8, cache=tmp_path)
    first = teacher.score(padded(ROWS))
    again = teacher.score(padded(ROWS[:4]))
    torch.testing.assert_close(again.observed_logp[:, :5], first.observed_logp[:4, :5])
    teacher.close()
    cached = CachedTeacher(tmp_path)
    assert_like_the_live_one(cached.score(padded(ROWS)), live, padded(ROWS), 8, tolerance=1e-3)
    assert cached.manifest.summary()["documents"] == len(ROWS)
    assert "positions scored, mean k 8.0, mean tail mass 0." in caplog.text
    assert "tokens, mean k 8.0, mean tail mass 0." in caplog.text
    cached.close()


def test_it_says_how_much_of_the_distribution_its_scores_hold(
    url: str, live: LocalTeacher, byte_bpe: PreTrainedTokenizerBase
) -> None:
    teacher = ServedTeacher(url, byte_bpe, top_k=8)
    assert teacher.precision() is None
    for rows in (ROWS[:5], ROWS[5:]):
        teacher.score(padded(rows))
    held = teacher.precision()
    request = padded(ROWS)
    tail = live.score(replace(request, top_k=8, statistics=True)).log_tail.exp()
    listed = torch.cat([tail[row, : len(ids) - 1] for row, ids in enumerate(ROWS)])
    assert (held.name, held.mean_k) == (teacher.name, 8.0)
    assert held.fingerprint == model_fingerprint(live.model)
    assert held.mean_tail_mass == pytest.approx(float(listed.mean()), rel=1e-3)
    assert held.largest_tail_mass == pytest.approx(float(listed.max()), rel=1e-3)
    teacher.close()


def test_the_server_is_killed_in_the_middle_and_started_again_and_nothing_is_lost(
    folder: Path, live: LocalTeacher, byte_bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    port = str(free_port())
    rows = random_rows(60, seed=5)
    results: list[Any] = []
    with server(folder, "--port", port, "--max-batch-tokens", "40") as (url, process):
        teacher = ServedTeacher(url, byte_bpe, top_k=8, cache=tmp_path, concurrency=2)
        thread = threading.Thread(target=lambda: results.append(teacher.score(padded(rows))))
        thread.start()
        while len(teacher._writer) < 3:
            time.sleep(0.001)
        process.kill()
        process.wait()
    kept = len(teacher._writer)
    assert 3 <= kept < len(rows)
    with server(folder, "--port", port):
        thread.join(60)
        assert len(results) == 1
        teacher.close()
    assert_like_the_live_one(results[0], live, padded(rows), 8, tolerance=1e-3)


def test_a_server_that_is_not_there_is_said(byte_bpe: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spanwise.teachers.served.START_PATIENCE", 0.3)
    with pytest.raises(TeacherUnreachableError, match=r"did not answer for 0\.3 s .ConnectError"):
        ServedTeacher(f"http://127.0.0.1:{free_port()}", byte_bpe)


@pytest.mark.parametrize("wrong", ["not a url", "ftp://x", "http://[::1"])
def test_what_is_no_url_is_said(byte_bpe: PreTrainedTokenizerBase, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spanwise.teachers.served.START_PATIENCE", 0.1)
    with pytest.raises(ValueError, match="is no url"):
        ServedTeacher(wrong, byte_bpe)


def test_without_the_serve_extra_a_client_names_what_to_install(
    byte_bpe: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs the package httpx.*Fix: pip install 'spanwise\[serve\]'"):
        ServedTeacher("http://127.0.0.1:1", byte_bpe)


def test_another_tokenizer_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ServedScoresError, match="expected equal ids"):
        ServedTeacher(url, byte_level_bpe(600, start=8))


def test_more_log_probabilities_than_the_server_allows_are_refused(url: str, byte_bpe: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ServedScoresError, match=r"max_logprobs of this server is 8.*lower teachers\.options\.top_k"):
        ServedTeacher(url, byte_bpe, top_k=9)
    with pytest.raises(ServedScoresError, match="and not other"):
        ServedTeacher(url, byte_bpe, top_k=8, model="other")


# Servers of other kinds, replayed: what they would answer is made from the live model in their documented shapes.


class Replay:
    """A vLLM, SGLang or OpenAI-style server over a local model."""

    def __init__(self, live: LocalTeacher, tokenizer: PreTrainedTokenizerBase, owner: str) -> None:
        self.live, self.tokenizer, self.owner = live, tokenizer, owner
        self.refuse: Callable[[], tuple[int, dict[str, str]] | None] = lambda: None
        self.asked = 0

    def answer(self, path: str, body: dict[str, Any] | None) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "org/model", "object": "model", "owned_by": self.owner}]}
        self.asked += 1
        prompt = body["prompt"] if "prompt" in body else body.get("input_ids", body.get("text"))
        ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"] if isinstance(prompt, str) else prompt
        logp = torch.log_softmax(self.live.logits(padded([ids]))[0].float(), -1)
        k = body.get("prompt_logprobs", body.get("logprobs", body.get("top_logprobs_num")))
        values, tops = (part.tolist() for part in logp[:-1].topk(k))
        best = [list(zip(*pair, strict=True)) for pair in zip(tops, values, strict=True)]
        seen = [float(logp[place, token]) for place, token in enumerate(ids[1:])]
        if self.owner == "vllm":
            positions = [
                {str(t): {"logprob": v, "rank": rank, "decoded_token": "?"} for rank, (t, v) in enumerate(top, 1)}
                for top in best
            ]
            for entries, token, value in zip(positions, ids[1:], seen, strict=True):
                entries.setdefault(str(token), {"logprob": value, "rank": 99, "decoded_token": "?"})
            return {"choices": [{"index": 0, "text": "x", "prompt_logprobs": [None, *positions]}]}
        if self.owner == "sglang":
            tokens = [[v, t, None] for v, t in zip([None, *seen], ids, strict=True)]
            lists = [[[v, t, None] for t, v in top] for top in best]
            about = {"input_token_logprobs": tokens, "input_top_logprobs": [None, *lists]}
            return {"text": "x", "meta_info": about}
        lists = [{f"token_id:{t}": v for t, v in top} for top in best]
        echoed = {
            "tokens": [f"token_id:{token}" for token in [*ids, 3]],
            "token_logprobs": [None, *seen, -0.5],
            "top_logprobs": [None, *lists, {}],
        }
        return {"choices": [{"index": 0, "text": "x", "logprobs": echoed}]}


@contextmanager
def replayed(replay: Replay) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.respond(None)

        def do_POST(self) -> None:
            self.respond(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def respond(self, body: dict[str, Any] | None) -> None:
            status, headers = replay.refuse() or (200, {})
            content = json.dumps(replay.answer(self.path, body) if status == 200 else {"error": "away"}).encode()
            self.send_response(status)
            for name, value in (headers | {"content-length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=web.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{web.server_port}"
    finally:
        web.shutdown()
        thread.join()
        web.server_close()


@pytest.mark.parametrize(("owner", "api"), [("vllm", "vllm"), ("sglang", "sglang"), ("someone", "echo")])
def test_servers_of_every_kind_teach(
    live: LocalTeacher, byte_bpe: PreTrainedTokenizerBase, owner: str, api: str
) -> None:
    with replayed(Replay(live, byte_bpe, owner)) as url:
        teacher = ServedTeacher(url, byte_bpe, top_k=6)
        assert teacher.api == api
        assert teacher.identity.teacher == "served org/model"
        scores = teacher.score(padded(ROWS[:3]))
        expected = live.score(replace(padded(ROWS[:3]), top_k=6, statistics=True))
        for row in range(3):
            place = (row, slice(len(ROWS[row]) - 1))
            assert torch.equal(scores.top_ids[place], expected.top_ids[place])
            torch.testing.assert_close(scores.top_logp[place], expected.top_logp[place], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(scores.log_tail[place], expected.log_tail[place], rtol=1e-3, atol=1e-3)
        assert scores.entropy is None
        teacher.close()
        with pytest.raises(ServedScoresError, match="at temperature 2 were asked"):
            ServedTeacher(url, byte_bpe, temperature=2.0)
        with pytest.raises(ServedScoresError, match="expected equal ids"):
            ServedTeacher(url, byte_level_bpe(600, start=8))


def test_a_busy_server_is_asked_again_and_a_refusal_is_not(
    live: LocalTeacher, byte_bpe: PreTrainedTokenizerBase
) -> None:
    replay = Replay(live, byte_bpe, "vllm")
    with replayed(replay) as url:
        teacher = ServedTeacher(url, byte_bpe, top_k=6, patience=20.0)
        before = replay.asked
        troubles = iter([(503, {}), (429, {"retry-after": "0"}), (500, {})])
        replay.refuse = lambda: next(troubles, None)
        teacher.score(padded(ROWS[:2]))
        assert replay.asked == before + 2
        replay.refuse = lambda: (401, {})
        with pytest.raises(PermissionError, match="refuses the token"):
            teacher.score(padded(ROWS[:1]))
        replay.refuse = lambda: (503, {})
        teacher.patience = 0.3
        with pytest.raises(TeacherUnreachableError, match="status 503"):
            teacher.score(padded(ROWS[:2]))
        teacher.close()


@pytest.mark.parametrize(
    ("headers", "pauses"),
    [
        ({}, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 3.7]),
        ({"retry-after": "6"}, [6.0, 6.0, 6.0, 2.0]),
        ({"retry-after": "60"}, [20.0]),
    ],
)
def test_pauses_grow_are_those_the_server_asks_for_and_fill_the_patience(
    live: LocalTeacher,
    byte_bpe: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
    pauses: list[float],
) -> None:
    replay = Replay(live, byte_bpe, "vllm")
    with replayed(replay) as url:
        teacher = ServedTeacher(url, byte_bpe, top_k=6, patience=20.0)
        slept: list[float] = []
        clock = SimpleNamespace(monotonic=lambda: round(sum(slept), 6), sleep=slept.append)
        monkeypatch.setattr("spanwise.teachers.served.time", clock)
        replay.refuse = lambda: (429, headers)
        with pytest.raises(TeacherUnreachableError, match=r"did not answer for 20 s \(status 429"):
            teacher.score(padded(ROWS[:1]))
        assert slept == pytest.approx(pauses)
        # It is asked once more when the patience is over.
        answers = iter([(429, headers)] * len(pauses))
        replay.refuse = lambda: next(answers, None)
        slept.clear()
        teacher.score(padded(ROWS[:1]))
        assert slept == pytest.approx(pauses)
        teacher.close()


def test_several_documents_are_asked_for_at_once_and_no_more_than_told(
    live: LocalTeacher, byte_bpe: PreTrainedTokenizerBase
) -> None:
    replay = Replay(live, byte_bpe, "vllm")
    with replayed(replay) as url:
        teacher = ServedTeacher(url, byte_bpe, top_k=6, concurrency=3)
        changed, now, most = threading.Condition(), 0, 0
        answer = replay.answer

        def counted(path: str, body: dict[str, Any] | None) -> Any:
            nonlocal now, most
            with changed:
                now += 1
                most = max(most, now)
                changed.notify_all()
                changed.wait_for(lambda: most >= 3, timeout=2)  # whoever is alone waits in vain
            time.sleep(0.05)  # time for one too many to come
            with changed:
                now -= 1
            return answer(path, body)

        replay.answer = counted
        teacher.score(padded(ROWS[:8]))
        assert most == 3
        teacher.close()


def test_a_server_that_hangs_is_given_up(live: LocalTeacher, byte_bpe: PreTrainedTokenizerBase) -> None:
    replay = Replay(live, byte_bpe, "vllm")
    with replayed(replay) as url:
        teacher = ServedTeacher(url, byte_bpe, top_k=6, timeout=0.2, patience=0.2)
        replay.refuse = lambda: time.sleep(1.0)
        with pytest.raises(TeacherUnreachableError, match="ReadTimeout"):
            teacher.score(padded(ROWS[:1]))
        replay.refuse = lambda: None
        teacher.close()


def test_how_long_a_prompt_may_be_is_what_the_server_says(
    url: str, live: LocalTeacher, byte_bpe: PreTrainedTokenizerBase
) -> None:
    ours = ServedTeacher(url, byte_bpe, top_k=8)
    assert ours.context_length == live.context_length
    ours.close()
    replay = Replay(live, byte_bpe, "vllm")
    listed = {"data": [{"id": "org/model", "owned_by": "vllm", "max_model_len": 64}]}
    answer = replay.answer
    replay.answer = lambda path, body: listed if path == "/v1/models" else answer(path, body)
    with replayed(replay) as other:
        theirs = ServedTeacher(other, byte_bpe, top_k=6)
        assert theirs.context_length == 63, "one token is generated"
        theirs.close()


MODELS = {"data": [{"id": "org/model", "owned_by": "vllm"}]}


@pytest.mark.parametrize(
    ("models", "answer"),
    [
        ({"data": ["org/model"]}, {}),
        ({"data": {"id": "org/model"}}, {}),
        ({"data": [{"name": "org/model"}]}, {}),
        ({"data": [{"id": "org/model", "max_model_len": "long"}]}, {}),
        (MODELS, []),
        (MODELS, {"choices": 3}),
        (MODELS, {"choices": ["text"]}),
        (MODELS, {"choices": [{"prompt_logprobs": [None, 3]}]}),
        ({"data": [{"id": "org/model", "owned_by": "sglang"}]}, []),
        ({"data": [{"id": "org/model", "owned_by": "sglang"}]}, {"meta_info": {"input_token_logprobs": [3]}}),
        ({"data": [{"id": "org/model", "owned_by": "someone"}]}, {"choices": [{"logprobs": {"tokens": 3}}]}),
    ],
)
def test_an_answer_of_no_known_form_is_refused_by_name(
    live: LocalTeacher, byte_bpe: PreTrainedTokenizerBase, models: Any, answer: Any
) -> None:
    replay = Replay(live, byte_bpe, "vllm")
    replay.answer = lambda path, body: models if path == "/v1/models" else answer
    with replayed(replay) as url, pytest.raises(ServedScoresError, match=r"expected .*\. Fix: "):
        ServedTeacher(url, byte_bpe)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"top_k": 0}, "top_k is 0; expected a whole number from 1"),
        ({"top_k": 8.5}, "top_k is 8.5; expected a whole number"),
        ({"concurrency": 0}, "concurrency is 0; expected a whole number from 1"),
        ({"timeout": 0}, "timeout is 0; expected seconds above 0"),
        ({"timeout": "long"}, "timeout is 'long'; expected seconds"),
        ({"patience": float("nan")}, "patience is nan; expected seconds"),
        ({"mass": 1.5}, "mass is 1.5; expected a number above 0 and up to 1"),
        ({"temperature": True}, "temperature is True; expected a number"),
        ({"api": "openai"}, "api is 'openai'; expected one of vllm, sglang, echo"),
        ({"model": 3}, "model is 3; expected a word"),
        ({"top_p": 1}, "has top_p; expected names among"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(option: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checked_options(option)


def test_every_option_of_a_server_may_stand_in_a_recipe(byte_bpe: PreTrainedTokenizerBase) -> None:
    taken = inspect.signature(ServedTeacher).parameters.values()
    assert set(OPTIONS) == {one.name for one in taken if one.kind is one.KEYWORD_ONLY}
    given = {one.name: one.default for one in taken if one.kind is one.KEYWORD_ONLY}
    assert checked_options(given) == given
    with pytest.raises(ValueError, match="top_k is 0"):
        ServedTeacher("http://127.0.0.1:9", byte_bpe, top_k=0)


def test_a_web_page_is_no_teacher(live: LocalTeacher, byte_bpe: PreTrainedTokenizerBase) -> None:
    replay = Replay(live, byte_bpe, "vllm")
    replay.answer = lambda path, body: {"welcome": "here"}
    with replayed(replay) as url, pytest.raises(ServedScoresError, match="lists no model"):
        ServedTeacher(url, byte_bpe)
    assert len(PROBE.encode()) > len(PROBE)
