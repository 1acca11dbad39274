"""Losses for distillation across tokenizers, as plain functions on tensors.

Every loss is called ``loss(student_logits, scores, alignment, …, scale=None)`` (``next_token_ce``, which needs no
teacher, takes the ids in their place) and returns :class:`~spanwise.loss_parts.LossParts`: a sum, a count and metrics.
Entry t of all logits speaks about token t + 1; nothing is shifted by the caller.

**Counts before floats.** What a loss counts follows from integers, so that a trainer can reduce it over micro-batches
and ranks before the first forward pass and hand each loss ``scale = weight / global count``:

- projected_kl, gold, alm, uld count valid chunks: ``plan_chunks``, ``chunk_plan_of_batch``
- prefix_kl counts supervised positions: ``plan_prefix``, ``prefix_plan_of_batch``
- next_token_ce, same_vocab_kl count supervised tokens: ``plan_tokens``, ``token_plan_of_batch``

A plan's ``.count`` is the term's count (each unit weighted by its document's ``sample_mask``); hand the plan to the
loss (``plan=plan``) and nothing is planned twice. Any split into micro-batches, ranks or packed rows gives the same
sums.

    plans = [prefix_plan_of_batch(micro, trie) for micro in micro_batches]
    total_count = dp_all_reduce_sum(sum(plan.count for plan in plans))
    for micro, plan in zip(micro_batches, plans):
        scale = kd_weight / max(float(total_count), 1.0)
        prefix_kl(model(...).logits, scores, trie=trie, plan=plan, scale=scale).total.backward()
"""

from spanwise.xtoken.losses.alm import alm, merge_pairs
from spanwise.xtoken.losses.cross_entropy import CrossEntropyRows, next_token_ce
from spanwise.xtoken.losses.fused import fused, together
from spanwise.xtoken.losses.gold import gold, gold_rows
from spanwise.xtoken.losses.head import Head, checked_head, read_head
from spanwise.xtoken.losses.plan import (
    ChunkPlan,
    TokenPlan,
    chunk_plan_of_batch,
    count_chunks,
    count_tokens,
    plan_chunks,
    plan_tokens,
    token_plan_of_batch,
)
from spanwise.xtoken.losses.prefix import prefix_kl, prefix_rows
from spanwise.xtoken.losses.prefix_plan import PrefixPlan, count_prefix_positions, plan_prefix, prefix_plan_of_batch
from spanwise.xtoken.losses.prefix_targets import PrefixTargets, prefix_targets
from spanwise.xtoken.losses.projected import projected_kl, projected_rows
from spanwise.xtoken.losses.same_vocab import same_vocab_kl
from spanwise.xtoken.losses.shared_set import share_scores
from spanwise.xtoken.losses.teachers import (
    averaged_logits,
    document_scores,
    dynamic_weights,
    merge_teachers,
    select_teacher,
    vocabulary_factor,
)
from spanwise.xtoken.losses.trie import PrefixTrie
from spanwise.xtoken.losses.uld import uld

__all__ = [
    "ChunkPlan",
    "CrossEntropyRows",
    "Head",
    "PrefixPlan",
    "PrefixTargets",
    "PrefixTrie",
    "TokenPlan",
    "alm",
    "averaged_logits",
    "checked_head",
    "chunk_plan_of_batch",
    "count_chunks",
    "count_prefix_positions",
    "count_tokens",
    "document_scores",
    "dynamic_weights",
    "fused",
    "gold",
    "gold_rows",
    "merge_pairs",
    "merge_teachers",
    "next_token_ce",
    "plan_chunks",
    "plan_prefix",
    "plan_tokens",
    "prefix_kl",
    "prefix_plan_of_batch",
    "prefix_rows",
    "prefix_targets",
    "projected_kl",
    "projected_rows",
    "read_head",
    "same_vocab_kl",
    "select_teacher",
    "share_scores",
    "together",
    "token_plan_of_batch",
    "uld",
    "vocabulary_factor",
]
