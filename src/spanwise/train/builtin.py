"""Text that is always there, for the demo, the recipes and the tests.

- ``builtin:python-docs``: the pages of Python's built-in help, 465 kB of prose in every CPython (PSF licence).
- ``builtin:tales``: 47 tales of the Grimms (translated by E. Taylor and M. Edwardes, and by M. Hunt, 1884) and of
  Andersen (H. P. Paull, 1872), 380 kB, in the public domain; the file lies in ``corpora/``.

``:eval`` behind a name gives the held-out documents: every eighth page, every fourth tale, whole, never trained on.
"""

from __future__ import annotations

import json
from pathlib import Path

PYTHON_DOCS = "builtin:python-docs"
TALES = "builtin:tales"
HELD_OUT = ":eval"
TALES_FILE = Path(__file__).with_name("corpora") / "tales.jsonl"


def builtin_documents(name: str) -> list[str]:
    """The documents of a built-in corpus, training or held-out ones.

    >>> set(builtin_documents("builtin:tales")) & set(builtin_documents("builtin:tales:eval"))
    set()
    """
    corpus, wants_held_out = name.removesuffix(HELD_OUT), name.endswith(HELD_OUT)
    if corpus == PYTHON_DOCS:
        from pydoc_data.topics import topics

        documents, every = [topics[page] for page in sorted(topics) if topics[page].strip()], 8
    elif corpus == TALES:
        lines = TALES_FILE.read_text(encoding="utf-8").splitlines()
        documents, every = [json.loads(line)["text"] for line in lines], 4
    else:
        raise ValueError(
            f"there is no built-in corpus '{name}'; expected {PYTHON_DOCS} or {TALES}, with {HELD_OUT} behind it for "
            "the held-out documents. The name is probably misspelt. Fix: use one of these."
        )
    return [text for place, text in enumerate(documents) if (place % every == every - 1) == wants_held_out]
