"""Run the server of prompt log-probabilities: load a model, bind a socket, say where, serve until told to stop."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable
from typing import Any

from spanwise.teachers.fingerprint import model_fingerprint
from spanwise.teachers.local import LocalTeacher, move_to_gpu
from spanwise.teachers.server import Served, ServeLimits, make_app

TOKEN_VARIABLE = "SPANWISE_TOKEN"


def serve(
    model: str,
    *,
    tokenizer: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    max_logprobs: int = 64,
    max_request_bytes: int = 4 << 20,
    max_batch_tokens: int = 4_096,
    dtype: str = "auto",
    ready: Callable[[dict[str, Any]], None],
) -> None:
    """Serve ``model`` until interrupted.

    Args:
        model: hub name, folder or GGUF file.
        tokenizer: default: the model's.
        host: other machines can reach it only where this is not a loopback address; then a token is required.
        port: 0 takes a free one.
        token: what clients must send; default: the variable SPANWISE_TOKEN.
        max_logprobs: log-probabilities per position that a client may ask for.
        max_request_bytes: of one request.
        max_batch_tokens: padded tokens per forward.
        dtype: of the weights, as in from_pretrained.
        ready: called once with {url, model} when the port answers.
    """
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    if token is None and not is_loopback(host):
        raise ValueError(
            f"the server was told to listen on {host} without a token; expected a token wherever other machines can "
            f"reach it. The option was probably left out. Fix: pass --token, set {TOKEN_VARIABLE}, or listen on "
            "127.0.0.1."
        )
    uvicorn = _uvicorn()
    # The port is taken before the model is loaded: a wrong one is said at once.
    with _bind(host, port) as listening:
        limits = (max_logprobs, max_request_bytes, max_batch_tokens)
        served = load_served(model, tokenizer, dtype, limits)
        app = make_app(served, token)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        shown = f"[{host}]" if ":" in host else host
        ready({"url": f"http://{shown}:{listening.getsockname()[1]}", "model": served.name})
        server.run(sockets=[listening])


def load_served(model: str, tokenizer: str | None, dtype: str, limits: tuple[int, int, int]) -> Served:
    """The model and tokenizer that a server needs, on the GPU where there is one."""
    from spanwise.loading import load_model, load_tokenizer
    from spanwise.spans.table import tokenizer_fingerprint

    loaded: Any = load_model(model, dtype=dtype)
    move_to_gpu(loaded)
    pieces: Any = load_tokenizer(tokenizer or model)
    teacher = LocalTeacher(loaded, vocab_size=len(pieces), name=model)
    top_k, request_bytes, batch_tokens = limits
    context_length = teacher.context_length or 1 << 20
    about = {
        "model": model_fingerprint(loaded),
        "tokenizer": tokenizer_fingerprint(pieces),
        "vocab_size": len(pieces),
        "max_logprobs": min(top_k, len(pieces)),
    }
    bounds = ServeLimits(context_length, top_k=top_k, request_bytes=request_bytes, batch_tokens=batch_tokens)
    return Served(teacher, pieces, model, bounds, about, loaded.device)


def is_loopback(host: str) -> bool:
    """True where only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ValueError(
            f"port {port} of {host} cannot be listened on ({error.strerror}); expected a free port of this machine. "
            "Another server probably has it. Fix: pass another --port, or --port 0 for any free one."
        ) from None
    listening.listen(128)
    return listening


def _uvicorn() -> Any:
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"serving needs the package {error.name}, which is not installed. Fix: pip install 'spanwise[serve]'."
        ) from error
    return uvicorn
