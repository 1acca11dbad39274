"""The limits of a one-machine plane: checked when it is made, compared when another client joins."""

from __future__ import annotations

from typing import Any

from spanwise.dataplane.errors import PartitionConflict


def plane_settings(max_bytes: int | None, max_rows: int | None, when_full: str) -> dict[str, Any]:
    """The settings as one dict."""
    limits = [limit for limit in (max_bytes, max_rows) if limit is not None]
    if any(limit < 1 for limit in limits) or when_full not in ("block", "raise"):
        raise ValueError(
            f"the plane was given max_bytes={max_bytes}, max_rows={max_rows}, when_full={when_full!r}; expected "
            "positive limits (or None) and 'block' or 'raise'. Fix: correct the one that is off."
        )
    return {"max_bytes": max_bytes, "max_rows": max_rows, "when_full": when_full}


def same_settings(url: str, existing: dict[str, Any], wanted: dict[str, Any]) -> None:
    """A client that asks for nothing takes the plane as it is; one that asks for something else is refused."""
    if wanted not in ({"max_bytes": None, "max_rows": None, "when_full": "block"}, existing):
        raise PartitionConflict(
            f"{url} exists with {existing} and was opened again with {wanted}; expected the same settings. Another run "
            "probably uses the name. Fix: choose another name, or leave the limits to the first client."
        )
