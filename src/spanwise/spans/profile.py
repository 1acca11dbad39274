"""How a tokenizer writes a text besides its pieces: the space it puts first, and what its control tokens mean.

Found by encoding two probe texts and by asking for the named special tokens; a tokenizer that cannot encode is taken
for the usual of its kind. Arrays are views of the table's, so a profile costs a few bytes per id.

Shapes: V ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from spanwise.spans.table import TokenTable, encode_plain

BOS, EOS, TURN_END = 1, 2, 4
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
        flat, offsets, lengths, special, known: the table's columns as numpy views.
    """

    table: TokenTable
    dummy: Dummy
    truncates_left: bool
    roles: npt.NDArray[np.int8]
    flat: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    special: npt.NDArray[np.bool_]
    known: npt.NDArray[np.bool_]


def profile_of(tokenizer: Any, table: TokenTable) -> Profile:
    """The profile of a tokenizer whose table is known."""
    offsets = table.offsets.numpy()
    return Profile(
        table=table,
        dummy=_dummy(tokenizer, table),
        truncates_left=getattr(tokenizer, "truncation_side", "right") == "left",
        roles=_roles(tokenizer, table),
        flat=table.flat.numpy(),
        offsets=offsets,
        lengths=np.diff(offsets),
        special=table.special.numpy(),
        known=table.known.numpy(),
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
