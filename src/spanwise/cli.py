"""The command line. Every verb calls a room; what a verb does is written there.

Standard output carries the result (with ``--json`` exactly one object), standard error everything else. Exit code 2
means the user's input, 1 that the run failed.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import typer

app = typer.Typer(
    name="spanwise",
    help="Train language models on things that do not match: tokenizers, lengths, modalities.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

# What a mistake in the input raises; everything else is a run that failed.
INPUT_ERRORS = (ValueError, FileNotFoundError, FileExistsError, IsADirectoryError, PermissionError, ModuleNotFoundError)


def print_json(result: dict[str, Any]) -> None:
    """The one object that a verb prints under ``--json``."""
    sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    words = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in words
    try:
        # Under --json a library's stray print must not reach the one object on standard output.
        code = app(words, standalone_mode=False)
    except typer.Exit as leave:
        code = leave.exit_code
    except Exception as error:
        code = 2 if isinstance(error, INPUT_ERRORS) or hasattr(error, "exit_code") else 1
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        named = f"{type(error).__name__}: {message}"
        if as_json:
            print_json({"error": named})
        sys.stderr.write(f"{named}\n")
    except KeyboardInterrupt:
        code = 130
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.exit(code or 0)
