"""Masking by transformers' DataCollatorForLanguageModeling: half of the tokens, all of them by the mask token."""

from __future__ import annotations

from typing import Any

from transformers import DataCollatorForLanguageModeling

from benchmarks.peer_sides.masking_work import MaskingSide
from benchmarks.peer_sides.serve import serve


class Theirs(MaskingSide):
    """With a seed, without which nothing could be repeated."""

    def collator(self) -> Any:
        """Pads to the longest row."""
        how = {"mlm_probability": 0.5, "mask_replace_prob": 1.0, "random_replace_prob": 0.0}
        return DataCollatorForLanguageModeling(self.tokenizer, seed=0, **how)

    def features(self, row: dict[str, Any]) -> dict[str, Any]:
        """Ids and masks; with ``special_tokens_mask`` it is fastest, says its documentation."""
        inside = len(row["ids"]) - 2
        return {
            "input_ids": row["ids"],
            "attention_mask": [1] * (inside + 2),
            "special_tokens_mask": [1, *[0] * inside, 1],
        }


if __name__ == "__main__":
    serve(Theirs())
