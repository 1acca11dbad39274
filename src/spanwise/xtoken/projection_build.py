"""Build a projection from two tokenizers: equal bytes, how each side splits the other's tokens, roles of specials.

1. Tokens with equal bytes are exact, weight 1. 2. Every other student token is split by the teacher; its i-th part of n
(at most 4) weighs 0.9·0.1^i, normalised. 3. Every other teacher token is split by the student, which adds the same
weights in the student's rows. 4. Special tokens by role, then by name. 5. Rows are cut to the top k and normalised in
float32. 6. Exact rows are overwritten last, so that nothing of the reverse pass stays in them.

One batched encode per direction; tokens that are not valid UTF-8, and tokens whose encoding does not give their bytes
back (dummy prefixes, normalisers, spelled-out specials), are split by the longest-match rule on bytes. COO until the
top-k: no dense matrix. Seconds for 128k × 152k, O(tokens of both vocabularies) memory.

Shapes: Vs, Vt vocabularies, K = top_k.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spanwise.spans.profile import BOS, EOS, TURN_END, Profile, profile_of
from spanwise.spans.table import token_table
from spanwise.xtoken.projection import Entries, Projection, coalesce
from spanwise.xtoken.projection_file import FORMAT, tokenizer_name

MOST_PARTS = 4
NAME_LIKENESS = 0.85
NOT_EXACT = 1 - 2**-24
Progress = Callable[[str], None]


@dataclass(frozen=True)
class _Side:
    """One tokenizer: its bytes per id (empty for specials and unused ids), and where each byte string lives."""

    tokenizer: Any
    profile: Profile
    tokens: list[bytes]
    first: dict[bytes, int]
    longest: int


def build_projection(student: Any, teacher: Any, *, top_k: int = 8, progress: Progress | None = None) -> Projection:
    """The projection from ``student``'s tokens to ``teacher``'s.

    Args:
        student: a tokenizer.
        teacher: a tokenizer.
        top_k: entries kept per row; more than the teacher's vocabulary is cut to it.
        progress: called with a few words before each step.

    Returns:
        A projection whose metadata names both tokenizers by fingerprint.
    """
    if top_k < 1:
        raise ValueError(
            f"top_k is {top_k}; expected at least 1. A row without entries projects to nothing. Fix: 8 is a good value."
        )
    say = progress or (lambda words: None)
    say("reading both vocabularies")
    near, far = _side(student), _side(teacher)
    exact = _exact_pairs(near, far)
    say(f"{len(exact):,} tokens have equal bytes; splitting the others")
    reached = set(exact.values())
    rows: list[int] = []
    columns: list[int] = []
    weights: list[float] = []
    lonely = [i for i, token in enumerate(near.tokens) if token and i not in exact]
    for i, parts in zip(lonely, _split([near.tokens[i] for i in lonely], far), strict=True):
        rows += [i] * len(parts)
        columns += parts
        weights += _weights(len(parts))
    say("splitting the teacher's tokens")
    lonely = [j for j, token in enumerate(far.tokens) if token and j not in reached]
    for j, parts in zip(lonely, _split([far.tokens[j] for j in lonely], near), strict=True):
        rows += parts
        columns += [j] * len(parts)
        weights += _weights(len(parts))
    say("joining")
    entries = coalesce(
        torch.tensor(rows, dtype=torch.long),
        torch.tensor(columns, dtype=torch.long),
        torch.tensor(weights),
        len(far.tokens),
    )
    indices, likelihoods = _heaviest(entries, len(near.tokens), min(top_k, max(1, len(far.tokens))))
    # A lone entry of exactly 1 would read as an exact row ("oo" is the letter "o" twice): keep it one step below.
    likelihoods = likelihoods.clamp(max=NOT_EXACT)
    exact.update(_special_pairs(near, far))
    if exact:
        ids = torch.tensor(sorted(exact), dtype=torch.long)
        indices[ids], likelihoods[ids] = -1, 0.0
        indices[ids, 0], likelihoods[ids, 0] = torch.tensor([exact[i] for i in ids.tolist()]), 1.0
    metadata = {
        "format": FORMAT,
        "student_fingerprint": near.profile.table.fingerprint,
        "teacher_fingerprint": far.profile.table.fingerprint,
        "student_name": tokenizer_name(student),
        "teacher_name": tokenizer_name(teacher),
        "teacher_vocab_size": str(len(far.tokens)),
        "top_k": str(top_k),
    }
    return Projection(indices, likelihoods, len(far.tokens), metadata)


def _side(tokenizer: Any) -> _Side:
    table = token_table(tokenizer)
    ordinary = (table.known & ~table.special).tolist()
    data, bounds = table.flat.numpy().tobytes(), table.offsets.tolist()
    tokens = [data[bounds[i] : bounds[i + 1]] if ordinary[i] else b"" for i in range(table.size)]
    order: Sequence[int] = range(len(tokens))
    if table.kind == "sentencepiece":
        # Byte-fallback pieces come first there and repeat one-byte letters; the letter is what the tokenizer emits.
        order = order[::-1]
    first: dict[bytes, int] = {}
    for i in order:
        if tokens[i]:
            first.setdefault(tokens[i], i)
    return _Side(tokenizer, profile_of(tokenizer, table), tokens, first, max(map(len, first), default=0))


def _exact_pairs(near: _Side, far: _Side) -> dict[int, int]:
    return {i: far.first[token] for i, token in enumerate(near.tokens) if token and token in far.first}


def _weights(parts: int) -> list[float]:
    raw = [0.9 * 0.1**i for i in range(parts)]
    return [weight / sum(raw) for weight in raw]


def _split(tokens: Sequence[bytes], side: _Side) -> list[list[int]]:
    """How ``side`` writes each byte string, at most its first ``MOST_PARTS`` tokens."""
    texts: list[str] = []
    places: list[int] = []
    for place, token in enumerate(tokens):
        try:
            text = token.decode("utf-8")
        except UnicodeDecodeError:
            continue
        texts.append(_without_dummy(text, side.profile.dummy))
        places.append(place)
    out: list[list[int] | None] = [None] * len(tokens)
    for place, ids in zip(places, _encode(side.tokenizer, texts), strict=True):
        out[place] = _suffix(ids, tokens[place], side)
    return [
        (_longest_match(token, side) if ids is None else ids)[:MOST_PARTS]
        for token, ids in zip(tokens, out, strict=True)
    ]


def _without_dummy(text: str, dummy: str) -> str:
    """A text whose encoding ends with the tokens of ``text`` although a space is put in front."""
    if dummy == "none" or (dummy == "unless_space" and text.startswith(" ")):
        return text
    return text[1:] if dummy == "always" and text.startswith(" ") and len(text) > 1 else "\n" + text


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    if not callable(tokenizer) or not texts:
        return [[] for _ in texts]
    encoded: Any = tokenizer(texts, add_special_tokens=False, padding=False, truncation=False)
    return [list(ids) for ids in encoded["input_ids"]]


def _suffix(ids: list[int], token: bytes, side: _Side) -> list[int] | None:
    """The last ids whose bytes are exactly ``token``; None where there are none such."""
    left = len(token)
    for place in range(len(ids) - 1, -1, -1):
        part = side.tokens[ids[place]] if ids[place] < len(side.tokens) else b""
        if not part or len(part) > left or token[left - len(part) : left] != part:
            return None
        left -= len(part)
        if left == 0:
            return ids[place:]
    return None


def _longest_match(token: bytes, side: _Side) -> list[int]:
    """Greedy split by bytes; bytes that no token begins with are left out."""
    ids: list[int] = []
    at = 0
    while at < len(token) and len(ids) < MOST_PARTS:
        for end in range(min(len(token), at + side.longest), at, -1):
            found = side.first.get(token[at:end])
            if found is not None:
                ids.append(found)
                at = end
                break
        else:
            at += 1
    return ids


def _heaviest(entries: Entries, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Top k of every row, normalised; ties by lowest teacher id."""
    order = entries.weight.argsort(descending=True, stable=True)
    order = order[entries.student[order].argsort(stable=True)]
    student, teacher, weight = entries.student[order], entries.teacher[order], entries.weight[order]
    sizes = torch.bincount(student, minlength=rows)
    slot = torch.arange(len(student)) - (sizes.cumsum(0) - sizes)[student]
    kept = slot < k
    indices = torch.full((rows, k), -1, dtype=torch.long)
    likelihoods = torch.zeros(rows, k)
    indices[student[kept], slot[kept]] = teacher[kept]
    likelihoods[student[kept], slot[kept]] = weight[kept]
    return indices, likelihoods / likelihoods.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def _special_pairs(near: _Side, far: _Side) -> dict[int, int]:
    """Special tokens of both sides that play one role, or else have one name."""
    pairs: dict[int, int] = {}
    for role in (EOS, BOS, TURN_END):
        partners = (far.profile.roles & role).nonzero()[0].tolist()
        for i in (near.profile.roles & role).nonzero()[0].tolist():
            if partners:
                pairs.setdefault(i, _same_content(near, i, far, partners) or partners[0])
    for name in ("pad_token_id", "unk_token_id", "mask_token_id"):
        i, j = getattr(near.tokenizer, name, None), getattr(far.tokenizer, name, None)
        if isinstance(i, int) and isinstance(j, int) and i < len(near.tokens) and j < len(far.tokens):
            pairs.setdefault(i, j)
    names = {_name(far, j): j for j in far.profile.special.nonzero()[0].tolist()}
    names.pop("", None)
    for i in near.profile.special.nonzero()[0].tolist():
        wanted = _name(near, i)
        if i not in pairs and wanted:
            close = difflib.get_close_matches(wanted, names, n=1, cutoff=NAME_LIKENESS)
            if close:
                pairs[i] = names[close[0]]
    return {i: j for i, j in pairs.items() if not near.tokens[i]}


def _same_content(near: _Side, i: int, far: _Side, partners: list[int]) -> int | None:
    content = near.profile.table.bytes_of(i)
    return next((j for j in partners if far.profile.table.bytes_of(j) == content), None)


def _name(side: _Side, token_id: int) -> str:
    """A special token's name without its brackets; empty for numbered fillers, which resemble one another by
    accident."""
    name = side.profile.table.bytes_of(token_id).decode("utf-8", "replace").lower()
    if re.search(r"reserved|unused|placeholder|extra|\d", name):
        return ""
    return re.sub(r"[^a-z]+", "_", name).strip("_")
