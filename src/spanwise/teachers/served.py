"""A teacher behind HTTP: vLLM, SGLang, ``spanwise serve``, or any server that echoes prompt log-probabilities.

Ids are sent, one document a request, several requests at once. At the start the server must turn a text into the ids
that our tokenizer makes of it and must allow k log-probabilities; at every answer the echoed ids are compared. A server
that is away (killed, restarting, overloaded) is asked again with growing pauses until ``patience`` runs out. What was
answered can be kept in a cache as it comes, so that nothing is asked twice, not even by the next run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from spanwise.spans.table import tokenizer_fingerprint
from spanwise.teachers.cache_frame import TopK
from spanwise.teachers.cache_store import CacheIdentity
from spanwise.teachers.cache_writer import CacheWriter
from spanwise.teachers.cached import refuse_what_topk_lacks
from spanwise.teachers.documents import Document, DocumentScores, documents_of, join_scores, keep_top
from spanwise.teachers.precision import Precision, PrecisionTally
from spanwise.teachers.scores import Form, TeacherScores
from spanwise.teachers.served_options import Api, checked_options
from spanwise.teachers.served_shapes import ServedScoresError, read_echo, read_sglang, read_vllm
from spanwise.teachers.teacher import ScoreRequest

logger = logging.getLogger(__name__)

READERS: dict[Api, Callable[[dict[str, Any], Sequence[int], int, int], DocumentScores]] = {
    "vllm": read_vllm,
    "sglang": read_sglang,
    "echo": read_echo,
}
PROBE = "Größe: 3 × 4 = 12 §\n\tdef f(x): return x  # naïve “quotes”, 你好"
AWAY = frozenset({408, 425, 429, 500, 502, 503, 504})
START_PATIENCE = 10.0
LONGEST_PAUSE = 5.0


class TeacherUnreachableError(ConnectionError):
    """A server that did not answer within the patience it was given."""


class ServedTeacher:
    """Scores rows by asking a server.

    Args:
        url: of the server, with or without ``/v1``.
        tokenizer: the teacher's; the server must have the same.
        top_k: log-probabilities asked for per position.
        model: name of the model on the server; default: the first it lists.
        token: sent as ``Authorization: Bearer``; default: the variable SPANWISE_TOKEN.
        api: the shape of its answers; default: found out from who owns the model.
        temperature: of the scores; only ``spanwise serve`` can give another than 1.
        concurrency: requests at once.
        timeout: seconds that one answer may take.
        patience: seconds for which a server that is away is asked again.
        cache: folder in which answers are kept and looked up; one teacher at a time may write it.
        mass: with a cache, how much of a position's mass is enough to keep.
    """

    forms: frozenset[Form] = frozenset({"topk", "observed"})

    def __init__(
        self,
        url: str,
        tokenizer: Any,
        *,
        top_k: int = 20,
        model: str | None = None,
        token: str | None = None,
        api: Api | None = None,
        temperature: float = 1.0,
        concurrency: int = 8,
        timeout: float = 60.0,
        patience: float = 120.0,
        cache: str | os.PathLike[str] | None = None,
        mass: float = 1.0,
    ) -> None:
        numbers = {"top_k": top_k, "temperature": temperature, "concurrency": concurrency, "timeout": timeout}
        checked_options(numbers | {"patience": patience, "mass": mass, "api": api, "cache": cache, "model": model})
        self.url = url.rstrip("/").removesuffix("/v1")
        self.vocab_size = len(tokenizer)
        self.top_k = top_k
        self.temperature = temperature
        self.timeout = timeout
        self.patience = patience
        self._client = _http_client(self.url, token or os.environ.get("SPANWISE_TOKEN"), timeout, concurrency)
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="served-teacher")
        self._writer: CacheWriter | None = None
        self._tally = PrecisionTally()
        try:
            with self._reading("list of models"):
                described = self._describe(model)
                self.name = str(described["id"])
                self.about: dict[str, Any] = dict(described.get("spanwise") or {})
                self.context_length = _longest_prompt(described)
            self.api: Api = api or _api_of(str(described.get("owned_by")))
            self._check_server(tokenizer)
            self.identity = self._identity(tokenizer, mass)
            if cache is not None:
                self._writer = CacheWriter(cache, self.identity)
        except BaseException:
            self.close()
            raise

    def _identity(self, tokenizer: Any, mass: float) -> CacheIdentity:
        return CacheIdentity(
            teacher=str(self.about.get("model") or f"served {self.name}"),
            tokenizer=tokenizer_fingerprint(tokenizer),
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            k=TopK(floor=1, cap=self.top_k, mass=mass),
            fields=("entropy",) if self.about else (),
            name=self.name,
        )

    def score(self, request: ScoreRequest) -> TeacherScores:
        """Ask for the documents of a batch that are not in the cache; all of them are back when it returns."""
        refuse_what_topk_lacks(request, self.name, self.temperature, self.identity.fields)
        documents = documents_of(request)
        kept: dict[bytes, DocumentScores] = {}
        asked = {}
        for document in documents:
            found = None if self._writer is None else self._writer.read(document.key)
            if found is not None:
                kept[document.key] = found
            elif document.key not in asked:
                asked[document.key] = document, self._pool.submit(self._ask, document)
        try:
            for key, (document, answer) in asked.items():
                kept[key] = self._keep(document, answer.result())
        finally:
            for _, answer in asked.values():
                answer.cancel()
        parts = [kept[document.key] for document in documents]
        for part in parts:
            self._tally.add(part)
        if request.top_k is not None:
            parts = [keep_top(part, np.full(len(part.counts), request.top_k)) for part in parts]
        return join_scores(request, documents, parts, temperature=self.temperature)

    def _keep(self, document: Document, scores: DocumentScores) -> DocumentScores:
        """What a later run will read back, so that this one sees the same."""
        if self._writer is None:
            return scores
        self._writer.add(document, scores)
        return self._writer.read(document.key) or scores

    def _ask(self, document: Document) -> DocumentScores:
        ids = document.ids.tolist()
        with self._reading(f"{self.api} form of prompt log-probabilities"):
            return READERS[self.api](self._post(ids, self.top_k), ids, self.top_k, self.vocab_size)

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Say by name that an answer has another form, whatever stumbled over it."""
        try:
            yield
        except ServedScoresError:
            raise
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise ServedScoresError(
                f"the answer of {self.url} cannot be read ({type(error).__name__}: {error}); expected the {what}. The "
                "server is probably of another kind. Fix: set teachers.options.api to vllm, sglang or echo."
            ) from error

    def _post(self, prompt: list[int] | str, top_k: int) -> dict[str, Any]:
        """The part of an answer that belongs to one prompt."""
        if self.api == "sglang":
            named: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
            body = named | {
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": top_k,
            }
            answer = self._request("POST", "/generate", body)
            return answer[0] if isinstance(answer, list) else answer
        body = {"model": self.name, "prompt": prompt, "max_tokens": 1, "temperature": 0, "add_special_tokens": False}
        if self.api == "vllm":
            body |= {"prompt_logprobs": top_k}
        else:
            body |= {"echo": True, "logprobs": top_k, "return_tokens_as_token_ids": True}
        if self.about:
            body |= {"spanwise": True, "score_temperature": self.temperature}
        choices = self._request("POST", "/v1/completions", body).get("choices")
        if not choices:
            raise ServedScoresError(
                f"the answer of {self.url} has no choices; expected one. It is probably no completions server. "
                "Fix: check the url; it should answer at URL/v1/completions."
            )
        first: dict[str, Any] = choices[0]
        return first

    def _request(self, method: str, path: str, body: dict[str, Any] | None, patience: float | None = None) -> Any:
        """One answer, asked for again while the server is away."""
        import httpx

        patience = self.patience if patience is None else patience
        deadline, pause, trouble = time.monotonic() + patience, 0.1, ""
        while True:
            try:
                answer = self._client.request(method, path, json=body)
                if answer.status_code not in AWAY:
                    return self._content(answer)
                trouble = f"status {answer.status_code}: {answer.text[:200]}"
                pause = max(pause, _retry_after(answer.headers.get("retry-after")))
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
            left = deadline - time.monotonic()
            if left <= 0:
                raise TeacherUnreachableError(
                    f"the teacher at {self.url} did not answer for {patience:g} s ({trouble}); expected a running "
                    "server. It is probably not started, out of memory, or the url is wrong. Fix: start it, for "
                    "example: spanwise serve MODEL; then run the same command again."
                )
            time.sleep(min(pause, left))  # a server may name a longer pause than we have; it is asked once more
            pause = min(2 * pause, LONGEST_PAUSE)

    def _content(self, answer: Any) -> Any:
        if answer.status_code in (401, 403):
            raise PermissionError(
                f"the teacher at {self.url} refuses the token (status {answer.status_code}); expected the one it was "
                "started with. The token is probably missing or old. Fix: set the variable SPANWISE_TOKEN, or "
                "teachers.options.token."
            )
        if answer.status_code != 200:
            raise ServedScoresError(
                f"the teacher at {self.url} refuses a request (status {answer.status_code}: {answer.text[:500]}); "
                f"expected scores with k = {self.top_k}. If it names a maximum, the server allows fewer "
                "log-probabilities, tokens or bytes. Fix: lower teachers.options.top_k or teachers.context_length, or "
                "start the server with a higher limit (vLLM and spanwise serve: --max-logprobs)."
            )
        try:
            return answer.json()
        except ValueError:
            raise ServedScoresError(
                f"the answer of {self.url} is not JSON ({answer.text[:80]!r}); expected a completions server. The url "
                "is probably that of a web page or a proxy. Fix: check it."
            ) from None

    def _describe(self, model: str | None) -> dict[str, Any]:
        listed = self._request("GET", "/v1/models", None, START_PATIENCE)
        models = listed.get("data") if isinstance(listed, dict) else None
        if not models:
            raise ServedScoresError(
                f"{self.url}/v1/models lists no model; expected at least one. It is probably no completions server. "
                "Fix: check the url."
            )
        for described in models:
            if model in (None, described.get("id")):
                found: dict[str, Any] = described
                return found
        raise ServedScoresError(
            f"the server at {self.url} has {', '.join(str(one.get('id')) for one in models)} and not {model}; expected "
            "that model. The name is probably misspelt. Fix: set teachers.options.model to one it has."
        )

    def _check_server(self, tokenizer: Any) -> None:
        """Refuse a server with another tokenizer, a lower cap on k, or without the temperature asked for."""
        if self.temperature != 1.0 and not self.about:
            raise ServedScoresError(
                f"scores at temperature {self.temperature:g} were asked of {self.url}, which has them at 1 only; "
                "expected 1. Only 'spanwise serve' takes scores at other temperatures. "
                "Fix: set loss.temperature to 1, or serve the model with spanwise serve."
            )
        ours = {tuple(tokenizer(PROBE, add_special_tokens=special)["input_ids"]) for special in (False, True)}
        with self._reading(f"{self.api} form of prompt log-probabilities"):
            theirs = _echoed_ids(self.api, self._post(PROBE, 1), ours)
        if theirs not in ours:
            raise ServedScoresError(
                f"the server at {self.url} reads {PROBE[:12]!r}… as {list(theirs)[:8]} and the tokenizer given as "
                f"{list(min(ours, key=len))[:8]}; expected equal ids. The tokenizer is probably not that of "
                f"{self.name}. Fix: name the served model's tokenizer in teachers.tokenizer."
            )
        with self._reading("form of a completions server"):
            self._post(list(min(ours, key=len)), self.top_k)

    def precision(self) -> Precision | None:
        """What the scores that were given so far hold."""
        return self._tally.precision(self.name, self.identity.teacher)

    def close(self) -> None:
        """Close the connections and finish the cache, which then serves runs without the server."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()
        if self._tally.positions and (held := self.precision()):
            logger.info(
                "%s: %d positions scored, mean k %.1f, mean tail mass %.3f, largest %.3f",
                self.name,
                self._tally.positions,
                held.mean_k,
                held.mean_tail_mass,
                held.largest_tail_mass,
            )
            self._tally = PrecisionTally()
        if self._writer is not None:
            self._writer.finish()
            self._writer.close()
            self._writer = None


def _echoed_ids(api: Api, answer: dict[str, Any], candidates: set[tuple[int, ...]]) -> tuple[int, ...]:
    """The ids a server made of a text: as far as its answer tells, one of the candidates."""
    if api == "sglang":
        return tuple(entry[1] for entry in answer.get("meta_info", {}).get("input_token_logprobs") or ())
    if api == "echo":
        names = (answer.get("logprobs") or {}).get("tokens") or ()
        ids = tuple(int(str(n).removeprefix("token_id:")) for n in names if str(n).removeprefix("token_id:").isdigit())
        return next((one for one in candidates if ids[: len(one)] == one and len(ids) <= len(one) + 1), ids)
    positions = answer.get("prompt_logprobs") or ()
    for one in candidates:
        if len(one) == len(positions) and all(
            str(token) in (entries or {}) for token, entries in zip(one[1:], positions[1:], strict=True)
        ):
            return one
    # With k = 1 the observed token is the last of an entry, or its only one.
    return tuple(int(list(entries)[-1]) for entries in positions if entries)


def _api_of(owner: str) -> Api:
    owners: dict[str, Api] = {"vllm": "vllm", "spanwise": "vllm", "sglang": "sglang"}
    return owners.get(owner, "echo")


def _longest_prompt(described: dict[str, Any]) -> int | None:
    """Tokens of a prompt that a server takes, as its model list says; most others want room for one token more."""
    most = described.get("max_model_len")
    return None if most is None else int(most) - ("spanwise" not in described)


def _retry_after(header: str | None) -> float:
    return float(header) if header and header.isdigit() else 0.0


def _http_client(url: str, token: str | None, timeout: float, concurrency: int) -> Any:
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"a served teacher needs the package {error.name}, which is not installed. "
            "Fix: pip install 'spanwise[serve]'."
        ) from error
    try:
        known = httpx.URL(url)
    except httpx.InvalidURL:
        known = httpx.URL()
    if known.scheme not in ("http", "https") or not known.host:
        raise ValueError(
            f"'{url}' is no url of a server; expected for example http://127.0.0.1:8000. It is probably misspelt, or "
            "http:// is missing. Fix: correct teachers.url."
        )
    return httpx.Client(
        base_url=known,
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=timeout,
        limits=httpx.Limits(max_connections=concurrency),
        trust_env=False,
    )
