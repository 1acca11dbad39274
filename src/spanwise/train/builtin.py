"""Text that is always there, for the demo, the recipes and the tests.

- ``builtin:python-docs``: the pages of Python's built-in help, 465 kB of prose in every CPython (PSF licence).
- ``builtin:tales``: 47 tales of the Grimms (translated by E. Taylor and M. Edwardes, and by M. Hunt, 1884) and of
  Andersen (H. P. Paull, 1872), 380 kB, in the public domain; the file lies in ``corpora/``.

``:eval`` behind a name gives the held-out documents: every eighth page, every fourth tale, whole. Pages of the help
repeat parts of each other, so training leaves out every document that shares ``SHARED_WORDS`` words in a row with a
held-out one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

PYTHON_DOCS = "builtin:python-docs"
TALES = "builtin:tales"
HELD_OUT = ":eval"
TALES_FILE = Path(__file__).with_name("corpora") / "tales.jsonl"
SHARED_WORDS = 12


def builtin_documents(name: str) -> list[str]:
    """The documents of a built-in corpus, training or held-out ones.

    >>> set(builtin_documents("builtin:tales")) & set(builtin_documents("builtin:tales:eval"))
    set()
    """
    corpus, wants_held_out = name.removesuffix(HELD_OUT), name.endswith(HELD_OUT)
    if corpus not in (PYTHON_DOCS, TALES):
        raise ValueError(
            f"there is no built-in corpus '{name}'; expected {PYTHON_DOCS} or {TALES}, with {HELD_OUT} behind it for "
            "the held-out documents. The name is probably misspelt. Fix: use one of these."
        )
    trained, held_out = _split(corpus)
    return list(held_out if wants_held_out else trained)


@cache
def _split(corpus: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if corpus == PYTHON_DOCS:
        from pydoc_data.topics import topics

        documents, every = [topics[page] for page in sorted(topics) if topics[page].strip()], 8
    else:
        lines = TALES_FILE.read_text(encoding="utf-8").splitlines()
        documents, every = [json.loads(line)["text"] for line in lines], 4
    held_out = documents[every - 1 :: every]
    seen = set().union(*map(word_runs, held_out))
    others = (text for place, text in enumerate(documents) if place % every != every - 1)
    return tuple(text for text in others if not seen & word_runs(text)), tuple(held_out)


def word_runs(text: str) -> set[tuple[str, ...]]:
    """Every ``SHARED_WORDS`` words in a row, however they are spaced."""
    words: Sequence[str] = text.split()
    return {tuple(words[start : start + SHARED_WORDS]) for start in range(len(words) - SHARED_WORDS + 1)}
