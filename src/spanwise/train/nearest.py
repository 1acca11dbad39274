"""The name that was probably meant, for errors. O(known names)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A clause that follows an error about a name; empty where nothing is near.

    >>> did_you_mean("lerning_rate", ["learning_rate", "seed"])
    "; did you mean 'learning_rate'?"
    >>> did_you_mean("x", ["learning_rate"])
    ''
    """
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""
