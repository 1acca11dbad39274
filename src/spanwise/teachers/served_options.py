"""What may be said about a server that teaches: names and values, checked before it is asked for anything."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

Api = Literal["vllm", "sglang", "echo"]

# Options that are numbers → the type, what is too small, the largest, and the same in words.
NUMBERS: dict[str, tuple[type, float, float, str]] = {
    "top_k": (int, 0, 65_535, "a whole number from 1 to 65,535"),
    "temperature": (float, 0, math.inf, "a number above 0"),
    "concurrency": (int, 0, 1_024, "a whole number from 1 to 1,024"),
    "timeout": (float, 0, math.inf, "seconds above 0"),
    "patience": (float, -1e-9, math.inf, "seconds of 0 or more"),
    "mass": (float, 0, 1, "a number above 0 and up to 1"),
}
OPTIONS = (*NUMBERS, "model", "token", "api", "cache")


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of :class:`~spanwise.teachers.served.ServedTeacher`; unknown names and impossible values are refused."""
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ValueError(
            f"teachers.options has {', '.join(unknown)}; expected names among {', '.join(OPTIONS)}. The option is "
            "probably misspelt, or one of from_pretrained, which a server does not take. Fix: correct or remove it."
        )
    for name, value in options.items():
        expected = _expected(name, value)
        if expected is not None:
            raise ValueError(
                f"teachers.options.{name} is {value!r}; expected {expected}. It was probably mistyped, or meant for "
                "another option. Fix: correct it, or leave it out."
            )
    return dict(options)


def _expected(name: str, value: Any) -> str | None:
    """What a value should have been; None where it is fine."""
    if name in NUMBERS:
        kind, above, most, words = NUMBERS[name]
        is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        return None if is_number and above < value <= most else words
    if value is None:
        return None
    if name == "api":
        return None if value in get_args(Api) else f"one of {', '.join(get_args(Api))}"
    return None if isinstance(value, (str, os.PathLike) if name == "cache" else str) else "a word"


def refuse_several_writers(options: Mapping[str, Any], processes: int) -> None:
    """Refuse, before a server is asked, a run whose processes would all keep answers in one folder."""
    if options.get("cache") is not None and processes > 1:
        raise ValueError(
            f"teachers.options.cache is '{options['cache']}' in a run of {processes} processes; expected one process, "
            "since a cache has one writer. The recipe was probably written for one. Fix: leave options.cache out and "
            "build the cache before the run: spanwise cache RECIPE; or run it in one process."
        )
