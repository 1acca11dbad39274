"""The special ids that masking needs, read from a tokenizer once, with errors that say what to add. O(1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SpecialIds:
    """pad and mask are always there; bos and eos are None where they are not added."""

    pad: int
    mask: int
    bos: int | None
    eos: int | None


def special_ids(tokenizer: Any, *, add_bos: bool = False, add_eos: bool = False) -> SpecialIds:
    """Read the ids; BERT's [CLS] and [SEP] stand in for BOS and EOS.

    >>> from types import SimpleNamespace
    >>> special_ids(SimpleNamespace(pad_token_id=0, mask_token_id=4, cls_token_id=2), add_bos=True)
    SpecialIds(pad=0, mask=4, bos=2, eos=None)
    """
    bos = _first(tokenizer, "bos", "cls") if add_bos else None
    eos = _first(tokenizer, "eos", "sep") if add_eos else None
    for wanted, found, name in ((add_bos, bos, "bos"), (add_eos, eos, "eos")):
        if wanted and found is None:
            raise ValueError(
                f"the tokenizer has no {name} token, and add_{name}=True was given; expected one to add. It was "
                f"probably made without special tokens. Fix: pass add_{name}=False, or set tokenizer.{name}_token."
            )
    return SpecialIds(pad_token_id(tokenizer), mask_token_id(tokenizer), bos, eos)


def mask_token_id(tokenizer: Any) -> int:
    """The id of MASK; ValueError where the tokenizer has none."""
    found = _first(tokenizer, "mask")
    if found is None:
        raise ValueError(
            "the tokenizer has no mask token; expected one, since hidden tokens are replaced by it. It was probably "
            "made for an autoregressive model. Fix: tokenizer.add_special_tokens({'mask_token': '<mask>'}) and "
            "model.resize_token_embeddings(len(tokenizer))."
        )
    return found


def pad_token_id(tokenizer: Any) -> int:
    """The id of PAD; ValueError where the tokenizer has none."""
    found = _first(tokenizer, "pad")
    if found is None:
        raise ValueError(
            "the tokenizer has no pad token; expected one to fill rows with. It was probably made for an "
            "autoregressive model. Fix: tokenizer.add_special_tokens({'pad_token': '<pad>'})."
        )
    return found


def _first(tokenizer: Any, *names: str) -> int | None:
    found = (getattr(tokenizer, f"{name}_token_id", None) for name in names)
    return next((int(token) for token in found if token is not None), None)
