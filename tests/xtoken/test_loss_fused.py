"""Losses fused with the LM head: equal to the unfused ones, and no [rows, V] tensor on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spanwise.teachers.scores import TeacherScores
from spanwise.xtoken.alignment import AlignmentBatch
from spanwise.xtoken.losses import (
    CrossEntropyRows,
    Head,
    PrefixTrie,
    checked_head,
    fused,
    gold,
    gold_rows,
    next_token_ce,
    plan_chunks,
    plan_prefix,
    plan_tokens,
    prefix_kl,
    prefix_rows,
    projected_kl,
    projected_rows,
    together,
)
from spanwise.xtoken.projection import Projection
from tests.reference import losses as twin
from tests.xtoken import test_loss_prefix
from tests.xtoken.cases import random_alignment, random_case, random_projection
from tests.xtoken.test_loss_gold import partition


def random_head(width: int, hidden: int, kind: str, dtype: torch.dtype = torch.float64) -> Head:
    g = torch.Generator().manual_seed(4)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    bias = leaf(width) if kind == "bias" else None
    lora = (leaf(2, hidden), leaf(width, 2), 0.7) if kind == "lora" else (None, None, 1.0)
    return Head(leaf(width, hidden), bias, 0.3 if kind == "scaled" else 1.0, 1.5 if kind == "softcap" else None, *lora)


def gradients(total: torch.Tensor, hidden: torch.Tensor, head: Head) -> list[torch.Tensor]:
    leaves = [t for t in (hidden, head.weight, head.bias, head.lora_a, head.lora_b) if t is not None]
    return list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("kind", ["plain", "bias", "scaled", "softcap", "lora"])
@pytest.mark.parametrize("which", ["projected", "gold", "together", "wide"])
def test_fused_equals_unfused(kind: str, which: str) -> None:
    case = random_case(12, batch=3)
    hidden = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    head = random_head(11 if which == "wide" else 9, 6, kind)
    scores, plan = TeacherScores(logits=case.y), plan_chunks(case.alignment, sample_mask=torch.tensor([1.0, 0.5, 2.0]))
    logits = head.logits(hidden)
    if which == "gold":
        expected = gold(logits, scores, None, case.projection, plan=plan, temperature=2.0, scale=0.2).total
        loss = gold_rows(plan, scores, case.projection, temperature=2.0, scale=0.2)
    else:
        expected = projected_kl(logits, scores, None, case.projection, plan=plan, vocab_topk=4, scale=0.2).total
        loss = projected_rows(plan, scores, case.projection, vocab_topk=4, scale=0.2)
    if which == "together":
        ids = torch.randint(9, (3, 7), generator=torch.Generator().manual_seed(2))
        expected = expected + next_token_ce(logits, ids, scale=0.1).total
        loss = together(loss, CrossEntropyRows(plan_tokens(ids), 9, 0.1))
    total = fused(hidden, head, loss)
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-12)
    for got, wanted in zip(gradients(total, hidden, head), gradients(expected, hidden, head), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-11)


def test_together_keeps_the_parts_apart_and_works_unfused() -> None:
    from spanwise.xtoken.losses.rows import over_logits

    case = random_case(12)
    ids = torch.randint(9, (2, 7), generator=torch.Generator().manual_seed(2))
    scores = TeacherScores(logits=case.y)
    kd = projected_kl(case.z, scores, case.alignment, case.projection)
    ce = next_token_ce(case.z, ids)
    loss = together(
        projected_rows(plan_chunks(case.alignment), scores, case.projection), CrossEntropyRows(plan_tokens(ids), 9, 1.0)
    )
    total = over_logits(case.z, loss)
    torch.testing.assert_close(total, kd.total + ce.total)
    torch.testing.assert_close(loss.totals[0], kd.total.detach())
    torch.testing.assert_close(loss.totals[1], ce.total.detach())
    torch.testing.assert_close(
        torch.autograd.grad(total, case.z)[0], torch.autograd.grad(kd.total + ce.total, case.z)[0]
    )


def test_prefix_kl_fused() -> None:
    alignment, ids_s, ids_t, *_ = test_loss_prefix.batch([b"abcabca", b"caab"])
    trie = test_loss_prefix.trie()
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(*ids_s.shape, 5, generator=g, dtype=torch.float64).requires_grad_()
    head = random_head(9, 5, "bias")
    scores = TeacherScores(logits=torch.randn(*ids_t.shape, 9, generator=g, dtype=torch.float64))
    plan = plan_prefix(alignment, trie, ids_s, ids_t)
    expected = prefix_kl(head.logits(hidden), scores, trie=trie, plan=plan, scale=0.5).total
    total = fused(hidden, head, prefix_rows(plan, scores, trie, scale=0.5))
    torch.testing.assert_close(total, expected)
    for got, wanted in zip(gradients(total, hidden, head), gradients(expected, hidden, head), strict=True):
        torch.testing.assert_close(got, wanted)


def test_nothing_valid_reaches_every_parameter_with_zeros() -> None:
    case = random_case(1)
    hidden = torch.zeros(2, 7, 6, dtype=torch.float64, requires_grad=True)
    head = random_head(9, 6, "lora")
    plan = plan_chunks(case.alignment, sample_mask=torch.zeros(2))
    total = fused(hidden, head, projected_rows(plan, TeacherScores(logits=case.y), case.projection))
    assert float(total.detach()) == 0.0
    assert all(g.eq(0).all() for g in gradients(total, hidden, head))


class LargestAllocation(TorchDispatchMode):
    """The most elements of any tensor that an operation returns, views of ``existing`` left out."""

    def __init__(self, *existing: torch.Tensor) -> None:
        super().__init__()
        self.existing = {tensor.untyped_storage().data_ptr() for tensor in existing}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            fresh = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
            if fresh and tensor.untyped_storage().data_ptr() not in self.existing:
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("which", ["projected", "gold"])
def test_no_tensor_of_all_rows_by_vocabulary(which: str, monkeypatch) -> None:
    """Vs ≥ 49k on 64 rows, equal to the unfused form; the largest tensor is a tile or the head's own gradient."""
    monkeypatch.setattr("spanwise.xtoken.losses.rows.TILE_ELEMENTS", 8 * 50_000)
    g = torch.Generator().manual_seed(0)
    students, teachers, rows = 49_152, 50_257, 65
    hidden = torch.randn(1, rows, 8, generator=g).requires_grad_()
    head = Head(torch.randn(students, 8, generator=g).requires_grad_())
    y = torch.randn(1, rows, teachers, generator=g)
    ids = torch.randint(0, teachers, (students, 4), generator=g)
    projection = Projection(ids, torch.rand(students, 4, generator=g), teachers)
    chunk = torch.cat([torch.tensor([-1]), torch.arange(rows - 1) * 3 // 4])[None]
    pairs, nothing = torch.ones(1, 48, dtype=torch.bool), torch.zeros(1, rows, dtype=torch.bool)
    alignment = AlignmentBatch(pairs, pairs, nothing, nothing, chunk, chunk, torch.tensor([48]))
    plan, scores = plan_chunks(alignment), TeacherScores(logits=y)
    make = projected_rows if which == "projected" else gold_rows
    plain = projected_kl if which == "projected" else gold
    expected = plain(head.logits(hidden), scores, None, projection, plan=plan).total
    wanted = gradients(expected, hidden, head)
    with LargestAllocation(y, head.weight) as seen:
        total = fused(hidden, head, make(plan, scores, projection))
    # A tile holds 8 rows, or one whole chunk.
    tile = max(8, int(plan.student.sizes.max()))
    assert seen.largest <= tile * teachers
    assert len(plan.student.rows) == 64 > 2 * tile
    got = gradients(total, hidden, head)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one / other.abs().max(), other / other.abs().max(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("which", ["projected", "gold", "ce", "prefix"])
def test_fused_over_a_wide_head_against_the_naive_twin_in_float64(which: str) -> None:
    g = torch.Generator().manual_seed(0)
    students, teachers, rows = 49_200, 50_257, 65
    # As deep as heads are: for a few columns some kernels add the 49,200 terms of a gradient one by one, in float32.
    depth = 64
    head = Head((torch.randn(students, depth, generator=g) / 3).requires_grad_())
    if which == "prefix":
        student = [*test_loss_prefix.STUDENT[:-2], *(f"z{n}".encode() for n in range(students - 9)), b"", b""]
        teacher = test_loss_prefix.TEACHER
        alignment, ids, teacher_ids, rows_s, rows_t = test_loss_prefix.batch([b"abcabca", b"caabb"], student, teacher)
        trie = PrefixTrie.from_bytes(student, teacher, [(students - 1, len(teacher) - 1)])
        hidden = torch.randn(*ids.shape, depth, generator=g).requires_grad_()
        scores = TeacherScores(logits=torch.randn(*teacher_ids.shape, len(teacher), generator=g))
        loss = prefix_rows(plan_prefix(alignment, trie, ids, teacher_ids), scores, trie)
    else:
        hidden = torch.randn(1, rows, depth, generator=g).requires_grad_()
        ids = torch.randint(0, students, (1, rows), generator=g)
        targets = torch.randint(0, teachers, (students, 4), generator=g)
        weights = torch.rand(students, 4, generator=g)
        # Three quarters of the rows are exact, so that gold has both common ids and tails.
        exact = torch.arange(students) % 4 > 0
        targets[exact, 0], targets[exact, 1:] = torch.arange(students)[exact], -1
        weights[exact, 0], weights[exact, 1:] = 1.0, 0.0
        projection = Projection(targets, weights, teachers)
        chunk = torch.cat([torch.tensor([-1]), torch.arange(rows - 1) * 3 // 4])[None]
        pairs, nothing = torch.ones(1, 48, dtype=torch.bool), torch.zeros(1, rows, dtype=torch.bool)
        alignment = AlignmentBatch(pairs, pairs, nothing, nothing, chunk, chunk, torch.tensor([48]))
        scores = TeacherScores(logits=torch.randn(1, rows, teachers, generator=g))
        if which == "ce":
            loss = CrossEntropyRows(plan_tokens(ids), students, 1.0)
        else:
            make = projected_rows if which == "projected" else gold_rows
            loss = make(plan_chunks(alignment), scores, projection)
    got = torch.autograd.grad(fused(hidden, head, loss), [hidden, head.weight])
    value = fused(hidden, head, loss).detach()

    exact_hidden, exact_weight = (leaf.detach().double().requires_grad_() for leaf in (hidden, head.weight))
    logits = exact_hidden @ exact_weight.T
    y = scores.logits.double()
    if which == "projected":
        entries = projection.indices.flatten() >= 0
        place = torch.stack([torch.arange(students).repeat_interleave(4), projection.indices.flatten()])[:, entries]
        matrix = torch.sparse_coo_tensor(
            place, projection.likelihoods.flatten()[entries].double(), (students, teachers), check_invariants=True
        ).coalesce()
        expected, _ = twin.projected_kl(logits, y, alignment, matrix)
    elif which == "gold":
        expected, _ = twin.gold(logits, y, alignment, partition(projection, False))
    elif which == "ce":
        expected, _ = twin.cross_entropy(logits, ids, torch.ones(1, rows), torch.ones(1))
    else:
        expected, _ = test_loss_prefix.twin_total(
            rows_s, rows_t, logits, y, keep=24, temperature=1.0, reverse=False, student=student
        )
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    wanted = torch.autograd.grad(expected, [exact_hidden, exact_weight])
    for one, other in zip(got, wanted, strict=True):
        assert float((one.double() - other).abs().max()) <= 1e-5 * float(other.abs().max())


def tiny_model(kind: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    if kind == "phi":  # the one whose head has a bias
        small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=40, **small))
        torch.nn.init.normal_(model.get_output_embeddings().bias)
        return model
    sizes = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    if kind == "cohere":
        sizes["logit_scale"] = 0.25
    elif kind == "granite":
        sizes["logits_scaling"] = 4.0
    elif kind == "gemma2":
        sizes["final_logit_softcapping"] = 2.0
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    torch.nn.init.normal_(model.get_output_embeddings().weight)
    return model


@pytest.mark.parametrize("kind", ["llama", "cohere", "granite", "gemma2", "phi"])
def test_heads_are_read_from_real_models(kind: str) -> None:
    model = tiny_model(kind)
    model.train()
    model.model.layers.eval()  # a frozen part
    ids = torch.arange(3, 15)[None]
    head = checked_head(model, ids)
    assert head is not None
    assert model.training
    assert not any(layer.training for layer in model.model.layers.modules())
    assert (head.bias is not None) == (kind == "phi")
    assert (head.softcap, head.multiplier) == {
        "llama": (None, 1.0), "cohere": (None, 0.25), "granite": (None, 0.25), "gemma2": (2.0, 1.0),
        "phi": (None, 1.0),
    }[kind]  # fmt: skip


def test_lora_on_the_head_is_read() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False))
    head = checked_head(model, torch.arange(3, 15)[None])
    assert head is not None
    assert head.lora_a is not None


@pytest.mark.parametrize(
    ("more", "named"), [({"lora_dropout": 0.5}, "lora_dropout = 0.5"), ({"use_dora": True}, "Dora")]
)
def test_what_lora_does_only_while_training_falls_back_loudly(more: dict[str, Any], named: str) -> None:
    """In evaluation mode, at the start, both give the very logits that the head as read gives."""
    from peft import LoraConfig, get_peft_model

    made = LoraConfig(target_modules=["lm_head"], r=2, **more)
    with pytest.warns(UserWarning, match=f"fused loss is not used.*{named}.*expected.*probably.*Fix:"):
        assert checked_head(get_peft_model(tiny_model("llama"), made), torch.arange(3, 15)[None]) is None


def test_a_copy_of_the_head_that_is_trained_whole_is_read() -> None:
    from peft import LoraConfig, get_peft_model

    made = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2)
    model = get_peft_model(tiny_model("llama"), made)
    head = checked_head(model, torch.arange(3, 15)[None])
    assert head is not None
    assert head.weight is model.get_output_embeddings().modules_to_save["default"].weight
    assert head.weight.requires_grad


@pytest.mark.parametrize("kind", ["ia3", "loha", "rows", "quantised"])
def test_other_adapters_and_quantised_heads_fall_back_loudly(kind: str) -> None:
    """None of them shows in the logits before training: they begin as the plain head."""
    from peft import IA3Config, LoHaConfig, LoraConfig, get_peft_model

    model = tiny_model("llama")
    if kind == "quantised":
        packed = torch.zeros(16 * 40 // 2, 1, dtype=torch.uint8)  # two weights of four bits in a byte
        model.lm_head.weight = torch.nn.Parameter(packed, requires_grad=False)
    else:
        model = get_peft_model(
            model,
            {
                "ia3": IA3Config(target_modules=["lm_head"], feedforward_modules=[]),
                "loha": LoHaConfig(target_modules=["lm_head"], r=2),
                "rows": LoraConfig(target_modules=["q_proj"], trainable_token_indices={"lm_head": [1, 2]}, r=2),
            }[kind],
        )
    with pytest.warns(UserWarning, match=r"fused loss is not used.*expected a linear layer.*probably.*Fix:"):
        assert checked_head(model, torch.arange(3, 15)[None]) is None


def test_a_head_that_does_more_than_it_says_falls_back_loudly() -> None:
    model = tiny_model("llama")
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x: plain(x) * 3 + 1
    with pytest.warns(UserWarning, match="fused loss is not used"):
        assert checked_head(model, torch.arange(3, 15)[None]) is None


def test_narrow_heads_and_unlike_partners_are_refused() -> None:
    case = random_case(1)
    hidden = torch.zeros(2, 7, 6, dtype=torch.float64)
    loss = projected_rows(plan_chunks(case.alignment), TeacherScores(logits=case.y), case.projection)
    with pytest.raises(ValueError, match="student's head scores"):
        fused(hidden, random_head(5, 6, "plain"), loss)
    with pytest.raises(ValueError, match="put together"):
        together(loss, CrossEntropyRows(plan_tokens(torch.zeros(2, 7, dtype=torch.long)), 12, 1.0))


def test_autocast_products_in_bf16_sums_in_float32() -> None:
    g = torch.Generator().manual_seed(0)
    projection = random_projection(9, 11, 3, g)
    hidden = torch.randn(2, 7, 6, generator=g).bfloat16().float().requires_grad_()
    head = Head(torch.randn(9, 6, generator=g).bfloat16().float().requires_grad_())
    scores = TeacherScores(logits=torch.randn(2, 8, 11, generator=g))
    plan = plan_chunks(random_alignment(2, 7, 8, 5, g))
    exact = fused(hidden, head, projected_rows(plan, scores, projection))
    with torch.autocast("cpu", torch.bfloat16):
        rough = fused(hidden, head, projected_rows(plan, scores, projection))
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, exact, rtol=2e-2, atol=2e-2)
    for got, wanted in zip(gradients(rough, hidden, head), gradients(exact, hidden, head), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got / wanted.abs().max(), wanted / wanted.abs().max(), rtol=0, atol=3e-2)
