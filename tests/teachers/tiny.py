"""A tiny teacher and rows for it."""

from __future__ import annotations

from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spanwise.teachers.cache_frame import TopK
from spanwise.teachers.cache_store import CacheIdentity
from spanwise.teachers.local import LocalTeacher
from spanwise.teachers.teacher import ScoreRequest

WIDTH = 300


def tiny_model(seed: int = 0, width: int = WIDTH) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=width,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            model.lm_head.weight.mul_(40)  # peaked, as a trained model is
    return model.eval()


@cache
def tiny_teacher(seed: int = 0) -> LocalTeacher:
    return LocalTeacher(tiny_model(seed), vocab_size=WIDTH)


def identity(**changes) -> CacheIdentity:
    given = {"teacher": "t", "tokenizer": "v", "vocab_size": WIDTH, "k": TopK(2, 16, 0.9)} | changes
    return CacheIdentity(**given)


def padded(rows: list[list[int]]) -> ScoreRequest:
    width = max(map(len, rows), default=1)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row, dtype=torch.long)
        mask[place, : len(row)] = 1
    return ScoreRequest(ids, mask)


def random_rows(count: int, longest: int = 20, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(WIDTH, (length,), generator=generator).tolist() for length in lengths]


def batches(rows: list[list[int]], size: int = 4) -> list[ScoreRequest]:
    return [padded(rows[start : start + size]) for start in range(0, len(rows), size)]
