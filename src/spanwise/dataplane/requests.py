"""What every client checks about a call before it touches its transport, so that all of them refuse alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spanwise.dataplane.errors import SampleConflict, SchemaMismatch, few
from spanwise.dataplane.objects import encode_object
from spanwise.dataplane.schema import Columns, Field, as_field


def check_registration(
    partition: str, fields: Sequence[Field | str], num_samples: int, tasks: Sequence[str]
) -> list[Field]:
    """The declared fields, with dtypes by name."""
    declared = [as_field(entry) for entry in fields]
    declared = [replace(entry, dtype=entry.dtype_name) for entry in declared]
    names = [entry.name for entry in declared]
    repeated = len(set(names)) != len(names) or len(set(tasks)) != len(tasks)
    if not partition or not names or num_samples < 1 or repeated or isinstance(tasks, str):
        raise SchemaMismatch(
            f"register_partition was given name {partition!r}, fields {names}, num_samples={num_samples} and tasks "
            f"{tasks!r}; expected a name, at least one field, at least one sample, and no name twice. One was probably "
            "left empty. Fix: pass lists of distinct names."
        )
    return declared


def check_put_request(
    ids: Sequence[str],
    fields: Columns | None,
    tags: Sequence[Mapping[str, Any]] | None,
    on_conflict: str,
) -> tuple[list[str], list[dict[str, Any]]]:
    """Distinct string ids and one dict of tags per id."""
    names = list(ids)
    if on_conflict not in ("replace", "error"):
        raise ValueError(
            f"on_conflict is {on_conflict!r}; expected 'replace' or 'error'. It was probably misspelled. Fix: use one."
        )
    if isinstance(ids, str) or not names or not all(isinstance(name, str) and name for name in names):
        raise SchemaMismatch(
            f"put_samples was given ids {few(names)!r}; expected a list of non-empty strings. Data-set indices were "
            "probably passed. Fix: str(index), or let kv_first_write mint ids."
        )
    twice = [name for name in set(names) if names.count(name) > 1] if len(set(names)) < len(names) else []
    if twice:
        raise SampleConflict(
            f"ids {few(twice)} occur twice in one put; expected each once. The repeats of a prompt probably share "
            "one. Fix: give every sample its own id."
        )
    if fields is None and tags is None:
        raise SchemaMismatch("put_samples was given neither fields nor tags; expected at least one. Fix: pass columns.")
    each = [{} for _ in names] if tags is None else [dict(tag) for tag in tags]
    if len(each) != len(names):
        raise SchemaMismatch(
            f"{len(each)} tags were given for {len(names)} ids; expected one dict per id. They were probably selected "
            "apart. Fix: pass tags in the order of the ids."
        )
    for row, tag in enumerate(each):
        encode_object(tag, field="tags", row=row)
    return names, each


def check_claim(fields: Sequence[str], batch_size: int, min_batch: int | None, lease_s: float | int | None) -> int:
    """The least number of samples a claim accepts."""
    least = batch_size if min_batch is None else min_batch
    if (
        batch_size < 1
        or not 1 <= least <= batch_size
        or (lease_s is not None and lease_s <= 0)
        or isinstance(fields, str)
    ):
        raise ValueError(
            f"claim_meta was given required_fields={fields!r}, batch_size={batch_size}, min_batch={min_batch} and "
            f"lease_s={lease_s}; expected a list of names, 1 <= min_batch <= batch_size and a positive lease. "
            "Fix: correct the one that is off."
        )
    return least
