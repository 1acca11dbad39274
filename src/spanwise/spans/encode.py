"""Ask a tokenizer without leaving a trace: plain encodings, and what a call puts around a text.

A tokenizer's call writes padding and truncation into its Rust part, where they stay and would cut a question. Both are
taken off for as long as a question lasts and put back after it; copying the Rust part instead would cost half a second
for 150k ids. O(characters).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# What a tokenizer is asked to encode so that its kind and its vocabulary can be seen; any scripts will do.
PROBE = "Hi there, 12 é 日本"


@contextmanager
def state_kept(tokenizer: Any) -> Iterator[Any]:
    """The Rust part of a tokenizer, or None; its truncation and padding are afterwards what they were."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode") or not hasattr(backend, "enable_truncation"):
        yield None
        return
    truncation, padding = backend.truncation, backend.padding
    try:
        yield backend
    finally:
        if backend.truncation != truncation:
            backend.no_truncation()
            if truncation is not None:
                backend.enable_truncation(**truncation)
        if backend.padding != padding:
            backend.no_padding()
            if padding is not None:
                backend.enable_padding(**padding)


@contextmanager
def whole_texts(tokenizer: Any) -> Iterator[Any]:
    """The Rust part of a tokenizer, or None; while it lasts, texts are neither cut nor padded."""
    with state_kept(tokenizer) as backend:
        if backend is not None:
            backend.no_truncation()
            backend.no_padding()
        yield backend


def encode_plain(tokenizer: Any, text: str) -> list[int] | None:
    """The ids of a text without special tokens, or None where the object does not encode."""
    return _encode(tokenizer, text, False)


def inserted_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What a plain call puts before and after a text; two empty lists for a tokenizer that cannot encode."""
    with_them, without = _encode(tokenizer, "a", True), _encode(tokenizer, "a", False)
    if not with_them or not without or len(with_them) < len(without):
        return [], []
    for start in range(len(with_them) - len(without) + 1):
        if with_them[start : start + len(without)] == without:
            return with_them[:start], with_them[start + len(without) :]
    return [], []


def same_ids(one: Any, other: Any) -> bool:
    """Whether two tokenizers make the same ids of a probe text, or one cannot be asked.

    Tells two vocabularies apart, and does not mind that one has a few more added tokens than the other.
    """
    if one is other:
        return True
    ids = [encode_plain(tokenizer, PROBE) for tokenizer in (one, other)]
    return None in ids or ids[0] == ids[1]


def _encode(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int] | None:
    with whole_texts(tokenizer) as backend:
        if backend is not None:
            return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
    encode = getattr(tokenizer, "encode", None)
    if encode is None:
        return None
    try:
        return list(encode(text, add_special_tokens=add_special_tokens))
    except (TypeError, NotImplementedError, AttributeError, KeyError, ValueError):
        return None  # a stand-in for a tokenizer that has the name and not the function
