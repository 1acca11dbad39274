"""What every client checks about a call before it touches its transport, so that all of them refuse alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spanwise.dataplane.errors import SampleConflict, SchemaMismatch, few
from spanwise.dataplane.objects import encode_tags
from spanwise.dataplane.schema import Columns, Field, as_field


def check_registration(
    partition: str, fields: Sequence[Field | str], num_samples: int, tasks: Sequence[str]
) -> list[Field]:
    """The declared fields, with dtypes by name."""
    declared = [] if isinstance(fields, str) else [as_field(entry) for entry in fields]
    declared = [replace(entry, dtype=entry.dtype_name) for entry in declared]
    names = [entry.name for entry in declared]
    repeated = len(set(names)) != len(names) or len(set(tasks)) != len(tasks)
    countable = isinstance(num_samples, int) and num_samples > 0
    if (
        not partition
        or not names
        or not countable
        or repeated
        or isinstance(tasks, str)
        or not _is_text([partition, *names, *tasks])
    ):
        raise SchemaMismatch(
            f"register_partition was given name {partition!r}, fields {fields!r}, num_samples={num_samples} and tasks "
            f"{tasks!r}; expected a name, at least one field, at least one sample, and no name twice. One was probably "
            "left empty. Fix: pass lists of distinct names."
        )
    return declared


def check_put_request(
    ids: Sequence[str],
    fields: Columns | None,
    tags: Sequence[Mapping[str, Any]] | None,
    on_conflict: str,
) -> tuple[list[str], list[dict[str, Any]], list[dict[str, bytes]]]:
    """Distinct string ids, one dict of tags per id, and the same tags as they may travel."""
    names = list(ids)
    if on_conflict not in ("replace", "error"):
        raise ValueError(
            f"on_conflict is {on_conflict!r}; expected 'replace' or 'error'. It was probably misspelled. Fix: use one."
        )
    if isinstance(ids, str) or not names or not all(names) or not _is_text(names):
        raise SchemaMismatch(
            f"put_samples was given ids {few(names)!r}; expected a list of non-empty strings of valid Unicode. "
            "Data-set indices were probably passed. Fix: str(index), or let kv_first_write mint ids."
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise SampleConflict(
            f"ids {few(twice)} occur twice in one put; expected each once. The repeats of a prompt probably share "
            "one. Fix: give every sample its own id."
        )
    if fields is None and tags is None:
        raise SchemaMismatch("put_samples was given neither fields nor tags; expected at least one. Fix: pass columns.")
    given: list[Any] = [{} for _ in names] if tags is None else list(tags)
    if len(given) != len(names) or not all(isinstance(tag, Mapping) for tag in given):
        raise SchemaMismatch(
            f"{len(given)} tags of types {few({type(tag).__name__ for tag in given})} were given for {len(names)} ids; "
            "expected one dict per id. They were probably selected apart. Fix: pass tags in the order of the ids."
        )
    each = [dict(tag) for tag in given]
    return names, each, [encode_tags(tag, row) for row, tag in enumerate(each)]


def check_claim(fields: Sequence[str], batch_size: int, min_batch: int | None, lease_s: float | int | None) -> int:
    """The least number of samples a claim accepts."""
    least = batch_size if min_batch is None else min_batch
    if (
        not all(isinstance(number, int) for number in (batch_size, least))
        or batch_size < 1
        or not 1 <= least <= batch_size
        or (lease_s is not None and lease_s <= 0)
        or isinstance(fields, str)
        or not fields
    ):
        raise ValueError(
            f"claim_meta was given required_fields={fields!r}, batch_size={batch_size}, min_batch={min_batch} and "
            f"lease_s={lease_s}; expected a list of at least one name, 1 <= min_batch <= batch_size and a positive "
            "lease. Fix: correct the one that is off."
        )
    return least


def check_selection(fields: Sequence[str]) -> list[str]:
    """The fields to read, as a list; a single name is refused, since it would be read letter by letter."""
    if isinstance(fields, str):
        raise SchemaMismatch(
            f"select_fields is {fields!r}; expected a list of names. A single name was probably passed by itself. "
            f"Fix: [{fields!r}]."
        )
    return list(fields)


def _is_text(names: Sequence[Any]) -> bool:
    """Whether all names can travel: strings without lone surrogates."""
    try:
        "".join(names).encode()
    except (TypeError, UnicodeEncodeError):
        return False
    return True
