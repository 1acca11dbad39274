"""Masking for masked models: transformers' DataCollatorForLanguageModeling beside our collator.

Theirs hides a fixed share, ours a share drawn per row as masked diffusion asks; both are set to hide half on average.
Besides seconds it is asked what decides which places a row hides: the batches before it, or its place in the epoch.
"""

from __future__ import annotations

from benchmarks.peer_comparisons.row import Row, middle, plain, ratio, releases
from benchmarks.peer_process import Side, peer_python, pinned

PINS = [*pinned("torch", "transformers", "tokenizers", "accelerate", "datasets"), "trl==1.16.0"]


def compare(quick: bool) -> list[Row]:
    """Seconds of a pass over 512 rows, the share hidden, and what can be repeated."""
    python = peer_python("trl", PINS)
    ours = Side("peer_sides/masking_ours.py")
    theirs = Side("peer_sides/masking_transformers.py", python)
    with ours, theirs:
        said = releases(theirs.ask("versions", packages=["transformers", "torch"]))
        rows = []
        for size in (8,) if quick else (8, 64):
            own: list[dict[str, float]] = []
            other: list[dict[str, float]] = []
            for _ in range(2 if quick else 5):
                own += ours.ask("time", batch_size=size, repeats=2)
                other += theirs.ask("time", batch_size=size, repeats=2)
            context = f"512 rows of 16 to 512 tokens in batches of {size}; {said}"
            told = middle(own, "seconds"), middle(other, "seconds")
            rows.append(ratio("collating, ours / transformers", *told, "s of CPU", context))
        for name, side in (("ours", ours), ("transformers", theirs)):
            share = side.ask("share")
            context = f"2,048 rows, half asked for; of begin and end tokens {share['ends']:.3f}; {said}"
            rows.append(plain(f"share of tokens hidden, {name}", round(share["share"], 4), "", context))
            for what, value in side.ask("repeatable").items():
                context = f"share of 64 rows, one seed; {said}"
                rows.append(plain(f"rows that hide the same places {what}, {name}", value, "", context))
    return rows
