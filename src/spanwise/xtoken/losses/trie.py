"""PrefixTrie: what prefix KL must know about two vocabularies, as flat integer tables.

Built once per pair of tokenizers. Two questions are asked at every student boundary, and both become one gather:

- *which teacher tokens begin with the first n bytes of token t?* In lexicographic order they are one range of ranks:
  ``prefix_low``, ``prefix_high``, one entry per byte of every teacher token.
- *which is the longest student token that is a prefix of what is left of teacher token t after n bytes?* ``longest``,
  one entry per byte of every teacher token.

Building sorts both vocabularies and walks all suffixes of all teacher tokens through the student's trie at once: time
O(bytes · depth · log), about two seconds for 128k × 152k, memory O(bytes of the teacher's vocabulary), about 20 MB.

Shapes: Vs, Vt vocabularies, M summed bytes of the teacher's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor

from spanwise.spans.table import token_table

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class PrefixTrie:
    """Tables for one pair of tokenizers. Build with :meth:`from_tokenizers` or :meth:`from_bytes`.

    Attributes:
        student_length: bytes per student token; 0 for special and unused ids.
        teacher_length: likewise.
        teacher_start: where each teacher token's entries begin.
        rank: lexicographic rank of each teacher token among those with bytes, -1 for the others.
        prefix_low: entry teacher_start + n - 1: the first rank of the tokens that begin with the token's first n bytes.
        prefix_high: likewise, one past the last.
        longest: entry teacher_start + n: the longest student token that is a prefix of the token without its first n
            bytes, -1 where there is none.
        whole: the student token that receives a teacher token whole: ``longest`` at 0, the partner of a special token
            that has one by role, else -1.
    """

    student_length: Int64[Tensor, " Vs"]
    teacher_length: Int64[Tensor, " Vt"]
    teacher_start: Int64[Tensor, " Vt"]
    rank: Int64[Tensor, " Vt"]
    prefix_low: Int64[Tensor, " M"]
    prefix_high: Int64[Tensor, " M"]
    longest: Int64[Tensor, " M"]
    whole: Int64[Tensor, " Vt"]

    @property
    def student_vocab_size(self) -> int:
        """Vs."""
        return len(self.student_length)

    @property
    def teacher_vocab_size(self) -> int:
        """Vt."""
        return len(self.teacher_length)

    def to(self, device: torch.device | str) -> PrefixTrie:
        """The same tables on another device."""
        return PrefixTrie(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    @classmethod
    def from_bytes(
        cls,
        student: Sequence[bytes],
        teacher: Sequence[bytes],
        special_pairs: Sequence[tuple[int, int]] = (),
    ) -> PrefixTrie:
        """Build from the bytes of every token.

        Args:
            student: bytes per id; empty for special and unused ids.
            teacher: likewise.
            special_pairs: (student id, teacher id) of special tokens that play one role, such as end of text.

        >>> trie = PrefixTrie.from_bytes([b"a", b"b", b"ab"], [b"abb", b"b"])
        >>> trie.whole.tolist(), trie.longest.tolist()
        ([2, 1], [2, 1, 1, 1])
        """
        student_flat, student_start, student_length = _flatten(student)
        flat, start, length = _flatten(teacher)
        order = _sorted_ids(teacher)
        rank = np.full(len(teacher), -1, np.int64)
        rank[order] = np.arange(len(order))
        low, high = _prefix_ranges(flat, start, length, order)
        keys, tokens = _student_edges(student_flat, student_start, student_length, _sorted_ids(student))
        longest = _longest_prefixes(flat, start, length, keys, tokens)
        whole = np.full(len(teacher), -1, np.int64)
        whole[length > 0] = longest[start[length > 0]]
        for student_id, teacher_id in special_pairs:
            whole[teacher_id] = student_id
        tables = (student_length, length, start, rank, low, high, longest, whole)
        return cls(*(torch.from_numpy(table) for table in tables))

    @classmethod
    def from_tokenizers(
        cls, student: Any, teacher: Any, *, special_pairs: Sequence[tuple[int, int]] | None = None
    ) -> PrefixTrie:
        """Build from two tokenizers.

        Args:
            student: anything that has a token table.
            teacher: likewise.
            special_pairs: (student id, teacher id); default: the two ends of text.
        """
        if special_pairs is None:
            student_end, teacher_end = getattr(student, "eos_token_id", None), getattr(teacher, "eos_token_id", None)
            special_pairs = [(student_end, teacher_end)] if student_end is not None and teacher_end is not None else []
        return cls.from_bytes(_ordinary_bytes(student), _ordinary_bytes(teacher), special_pairs)


def _ordinary_bytes(tokenizer: Any) -> list[bytes]:
    """Bytes per id; empty for special tokens and for ids that stand for no bytes."""
    table = token_table(tokenizer)
    ordinary = (table.known & ~table.special).tolist()
    data, bounds = table.flat.numpy().tobytes(), table.offsets.tolist()
    return [data[bounds[i] : bounds[i + 1]] if ordinary[i] else b"" for i in range(table.size)]


def _flatten(tokens: Sequence[bytes]) -> tuple[NDArray[np.uint8], Integers, Integers]:
    length = np.fromiter((len(token) for token in tokens), np.int64, len(tokens))
    flat = np.frombuffer(b"".join(tokens), np.uint8)
    return flat, np.cumsum(length) - length, length


def _sorted_ids(tokens: Sequence[bytes]) -> Integers:
    """Ids of the tokens with bytes, in lexicographic order; equal bytes by id."""
    with_bytes = [i for i, token in enumerate(tokens) if token]
    return np.asarray(sorted(with_bytes, key=lambda i: tokens[i]), np.int64)


def _levels(
    flat: NDArray[np.uint8], start: Integers, length: Integers, order: Integers
) -> Iterator[tuple[int, Integers, NDArray[np.bool_], Integers]]:
    """For each prefix length n: n, the ranks of tokens that long, which of them open a new prefix, each one's prefix.

    Prefixes are numbered through all levels from 1; 0 is the empty prefix.
    """
    prefix = np.zeros(len(order), np.int64)
    ranks = np.arange(len(order))
    known, n = 0, 0
    while True:
        ranks = ranks[length[order[ranks]] > n]
        if not len(ranks):
            return
        byte = flat[start[order[ranks]] + n]
        opens = np.ones(len(ranks), bool)
        opens[1:] = (prefix[ranks][1:] != prefix[ranks][:-1]) | (byte[1:] != byte[:-1])
        number = known + np.cumsum(opens)
        n += 1
        yield n, ranks, opens, number
        prefix[ranks] = number
        known = int(number[-1])


def _prefix_ranges(
    flat: NDArray[np.uint8], start: Integers, length: Integers, order: Integers
) -> tuple[Integers, Integers]:
    low, high = np.zeros(len(flat), np.int64), np.zeros(len(flat), np.int64)
    for n, ranks, opens, number in _levels(flat, start, length, order):
        group = number - number[0]
        first = ranks[opens]
        # Tokens that share a prefix are neighbours in rank, so a group is its first rank and its size.
        last = first + np.bincount(group)
        entry = start[order[ranks]] + n - 1
        low[entry], high[entry] = first[group], last[group]
    return low, high


def _student_edges(
    flat: NDArray[np.uint8], start: Integers, length: Integers, order: Integers
) -> tuple[Integers, Integers]:
    """The student's trie as sorted keys parent · 256 + byte; edge i leads to node i + 1, which ends token
    ``tokens[i]``."""
    keys: list[Any] = []
    tokens: list[Any] = []
    parent = np.zeros(len(order), np.int64)
    for n, ranks, opens, number in _levels(flat, start, length, order):
        ids = order[ranks]
        keys.append((parent[ranks] * 256 + flat[start[ids] + n - 1])[opens])
        ends = np.full(int(opens.sum()), -1, np.int64)
        complete = length[ids] == n
        # Reversed, so that the lowest id of equal tokens is the one that stays.
        ends[(number - number[0])[complete][::-1]] = ids[complete][::-1]
        tokens.append(ends)
        parent[ranks] = number
    empty = np.zeros(0, np.int64)
    return np.concatenate([empty, *keys]), np.concatenate([empty, *tokens])


def _longest_prefixes(
    flat: NDArray[np.uint8], start: Integers, length: Integers, keys: Integers, tokens: Integers
) -> Integers:
    best = np.full(len(flat), -1, np.int64)
    if not len(keys):
        return best
    walker = np.arange(len(flat))
    end = np.repeat(start + length, length)
    node = np.zeros(len(flat), np.int64)
    depth = 0
    while len(walker):
        key = node * 256 + flat[walker + depth]
        edge = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
        found = keys[edge] == key
        walker, edge = walker[found], edge[found]
        token = tokens[edge]
        best[walker[token >= 0]] = token[token >= 0]
        depth += 1
        inside = walker + depth < end[walker]
        walker, node = walker[inside], edge[inside] + 1
    return best
