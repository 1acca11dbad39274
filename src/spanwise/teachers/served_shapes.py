"""What servers answer, read into scores: the three documented shapes of prompt log-probabilities.

- **vLLM**: ``choices[i].prompt_logprobs``, a list with None first and then, per position, a dict from token id to
  {logprob, rank, decoded_token}; the observed token is always among them.
- **OpenAI**, with echo: ``choices[i].logprobs`` with tokens, token_logprobs and top_logprobs, where tokens are named
  ``token_id:N`` (``return_tokens_as_token_ids``); text names of tokens are ambiguous and refused.
- **SGLang**: ``meta_info.input_token_logprobs`` and ``input_top_logprobs`` with [logprob, id, text] entries.

All are checked against the ids that were sent: a server that counts or names tokens differently is refused. What a
server does not list joins the tail, which is 1 minus what it lists (at least 1e-9), unless it says the tail itself.
O(P·K).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spanwise.teachers.documents import DocumentScores

LEAST_TAIL_MASS = 1e-9
TOKEN_ID = "token_id:"
SAID = ("log_tail", "entropy")

# Entries of one position by falling log-probability: (id, logprob).
Position = list[tuple[int, float]]


class ServedScoresError(ValueError):
    """A server's answer that cannot be used: another shape, other ids, another tokenizer, a refusal."""


def read_vllm(choice: dict[str, Any], ids: Sequence[int], top_k: int, vocab_size: int) -> DocumentScores:
    """Scores from one choice with ``prompt_logprobs``."""
    found = _checked(choice.get("prompt_logprobs"), ids, "prompt_logprobs")
    positions: list[Position] = []
    observed: list[float] = []
    for place, (token, entries) in enumerate(zip(ids[1:], found[1:], strict=True), start=1):
        if not isinstance(entries, dict) or str(token) not in entries:
            raise _other_ids(place, token, list(entries or ()))
        observed.append(_number(entries[str(token)]["logprob"], place))
        positions.append(
            [(int(name), _number(entry["logprob"], place)) for name, entry in entries.items() if _in_top(entry, top_k)]
        )
    said = choice.get("spanwise") or {}
    tail, entropy = (_checked(said[key], ids[1:], f"spanwise.{key}") if said.get(key) else None for key in SAID)
    tail = None if tail is None else [_number(value, place) for place, value in enumerate(tail, start=1)]
    return _assemble(positions, observed, top_k, vocab_size, tail, entropy)


def _in_top(entry: dict[str, Any], top_k: int) -> bool:
    rank = entry.get("rank")
    return rank is None or rank <= top_k


def read_echo(choice: dict[str, Any], ids: Sequence[int], top_k: int, vocab_size: int) -> DocumentScores:
    """Scores from one choice with ``logprobs`` of the echoed prompt."""
    found = choice.get("logprobs") or {}
    names, values, tops = (list(found.get(key) or ()) for key in ("tokens", "token_logprobs", "top_logprobs"))
    # A server that must generate a token appends it to the echo.
    names = _checked(names[: len(ids)], ids, "logprobs.tokens")
    values = _checked(values[: len(ids)], ids, "logprobs.token_logprobs")
    tops = _checked(tops[: len(ids)], ids, "logprobs.top_logprobs")
    for place, (token, name) in enumerate(zip(ids, names, strict=True)):
        if not str(name).startswith(TOKEN_ID):
            raise ServedScoresError(
                f"the server names tokens by text ({name!r}); expected '{TOKEN_ID}N', since several tokens may have "
                "one text. It probably does not know return_tokens_as_token_ids. Fix: use a server that returns "
                "prompt_logprobs (vLLM, spanwise serve) or SGLang."
            )
        if name != f"{TOKEN_ID}{token}":
            raise _other_ids(place, token, [name.removeprefix(TOKEN_ID)])
    observed = [_number(value, place) for place, value in enumerate(values[1:], start=1)]
    positions = []
    for place, top in enumerate(tops[1:], start=1):
        position = [(int(name.removeprefix(TOKEN_ID)), _number(value, place)) for name, value in (top or {}).items()]
        positions.append(sorted(position, key=_falling)[:top_k])
    return _assemble(positions, observed, top_k, vocab_size, None, None)


def read_sglang(answer: dict[str, Any], ids: Sequence[int], top_k: int, vocab_size: int) -> DocumentScores:
    """Scores from one answer of SGLang's ``/generate``."""
    about = answer.get("meta_info") or {}
    tokens = _checked(about.get("input_token_logprobs"), ids, "meta_info.input_token_logprobs")
    tops = _checked(about.get("input_top_logprobs"), ids, "meta_info.input_top_logprobs")
    for place, (token, entry) in enumerate(zip(ids, tokens, strict=True)):
        if entry[1] != token:
            raise _other_ids(place, token, [entry[1]])
    observed = [_number(entry[0], place) for place, entry in enumerate(tokens[1:], start=1)]
    positions = [
        [(int(entry[1]), _number(entry[0], place)) for entry in (top or ())] for place, top in enumerate(tops[1:], 1)
    ]
    return _assemble(positions, observed, top_k, vocab_size, None, None)


def _falling(entry: tuple[int, float]) -> tuple[float, int]:
    return -entry[1], entry[0]


def _assemble(
    positions: list[Position],
    observed: list[float],
    top_k: int,
    vocab_size: int,
    log_tail: list[float] | None,
    entropy: list[float] | None,
) -> DocumentScores:
    # Ids of a head wider than the tokenizer are about nothing: their mass joins the tail.
    kept = [sorted((e for e in position if 0 <= e[0] < vocab_size), key=_falling)[:top_k] for position in positions]
    logp = np.asarray([value for position in kept for _, value in position], dtype=np.float64)
    counts = np.asarray([len(position) for position in kept], dtype=np.int64)
    place = np.repeat(np.arange(len(kept)), counts)
    rest = 1.0 - np.bincount(place, np.exp(logp), minlength=len(kept))
    tail = np.log(np.maximum(rest, LEAST_TAIL_MASS)) if log_tail is None else np.asarray(log_tail, dtype=np.float64)
    return DocumentScores(
        counts=counts,
        ids=np.asarray([token for position in kept for token, _ in position], dtype=np.int64),
        logp=logp.astype(np.float32),
        log_tail=tail.astype(np.float32),
        observed_logp=np.asarray(observed, dtype=np.float32),
        entropy=None if not entropy else np.asarray(entropy, dtype=np.float32),
    )


def _checked(found: Any, ids: Sequence[int], name: str) -> list[Any]:
    """``found`` where it has one entry per token."""
    if not isinstance(found, list):
        raise ServedScoresError(
            f"the server's answer has no {name}; expected one entry per token of the prompt. It probably does not "
            "return prompt log-probabilities (transformers' server and llama.cpp's do not). Fix: serve the model with "
            "vLLM, SGLang or spanwise serve."
        )
    if len(found) != len(ids):
        raise ServedScoresError(
            f"the server's {name} has {len(found)} entries for a prompt of {len(ids)} tokens; expected one per token. "
            "It probably added a start token or cut the prompt. Fix: serve the model with a context at least as long "
            "as teachers.context_length, and without adding special tokens to ids."
        )
    checked: list[Any] = found
    return checked


def _number(value: Any, place: int) -> float:
    if not isinstance(value, (int, float)) or math.isnan(value) or value > 1e-3:
        raise ServedScoresError(
            f"the server gives the log-probability {value!r} at token {place}; expected a number of at most 0. The "
            "server probably returns raw logits. Fix: serve log-probabilities (vLLM: --logprobs-mode raw_logprobs)."
        )
    return min(float(value), 0.0)


def _other_ids(place: int, token: int, found: list[Any]) -> ServedScoresError:
    shown = ", ".join(str(one) for one in found[:4])
    return ServedScoresError(
        f"the server echoes {shown or 'nothing'} at token {place} where {token} was sent; expected the ids that were "
        "sent. It probably changes prompts or has another tokenizer. Fix: name in teachers.tokenizer the tokenizer of "
        "the model that the server serves."
    )
