"""Move a language model onto another tokenizer.

A new token whose bytes are one of the old tokens takes that token's embedding; every other starts as the mean of the
embeddings of the old pieces that its bytes split into; special tokens are matched by role. Nothing else in the model
changes. The result works at once, badly, and is then trained (``recipes/swap.yaml``). O(V·d) memory, one batched
encode.

Shapes: V new vocabulary, W old vocabulary, d width of the embeddings.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.spans.table import TokenTable, token_table

ROLES = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "mask_token_id",
    "sep_token_id",
    "cls_token_id",
)


@dataclass(frozen=True)
class SwapPlan:
    """For every new token the old tokens that it starts from.

    Attributes:
        pieces: old ids per new id; one id where the bytes are equal or the role is.
        exact: how many new tokens have the bytes or the role of one old token.
    """

    pieces: list[list[int]]
    exact: int

    @property
    def exact_share(self) -> float:
        """Share of the new vocabulary that was copied as it is."""
        return self.exact / max(len(self.pieces), 1)


def plan_swap(old_tokenizer: Any, new_tokenizer: Any) -> SwapPlan:
    """Match a new vocabulary to an old one by bytes and by role."""
    old, new = token_table(old_tokenizer), token_table(new_tokenizer)
    by_bytes = _ids_by_bytes(old)
    by_role = {
        int(getattr(new_tokenizer, role)): int(getattr(old_tokenizer, role))
        for role in reversed(ROLES)
        if getattr(new_tokenizer, role, None) is not None and getattr(old_tokenizer, role, None) is not None
    }
    size = len(new_tokenizer)
    contents = [new.bytes_of(token) for token in range(size)]
    ordinary = [token for token in range(size) if not (token < new.size and bool(new.special[token]))]
    exact = {token: by_bytes[contents[token]] for token in ordinary if contents[token] in by_bytes}
    exact |= {token: old_id for token, old_id in by_role.items() if token < size}
    rest = [token for token in ordinary if token not in exact]
    split = dict(zip(rest, _split([contents[token] for token in rest], old_tokenizer, old, by_bytes), strict=True))
    pieces = [[exact[token]] if token in exact else split.get(token, []) for token in range(size)]
    return SwapPlan(pieces, len(exact))


def _ids_by_bytes(table: TokenTable) -> dict[bytes, int]:
    """Ordinary tokens by their bytes, the lowest id where two have the same."""
    found: dict[bytes, int] = {}
    for token in range(table.size):
        if bool(table.known[token]) and not bool(table.special[token]):
            content = table.bytes_of(token)
            if content:
                found.setdefault(content, token)
    return found


def _split(contents: list[bytes], tokenizer: Any, table: TokenTable, by_bytes: dict[bytes, int]) -> list[list[int]]:
    """Old pieces of byte strings: as the old tokenizer splits them where they are text, else the longest match."""
    texts = [content.decode("utf-8", errors="replace") for content in contents]
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return [
        ids if table.join(ids) == content else longest_match(content, by_bytes)
        for content, ids in zip(contents, encoded, strict=True)
    ]


def longest_match(content: bytes, by_bytes: dict[bytes, int]) -> list[int]:
    """Split bytes greedily into known tokens; bytes that no token begins with are passed over.

    >>> longest_match(b"abcx", {b"a": 0, b"ab": 1, b"c": 2})
    [1, 2]
    """
    ids: list[int] = []
    start = 0
    while start < len(content):
        end = next((end for end in range(len(content), start, -1) if content[start:end] in by_bytes), None)
        if end is None:
            start += 1
        else:
            ids.append(by_bytes[content[start:end]])
            start = end
    return ids


def swapped_rows(rows: Float[Tensor, "W d"], plan: SwapPlan) -> Float[Tensor, "V d"]:
    """Each new row: the old one, or the mean of the pieces; the mean of all rows where there is no piece."""
    flat = torch.tensor([piece for pieces in plan.pieces for piece in pieces], dtype=torch.long)
    sizes = torch.tensor([len(pieces) for pieces in plan.pieces])
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    total = torch.zeros(len(sizes), rows.shape[1], dtype=torch.float32)
    total.index_add_(0, owner, rows.detach().float().cpu()[flat])
    result = total / sizes.clamp(min=1)[:, None]
    result[sizes == 0] = rows.detach().float().cpu().mean(0)
    return result.to(rows.dtype)


def swap_tokenizer(model: Any, old_tokenizer: Any, new_tokenizer: Any) -> SwapPlan:
    """Give ``model`` the embeddings and head of a new tokenizer, in place."""
    plan = plan_swap(old_tokenizer, new_tokenizer)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is None or head.weight.data_ptr() == embeddings.weight.data_ptr()
    new_embeddings = swapped_rows(embeddings.weight, plan)
    new_head = None if tied else swapped_rows(head.weight, plan)
    model.resize_token_embeddings(len(new_tokenizer), mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(new_embeddings)
        if new_head is not None:
            model.get_output_embeddings().weight.copy_(new_head)
    for role in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for config in (model.config, getattr(model, "generation_config", None)):
            if config is not None:
                setattr(config, role, getattr(new_tokenizer, role))
    return plan


def swap_to_folder(model_source: str, tokenizer_source: str, output: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``spanwise swap`` does: load, swap, save; the folder is complete or absent. Returns path and exact_share."""
    from spanwise.loading import load_model, load_tokenizer

    target = Path(output)
    if target.exists():
        raise ValueError(
            f"'{target}' exists already; expected a new folder for the swapped model. It probably holds an "
            "earlier one. Fix: name another folder with -o."
        )
    model, old, new = load_model(model_source), load_tokenizer(model_source), load_tokenizer(tokenizer_source)
    plan = swap_tokenizer(model, old, new)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        model.save_pretrained(staging)
        new.save_pretrained(staging)
        staging.chmod(0o755)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return {"path": str(target), "exact_share": plan.exact_share, "tokens": len(plan.pieces)}
