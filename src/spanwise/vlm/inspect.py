"""What a batch looks like, token by token: the data behind a page that people read. O(tokens of the rows asked for).

Shapes: S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from spanwise.spans.chat import IGNORE_INDEX
from spanwise.vlm.tokens import is_media_token

Kind = Literal["label", "media", "padding", "given"]


def tokens_of_row(batch: Mapping[str, Any], row: int, processor: Any) -> list[tuple[str, Kind]]:
    """Each token of a row with what it is: predicted by the token before it, media, padding, or given.

    Args:
        batch: as a collator of this room returns it, labels shifted.
        row: which row.
        processor: for texts and media ids.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    ids = batch["input_ids"][row]
    media = is_media_token(ids, processor).tolist()
    trained = [False, *(batch["labels"][row, :-1] != IGNORE_INDEX).tolist()]
    mask = batch.get("attention_mask")
    real = [True] * len(ids) if mask is None or mask.ndim != 2 else (mask[row] != 0).tolist()

    def kind(place: int) -> Kind:
        if media[place]:
            return "media"
        return "padding" if not real[place] else "label" if trained[place] else "given"

    return [(tokenizer.decode([token]), kind(place)) for place, token in enumerate(ids.tolist())]
