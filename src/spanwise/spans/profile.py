"""How a tokenizer writes a text besides its pieces: the space it puts first, and what its control tokens mean.

Found by encoding two probe texts and by asking for the named special tokens; a tokenizer that cannot encode is taken
for the usual of its kind. The table's columns are looked at anew whenever they are needed: sending a table to a worker
process moves its memory, and an array kept from before would show what lies there afterwards. 18 bytes per id.

Shapes: V ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from spanwise.spans.encode import encode_plain
from spanwise.spans.table import TokenTable

BOS, EOS, TURN_END = 1, 2, 4
LEFT, RIGHT = 1, 2
IS_SPECIAL, IS_UNKNOWN = 1, 2
# How chat models close a turn; a tokenizer's end of sequence is often one of these, and then it is both.
TURN_END_CONTENTS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<|end|>", "<turn|>", "<|eom_id|>"}
)
Dummy = Literal["none", "unless_space", "always"]


@dataclass(frozen=True, eq=False)
class Profile:
    """A tokenizer as the aligner needs it.

    Attributes:
        table: id → bytes.
        dummy: whether a text gets a space in front: never, unless it starts with one, or always.
        truncates_left: a text that is too long loses its beginning.
        roles: int8 [V], a sum of BOS, EOS and TURN_END.
        strips: int8 [V], a sum of LEFT and RIGHT: where the token swallows blanks beside it, which it does not spell.
        lengths: int64 [V], bytes per id.
    """

    table: TokenTable
    dummy: Dummy
    truncates_left: bool
    roles: npt.NDArray[np.int8]
    strips: npt.NDArray[np.int8]
    lengths: npt.NDArray[np.int64]

    @property
    def flat(self) -> npt.NDArray[np.uint8]:
        """uint8 [N]: the table's bytes, as they lie now."""
        return self.table.flat.numpy()

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """int64 [V + 1]: where each id's bytes begin."""
        return self.table.offsets.numpy()

    @property
    def special(self) -> npt.NDArray[np.bool_]:
        """bool [V]: control tokens."""
        return self.table.special.numpy()

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """bool [V]: ids whose bytes are what they stand for."""
        return self.table.known.numpy()

    @cached_property
    def entries(self) -> npt.NDArray[np.int64]:
        """int64 [V]: all that placing a token needs in one number, since every table of its own would be one more
        place far away in memory per token: where its bytes begin << 32, how many they are << 2, and two bits.
        """
        bits = self.special.astype(np.int64) * IS_SPECIAL + ~self.known * IS_UNKNOWN
        return (self.offsets[:-1] << 32) + (self.lengths << 2) + bits


def entry_start(entry: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where the bytes of entries begin."""
    return entry >> 32


def entry_length(entry: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many bytes they are."""
    return (entry >> 2) & 0x3FFF_FFFF


def profile_of(tokenizer: Any, table: TokenTable) -> Profile:
    """The profile of a tokenizer whose table is known."""
    return Profile(
        table=table,
        dummy=_dummy(tokenizer, table),
        truncates_left=getattr(tokenizer, "truncation_side", "right") == "left",
        roles=_roles(tokenizer, table),
        strips=_strips(tokenizer, table),
        lengths=np.diff(table.offsets.numpy()),
    )


def _dummy(tokenizer: Any, table: TokenTable) -> Dummy:
    bare, spaced = encode_plain(tokenizer, "a"), encode_plain(tokenizer, " a")
    if bare is None or spaced is None:
        return "unless_space" if table.kind == "sentencepiece" else "none"
    if not table.join(bare).startswith(b" "):
        return "none"
    return "always" if table.join(spaced).startswith(b"  ") else "unless_space"


def _roles(tokenizer: Any, table: TokenTable) -> npt.NDArray[np.int8]:
    roles = np.zeros(table.size, dtype=np.int8)
    for name, role in (("bos_token_id", BOS), ("cls_token_id", BOS), ("eos_token_id", EOS), ("sep_token_id", EOS)):
        token_id = getattr(tokenizer, name, None)
        if isinstance(token_id, int) and 0 <= token_id < table.size:
            roles[token_id] |= role
    for token_id in np.flatnonzero(table.special.numpy()).tolist():
        if table.bytes_of(token_id).decode("utf-8", "replace") in TURN_END_CONTENTS:
            roles[token_id] |= TURN_END
    return roles


def _strips(tokenizer: Any, table: TokenTable) -> npt.NDArray[np.int8]:
    strips = np.zeros(table.size, dtype=np.int8)
    for token_id, token in (getattr(tokenizer, "added_tokens_decoder", None) or {}).items():
        if 0 <= int(token_id) < table.size:
            left, right = (bool(getattr(token, side, False)) for side in ("lstrip", "rstrip"))
            strips[int(token_id)] = LEFT * left + RIGHT * right
    return strips
