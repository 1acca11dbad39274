"""A server of prompt log-probabilities for any causal language model, in the shape of OpenAI's and vLLM's completions.

``POST /v1/completions`` takes token ids or text and returns ``prompt_logprobs`` (vLLM's form) or, with ``echo`` and
``logprobs``, the older OpenAI form; nothing is generated. Prompts that wait are scored together: one forward at a time,
at most ``batch_tokens`` padded tokens in it, so memory is that of one such forward. Requests are limited in bytes,
prompts, tokens and k before the model sees them; with a token, every route but /health asks for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spanwise.teachers.documents import DocumentScores, keep_top
from spanwise.teachers.server_queue import RefusedError, ScoreQueue, ServeLimits
from spanwise.teachers.teacher import Teacher

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

# vLLM's value for a log-probability that JSON cannot say.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True)
class Served:
    """What a server serves."""

    teacher: Teacher
    tokenizer: Any
    name: str
    limits: ServeLimits
    about: dict[str, Any]
    device: torch.device | str = "cpu"
    _texts: dict[int, str] = field(default_factory=dict, repr=False)

    def text_of(self, token: int) -> str:
        """The text of one token, remembered: at most one string per id of the vocabulary."""
        if token not in self._texts:
            self._texts[token] = self.tokenizer.decode([token])
        return self._texts[token]


def make_app(served: Served, token: str | None = None) -> Starlette:
    """The ASGI application.

    Args:
        served: the teacher, its tokenizer and the limits.
        token: what ``Authorization: Bearer …`` must hold; None asks for nothing.
    """
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    queue = ScoreQueue(served.teacher, served.limits, served.device)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(queue.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def guarded(handler: Callable[[Request], Awaitable[dict[str, Any]]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                _check_token(request, token)
                content = await handler(request)
                body = await asyncio.to_thread(lambda: json.dumps(content, separators=(",", ":")).encode())
                return _json(200, body)
            except RefusedError as error:
                described = {"message": str(error), "type": "BadRequestError", "param": None, "code": error.status}
                return JSONResponse({"error": described}, status_code=error.status)

        return answer

    async def health(_: Request) -> Response:
        return JSONResponse({})

    async def models(_: Request) -> dict[str, Any]:
        described = {"id": served.name, "object": "model", "owned_by": "spanwise", "spanwise": served.about}
        return {"object": "list", "data": [described | {"max_model_len": served.limits.context_length}]}

    async def completions(request: Request) -> dict[str, Any]:
        asked = await _body(request, served.limits)
        return await complete(served, queue, asked)

    async def tokenize(request: Request) -> dict[str, Any]:
        asked = await _body(request, served.limits)
        ids = _text_ids(served, asked.get("prompt"), bool(asked.get("add_special_tokens", True)))
        return {"count": len(ids), "max_model_len": served.limits.context_length, "tokens": ids}

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", guarded(models)),
            Route("/v1/completions", guarded(completions), methods=["POST"]),
            Route("/tokenize", guarded(tokenize), methods=["POST"]),
        ],
        lifespan=lifespan,
    )


def _json(status: int, body: bytes) -> Response:
    from starlette.responses import Response

    return Response(body, status_code=status, media_type="application/json")


def _check_token(request: Request, token: str | None) -> None:
    given = request.headers.get("authorization", "")
    if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise RefusedError(401, "the token is missing or another one; send 'Authorization: Bearer TOKEN'")


async def _body(request: Request, limits: ServeLimits) -> dict[str, Any]:
    """The JSON object of a request, never holding more than the limit."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limits.request_bytes:
            raise RefusedError(
                413, f"the request is longer than {limits.request_bytes:,} bytes; send fewer prompts at once"
            )
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise RefusedError(400, "the body is not JSON") from None
    if not isinstance(asked, dict):
        raise RefusedError(400, f"the body is a {type(asked).__name__}; expected an object with a prompt")
    return asked


async def complete(served: Served, queue: ScoreQueue, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer to a completions request: one choice per prompt, with the log-probabilities of its tokens."""
    prompts = _prompts(served, asked)
    echo = asked.get("prompt_logprobs") is None
    top_k = _top_k(served, asked, "logprobs" if echo else "prompt_logprobs")
    temperature = asked.get("score_temperature", 1.0)
    if not isinstance(temperature, (int, float)) or isinstance(temperature, bool) or not 1e-3 <= temperature <= 1e3:
        raise RefusedError(400, f"score_temperature is {temperature!r}; expected a number from 0.001 to 1000")
    if asked.get("model") not in (None, served.name):
        raise RefusedError(404, f"the model {asked['model']!r} does not exist; this server has {served.name!r}")
    if echo and not (asked.get("echo") and asked.get("return_tokens_as_token_ids")):
        raise RefusedError(
            400,
            "this server scores prompts and generates nothing; ask for prompt_logprobs, or for echo with logprobs and "
            "return_tokens_as_token_ids",
        )
    scored = await asyncio.gather(
        *(queue.score(ids, top_k, float(temperature)) if len(ids) > 1 else _nothing() for ids in prompts)
    )
    shape = _echo_choice if echo else _vllm_choice
    choices = await asyncio.to_thread(
        lambda: [
            {"index": place, "text": "", "finish_reason": "length"} | shape(served, asked, ids, scores, top_k)
            for place, (ids, scores) in enumerate(zip(prompts, scored, strict=True))
        ]
    )
    tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    return {"object": "text_completion", "model": served.name, "choices": choices, "usage": usage}


async def _nothing() -> None:
    """The scores of a prompt of one token: there are none."""


def _prompts(served: Served, asked: dict[str, Any]) -> list[list[int]]:
    prompt, limits = asked.get("prompt"), served.limits
    if (asked.get("max_tokens") or 0) not in (0, 1) or asked.get("stream") or (asked.get("n") or 1) != 1:
        raise RefusedError(
            400, "this server scores prompts and generates nothing; expected max_tokens 0 or 1, one choice"
        )
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (list, str))
    given = prompt if isinstance(prompt, list) and several else [prompt]
    if len(given) > limits.prompts:
        raise RefusedError(400, f"the request has {len(given)} prompts; this server takes {limits.prompts} at once")
    special = bool(asked.get("add_special_tokens", True))
    prompts = [_text_ids(served, one, special) if isinstance(one, str) else one for one in given]
    for ids in prompts:
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise RefusedError(400, "the prompt is neither text nor a non-empty list of token ids")
        if len(ids) > limits.context_length:
            raise RefusedError(400, f"the prompt has {len(ids):,} tokens; this model takes {limits.context_length:,}")
        if min(ids) < 0 or max(ids) >= served.teacher.vocab_size:
            raise RefusedError(
                400, f"the prompt has ids from {min(ids)} to {max(ids)}; expected 0 to {served.teacher.vocab_size - 1}"
            )
    return prompts


def _text_ids(served: Served, text: Any, special: bool) -> list[int]:
    if not isinstance(text, str):
        raise RefusedError(400, f"the prompt is a {type(text).__name__}; expected text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RefusedError(400, "the prompt holds half a surrogate pair; expected text that UTF-8 can say") from None
    ids: list[int] = served.tokenizer(text, add_special_tokens=special)["input_ids"]
    return ids


def _top_k(served: Served, asked: dict[str, Any], name: str) -> int:
    top_k = asked.get(name)
    most = min(served.limits.top_k, served.teacher.vocab_size)
    if type(top_k) is not int or not 0 <= top_k <= most:
        raise RefusedError(400, f"{name} is {top_k!r}; expected 0 to {most} (max_logprobs of this server is {most})")
    return top_k


def _ranked(scores: DocumentScores | None, top_k: int) -> list[list[tuple[int, float]]]:
    """Ids and log-probabilities of every scored position, the first ``top_k``."""
    if scores is None:
        return []
    ends = np.cumsum(scores.counts)
    pairs = list(zip(scores.ids.tolist(), scores.logp.tolist(), strict=True))
    starts = ends - scores.counts
    return [pairs[start : min(end, start + top_k)] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _vllm_choice(
    served: Served, asked: dict[str, Any], ids: list[int], scores: DocumentScores | None, top_k: int
) -> dict[str, Any]:
    """vLLM's form: a dict per position from id to logprob, rank and text; the observed token is always in it."""
    positions: list[Any] = [None]
    observed = [] if scores is None else scores.observed_logp.tolist()
    for token, logp, listed in zip(ids[1:], observed, _ranked(scores, top_k), strict=True):
        entries = {
            str(other): {"logprob": max(value, LEAST_LOGPROB), "rank": rank, "decoded_token": served.text_of(other)}
            for rank, (other, value) in enumerate(listed, start=1)
        }
        # The rank of a token beyond the top k is not counted out: one past the last listed is a lower bound.
        entries.setdefault(
            str(token),
            {"logprob": max(logp, LEAST_LOGPROB), "rank": top_k + 1, "decoded_token": served.text_of(token)},
        )
        positions.append(entries)
    choice: dict[str, Any] = {"logprobs": None, "prompt_logprobs": positions}
    if asked.get("return_token_ids"):
        choice["prompt_token_ids"] = ids
    if asked.get("spanwise") and scores is not None:
        # JSON has no -inf; -9999 underflows to no mass.
        tail = np.maximum(_tail_beyond(scores, top_k), LEAST_LOGPROB)
        choice["spanwise"] = {"log_tail": tail.tolist(), "entropy": _listed(scores.entropy)}
    return choice


def _tail_beyond(scores: DocumentScores, top_k: int) -> np.ndarray:
    return keep_top(scores, np.full(len(scores.counts), top_k)).log_tail.astype(np.float64)


def _listed(values: np.ndarray | None) -> list[float]:
    return [] if values is None else values.tolist()


def _echo_choice(
    served: Served, asked: dict[str, Any], ids: list[int], scores: DocumentScores | None, top_k: int
) -> dict[str, Any]:
    """OpenAI's form with tokens named by id."""
    observed = [] if scores is None else [max(value, LEAST_LOGPROB) for value in scores.observed_logp.tolist()]
    listed = [
        {f"token_id:{token}": max(value, LEAST_LOGPROB) for token, value in pairs} for pairs in _ranked(scores, top_k)
    ]
    tops: list[Any] = [
        None,
        *({f"token_id:{t}": lp} | top for t, lp, top in zip(ids[1:], observed, listed, strict=True)),
    ]
    return {
        "text": served.tokenizer.decode(ids),
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in ids],
            "token_logprobs": [None, *observed],
            "top_logprobs": tops,
            "text_offset": [],
        },
    }
