"""Token tables: which bytes every id of a tokenizer stands for.

One table per tokenizer: the bytes of all ids laid end to end, and offsets. It is built by looking at what the
tokenizer does (its pieces, and what it makes of a probe text), not at its configuration, so fast, slow and
hand-written tokenizers work alike; ``convert_ids_to_tokens`` is all that is needed. ``<0xNN>`` is a byte where the
pieces are SentencePiece's, ▁ is a space, GPT-2's alphabet is undone, ``##`` is dropped.

Built once in O(total bytes), about 0.3 s for 150k ids; 2–4 MB. The columns are torch tensors so that worker processes
share them rather than copy them.

Shapes: V ids of the tokenizer (the largest one plus one), N bytes of all ids.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from spanwise.spans.encode import PROBE, encode_plain, inserted_ids

Kind = Literal["byte_level", "sentencepiece", "wordpiece", "plain"]

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>\Z")
# Letters of five rare scripts: a vocabulary that spells every one of them spells them in bytes.
_RARE = "\U00013000 \U00012000 \U00010380 \U0001f0a1 \u12a5"
_LARGEST_VOCABULARY = 1 << 22


@dataclass(frozen=True, eq=False)
class TokenTable:
    """The bytes of every id.

    Attributes:
        kind: how pieces are written: GPT-2's byte alphabet, SentencePiece's ▁, WordPiece's ``##``, or as they are.
        flat: the bytes of all ids, one after another.
        offsets: id ``i`` owns ``flat[offsets[i]:offsets[i + 1]]``; an id without a piece owns nothing.
        special: control tokens (BOS, EOS, turn markers, what a post-processor inserts). Their bytes are their content:
            what they stand for when a text spells them out.
        known: the bytes are what the id stands for. False for ids without a piece, and for the unknown token where it
            stands for text that the tokenizer does not know.
        fingerprint: see :func:`tokenizer_fingerprint`.
    """

    kind: Kind
    flat: UInt8[Tensor, " N"]
    offsets: Int64[Tensor, " V1"]
    special: Bool[Tensor, " V"]
    known: Bool[Tensor, " V"]
    fingerprint: str

    @property
    def size(self) -> int:
        """Number of ids, gaps included."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64[Tensor, " V"]:
        """Bytes per id."""
        return self.offsets.diff()

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one id; empty for ids beyond the table, which a padded head may have."""
        if not 0 <= token_id < self.size:
            return b""
        return self.flat[int(self.offsets[token_id]) : int(self.offsets[token_id + 1])].numpy().tobytes()

    def join(self, token_ids: Iterable[int]) -> bytes:
        """The bytes of a sequence of ids."""
        return b"".join(self.bytes_of(int(token_id)) for token_id in token_ids)


class TableCache:
    """Token tables by content, the least recently used dropped first. Whoever makes it owns it.

    >>> TableCache(limit=4).limit
    4
    """

    def __init__(self, limit: int = 16) -> None:
        self.limit = limit
        self._tables: OrderedDict[str, TokenTable] = OrderedDict()

    def get(self, tokenizer: Any) -> TokenTable:
        """The table of ``tokenizer``, built if no tokenizer of equal content was seen."""
        fingerprint = tokenizer_fingerprint(tokenizer)
        table = self._tables.get(fingerprint)
        if table is None:
            table = _build(tokenizer, fingerprint)
            self._tables[fingerprint] = table
            while len(self._tables) > self.limit:
                self._tables.popitem(last=False)
        self._tables.move_to_end(fingerprint)
        return table


def token_table(tokenizer: Any, cache: TableCache | None = None) -> TokenTable:
    """The table of a tokenizer: id → bytes.

    Args:
        tokenizer: anything with ``convert_ids_to_tokens``; what else it has (a call, ``get_added_vocab``,
            ``all_special_ids``, ``unk_token_id``) is used and not needed.
        cache: where to look first and to keep the result.
    """
    if not callable(getattr(tokenizer, "convert_ids_to_tokens", None)):
        raise ValueError(
            f"a {type(tokenizer).__name__} was given as a tokenizer; expected an object with convert_ids_to_tokens. A "
            "name or a folder was probably passed. Fix: load it first, spanwise.loading.load_tokenizer(name)."
        )
    if cache is not None:
        return cache.get(tokenizer)
    return _build(tokenizer, tokenizer_fingerprint(tokenizer))


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of what decides a tokenizer's ids: vocabulary, merges, normaliser, added tokens and special roles.

    Padding and truncation state, which calls change, are not part of it. 32 hexadecimal digits.
    """
    digest = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        text: str = backend.to_str()
        # The model is by far the largest part: hash it as it is written, parse only what stands before it.
        start = text.index(',"model":{')
        head = json.loads(text[:start] + "}")
        digest.update(json.dumps([head["added_tokens"], head["normalizer"]], sort_keys=True).encode())
        digest.update(text[start:].encode("utf-8", "surrogatepass"))
    else:
        pieces = vocabulary_pieces(tokenizer)
        digest.update(json.dumps(pieces).encode())
        digest.update(json.dumps(sorted(_added_tokens(tokenizer).items())).encode())
    digest.update(json.dumps(sorted(special_ids(tokenizer))).encode())
    return digest.hexdigest()[:32]


def vocabulary_pieces(tokenizer: Any) -> list[str | None]:
    """The piece of every id, None where there is none."""
    size = _declared_size(tokenizer)
    if size is not None:
        return _pieces(tokenizer, range(size))
    pieces: list[str | None] = []
    step = 4096
    while len(pieces) < _LARGEST_VOCABULARY:
        fresh = _pieces(tokenizer, range(len(pieces), len(pieces) + step))
        pieces += fresh
        if all(piece is None for piece in fresh):
            break
    while pieces and pieces[-1] is None:
        pieces.pop()
    return pieces


def special_ids(tokenizer: Any) -> set[int]:
    """Control tokens: named special ones, added ones marked special, and what the post-processor inserts."""
    ids = {int(i) for i in getattr(tokenizer, "all_special_ids", None) or [] if i is not None}
    for token_id, token in (getattr(tokenizer, "added_tokens_decoder", None) or {}).items():
        if getattr(token, "special", False):
            ids.add(int(token_id))
    prefix, suffix = inserted_ids(tokenizer)
    return ids | set(prefix) | set(suffix)


def _declared_size(tokenizer: Any) -> int | None:
    """One more than the largest id that the tokenizer names itself, or None if it names none."""
    get_vocab: Callable[[], dict[str, int]] | None = getattr(tokenizer, "get_vocab", None)
    if get_vocab is not None:
        vocabulary = get_vocab()
        added = _added_tokens(tokenizer)
        return max([-1, *vocabulary.values(), *added]) + 1
    if hasattr(tokenizer, "__len__"):
        return len(tokenizer)
    size = getattr(tokenizer, "vocab_size", None)
    return int(size) if size is not None else None


def _pieces(tokenizer: Any, ids: range) -> list[str | None]:
    try:
        pieces = tokenizer.convert_ids_to_tokens(list(ids))
        return [piece if isinstance(piece, str) else None for piece in pieces]
    except (IndexError, KeyError, ValueError, TypeError, OverflowError):
        return [_piece(tokenizer, token_id) for token_id in ids]


def _piece(tokenizer: Any, token_id: int) -> str | None:
    try:
        piece = tokenizer.convert_ids_to_tokens([token_id])[0]
    except (IndexError, KeyError, ValueError, TypeError, OverflowError):
        return None
    return piece if isinstance(piece, str) else None


def _added_tokens(tokenizer: Any) -> dict[int, str]:
    get_added: Callable[[], dict[str, int]] | None = getattr(tokenizer, "get_added_vocab", None)
    return {int(token_id): content for content, token_id in get_added().items()} if get_added is not None else {}


def gpt2_alphabet() -> dict[str, int]:
    """GPT-2's printable letter for every byte, reversed: letter → byte.

    >>> gpt2_alphabet()["Ġ"], gpt2_alphabet()["A"], len(gpt2_alphabet())
    (32, 65, 256)
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    for shift, byte in enumerate(byte for byte in range(256) if byte not in set(printable)):
        letters[chr(256 + shift)] = byte
    return letters


def _build(tokenizer: Any, fingerprint: str) -> TokenTable:
    pieces = vocabulary_pieces(tokenizer)
    added = _added_tokens(tokenizer)
    special = special_ids(tokenizer)
    if special and max(special) >= len(pieces):
        pieces += [None] * (max(special) + 1 - len(pieces))
    kind, contents = _most_likely(tokenizer, pieces, added, special)
    flat = np.frombuffer(b"".join(contents), dtype=np.uint8).copy()
    offsets = np.zeros(len(contents) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, contents), dtype=np.int64, count=len(contents)), out=offsets[1:])
    is_special = np.zeros(len(contents), dtype=bool)
    is_special[sorted(token_id for token_id in special if token_id >= 0)] = True
    known = np.array([piece is not None for piece in pieces], dtype=bool)
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is not None and _is_unknown_token(tokenizer, int(unknown)):
        known[int(unknown)] = False
        is_special[int(unknown)] = True
    return TokenTable(
        kind=kind,
        flat=torch.from_numpy(flat),
        offsets=torch.from_numpy(offsets),
        special=torch.from_numpy(is_special),
        known=torch.from_numpy(known),
        fingerprint=fingerprint,
    )


def _is_unknown_token(tokenizer: Any, token_id: int) -> bool:
    """Whether the token ever stands for text that the tokenizer does not know; with byte fallback it never does.

    A tokenizer that cannot be asked means it so, unless the token repeats another role (GPT-2's <|endoftext|>).
    """
    ids = encode_plain(tokenizer, _RARE)
    if ids is not None:
        return token_id in ids
    return token_id not in (getattr(tokenizer, "eos_token_id", None), getattr(tokenizer, "bos_token_id", None))


def _most_likely(
    tokenizer: Any, pieces: Sequence[str | None], added: dict[int, str], special: set[int]
) -> tuple[Kind, list[bytes]]:
    """The kind that its pieces suggest and a probe text confirms, and the bytes under it."""
    ordinary = [piece for place, piece in enumerate(pieces) if piece and place not in added]
    marks: dict[Kind, int] = {
        "plain": 0,  # first: where nothing speaks for a kind, é is é and not the byte E9
        "byte_level": sum(piece[0] in "ĠĊ" for piece in ordinary),
        "sentencepiece": sum(
            piece[0] == "▁" or (piece[0] == "<" and bool(_BYTE_PIECE.match(piece))) for piece in ordinary
        ),
        "wordpiece": sum(piece.startswith("##") and len(piece) > 2 for piece in ordinary),
    }
    order = sorted(marks, key=lambda kind: -marks[kind])
    probe = encode_plain(tokenizer, PROBE)
    first: tuple[Kind, list[bytes]] | None = None
    for kind in order:
        contents = _contents(kind, pieces, added, special)
        first = first or (kind, contents)
        if probe is None or marks[kind] == 0:
            break
        if b"".join(contents[i] for i in probe).strip(b" ") == PROBE.encode():
            return kind, contents
    assert first is not None  # noqa: S101 - ``order`` has four entries
    return first


def _contents(kind: Kind, pieces: Sequence[str | None], added: dict[int, str], special: set[int]) -> list[bytes]:
    """The bytes of every piece, read as ``kind`` writes them."""
    if kind == "byte_level":
        letters = gpt2_alphabet()
        to_latin = {ord(letter): byte for letter, byte in letters.items()}
        alphabet = frozenset(letters)
        return [
            b""
            if piece is None
            else piece.translate(to_latin).encode("latin-1")
            if place not in added and alphabet.issuperset(piece)
            else piece.encode("utf-8", "surrogatepass")
            for place, piece in enumerate(pieces)
        ]
    if kind == "sentencepiece":
        # Comprehensions rather than a function per piece: there are up to 262,144 of them.
        fallback = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
        return [
            b""
            if piece is None
            else fallback[piece]
            if piece in fallback and place not in special
            else (piece if place in special else piece.replace("▁", " ")).encode("utf-8", "surrogatepass")
            for place, piece in enumerate(pieces)
        ]
    return [
        (piece or "")
        .removeprefix("##" if kind == "wordpiece" and piece != "##" else "")
        .encode("utf-8", "surrogatepass")
        for piece in pieces
    ]
