"""The loss against plain cross-entropy, and what the reference got wrong."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from spanwise.mlm import DefaultMLMCollator, MLMLoss, MLMSeq2SeqTrainCollator, PackedMLMCollator
from spanwise.mlm.cross_entropy import weighted_cross_entropy
from tests.mlm.helpers import EOS, MASK, IdTokenizer, backbone, small_model

TOKENIZER = IdTokenizer()


def batch_of(count=4, *, padding=False, seed=0, **fields):
    generator = torch.Generator().manual_seed(seed)
    rows = [
        {
            "input_ids": torch.randint(
                4, 30, (int(torch.randint(1, 8, (), generator=generator)),), generator=generator
            ),
            "epoch": 0,
            "position": place,
            **{name: values[place] for name, values in fields.items()},
        }
        for place in range(count)
    ]
    return DefaultMLMCollator(TOKENIZER, 10, None, loss_on_padding=padding, masking="exact")(rows)


def plain(model, batch, weights=None):
    """CE of every position over padded logits, [B, S], 0 where not scored."""
    scored = (batch["input_ids"] == MASK) & (batch["target_ids"] != -100)
    logits = model(batch["input_ids"], batch["attention_mask"])
    targets = batch["target_ids"].masked_fill(~scored, -100)
    return cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=-100), scored


def loss_of(model, **options):
    return MLMLoss(model=model, tokenizer=TOKENIZER, **options)


@settings(max_examples=15)
@given(seed=st.integers(0, 99), padding=st.booleans())
def test_default_is_the_mean_over_hidden_tokens_in_value_and_gradient(seed, padding):
    model, batch = small_model(), batch_of(seed=seed, padding=padding)
    ours = loss_of(model)(batch)["loss"]
    ours.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    each, scored = plain(model, batch)
    expected = each.sum() / scored.sum()
    torch.testing.assert_close(ours, expected)
    expected.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_nelbo_weights_rows_and_divides_by_real_tokens():
    model, batch = small_model(), batch_of()
    each, _ = plain(model, batch)
    expected = (each * batch["noise_weight"][:, None]).sum() / batch["attention_mask"].sum()
    torch.testing.assert_close(loss_of(model, weighting="nelbo")(batch)["loss"], expected)


def test_norms():
    model, batch = small_model(), batch_of()
    each, scored = plain(model, batch)
    torch.testing.assert_close(loss_of(model, norm="token")(batch)["loss"], each.sum() / batch["attention_mask"].sum())
    torch.testing.assert_close(loss_of(model, norm="sequence")(batch)["loss"], (each.sum(1) / scored.sum(1)).mean())
    for options in ({"norm": "masked"}, {"loss_on_visible_tokens": True}, {"use_num_masked_factor": True}):
        with pytest.raises(ValueError, match="weighting='mlm'"):
            loss_of(model, weighting="nelbo", **options)


def test_the_masked_factor_works_when_rows_and_columns_differ():
    model, batch = small_model(), batch_of(3)
    each, scored = plain(model, batch)
    masked = (batch["input_ids"] == MASK).sum(1, keepdim=True)
    expected = (each / (masked + 1)).sum() / scored.sum()
    torch.testing.assert_close(loss_of(model, use_num_masked_factor=True)(batch)["loss"], expected)


def test_visible_tokens_are_divided_by_real_tokens():
    model, batch = small_model(), batch_of()
    logits = model(batch["input_ids"], batch["attention_mask"])
    expected = cross_entropy(logits.transpose(1, 2), batch["target_ids"], ignore_index=-100)
    torch.testing.assert_close(loss_of(model, loss_on_visible_tokens=True)(batch)["loss"], expected)


def test_the_batch_is_not_changed():
    batch = batch_of()
    before = {key: value.clone() for key, value in batch.items() if isinstance(value, torch.Tensor)}
    loss_of(small_model())(batch, 0, 0, "train")["loss"].backward()
    assert all(torch.equal(batch[key], value) for key, value in before.items())


def test_nothing_hidden_is_zero_with_a_graph():
    model, batch = small_model(), batch_of()
    batch["input_ids"] = batch["target_ids"].clamp(min=0)
    loss = loss_of(model)(batch)["loss"]
    loss.backward()
    assert loss.item() == 0
    assert model.embed_tokens.weight.grad is not None
    assert not model.encoder[0].attn_qkv.weight.grad.any()


def test_a_row_of_padding_adds_nothing():
    model, batch = small_model(), batch_of(2)
    alone = loss_of(model)(batch.slice(0, 1))["loss"]
    batch["attention_mask"][1], batch["input_ids"][1], batch["target_ids"][1] = 0, 0, -100
    torch.testing.assert_close(loss_of(model)(batch)["loss"], alone)


@pytest.mark.parametrize("weighting", ["mlm", "nelbo"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_split_gives_the_same_sum_count_and_gradient(weighting, size):
    model, loss = small_model(), None
    loss = loss_of(model, weighting=weighting)
    batch = batch_of(5, sample_mask=[1.0, 0.0, 0.5, 1.0, 2.0])
    whole = loss.parts(batch)
    whole.total.backward()
    expected = model.encoder[0].o_proj.weight.grad.clone()
    model.zero_grad()
    parts = [loss.parts(part, scale=0.25) for part in batch.micro_batches(size)]
    for part in parts:
        part.total.backward()
    torch.testing.assert_close(sum(part.total for part in parts), whole.total * 0.25)
    torch.testing.assert_close(sum(part.count for part in parts), whole.count)
    assert sum(float(loss.count(part)) for part in batch.micro_batches(size)) == float(loss.count(batch))
    torch.testing.assert_close(model.encoder[0].o_proj.weight.grad, expected * 0.25)


def test_prompts_do_not_count_as_tokens_of_the_bound():
    collator = MLMSeq2SeqTrainCollator(
        TOKENIZER, None, block_size=4, input_block_size=6, loss_on_padding=False, masking="exact"
    )
    rows = [{"prompt_ids": [10, 11, 12], "target_ids": [20, 21], "epoch": 0, "position": place} for place in range(3)]
    assert float(loss_of(small_model(), weighting="nelbo").count(collator(rows))) == 9


@pytest.mark.parametrize("name", ["ours", "bert", "roberta", "modernbert", "llama"])
def test_packed_rows_equal_their_documents_apart(name):
    """The second document begins with a MASK, which a shifted model would read from the first."""
    model = small_model() if name == "ours" else backbone(name, sharp=True)
    documents = [[7, 8, EOS], [9, 10, 11, 12, 13, EOS]]
    shown = [[MASK, 8, EOS], [MASK, 10, MASK, 12, 13, MASK]]
    packed = PackedMLMCollator(TOKENIZER, 10, None)([{"input_ids": [*itertools.chain(*documents)]}])
    packed["input_ids"] = torch.tensor([[*itertools.chain(*shown), 0]])
    totals = []
    for ids, targets in zip(shown, documents, strict=True):
        apart = {"input_ids": torch.tensor([ids]), "target_ids": torch.tensor([targets])}
        totals.append(loss_of(model).parts(apart).total)
    torch.testing.assert_close(loss_of(model).parts(packed).total, sum(totals), atol=1e-4, rtol=1e-4)


def test_targets_on_padding_are_refused_unless_asked_for():
    model = small_model()
    batch = {
        "input_ids": torch.tensor([[5, MASK, MASK]]),
        "attention_mask": torch.tensor([[1, 1, 0]]),
        "target_ids": torch.tensor([[5, 6, 0]]),
    }
    with pytest.raises(ValueError, match="loss_on_padding"):
        loss_of(model)(batch)
    each, scored = plain(model, batch)
    torch.testing.assert_close(loss_of(model, loss_on_padding=True)(batch)["loss"], each.sum() / scored.sum())


def test_only_hidden_positions_get_logits():
    model, batch = small_model(), batch_of()
    shapes = []
    model.output_layer.linear.register_forward_hook(lambda module, given, out: shapes.append(out.shape))
    loss_of(model)(batch)
    assert shapes == [((batch["input_ids"] == MASK).sum(), 30)]


def test_any_callable_with_logits_of_every_position_is_a_model():
    model, batch = small_model(), batch_of()

    def bare(ids, attention_mask, positions):
        return model(ids, attention_mask, positions)

    torch.testing.assert_close(loss_of(bare)(batch)["loss"], loss_of(model)(batch)["loss"])


def test_columns_that_do_not_fit_are_named():
    batch = batch_of()
    loss = loss_of(small_model())
    for name, cut in (("target_ids", 1), ("attention_mask", 1)):
        with pytest.raises(ValueError, match=f"under {name}"):
            loss({**batch, name: batch[name][:, cut:]})
    for wrong in (batch["input_ids"][0], batch["input_ids"].float(), batch["input_ids"].tolist(), None):
        with pytest.raises(ValueError, match="under input_ids"):
            loss({**batch, "input_ids": wrong})
    with pytest.raises(ValueError, match="expected 0 to 29"):
        loss({**batch, "target_ids": torch.full_like(batch["target_ids"], 30)})


def test_what_is_missing_is_named():
    batch = batch_of()
    with pytest.raises(ValueError, match="without a model"):
        MLMLoss(tokenizer=TOKENIZER)(batch)
    with pytest.raises(ValueError, match="another vocabulary"):
        MLMLoss(model=small_model(), tokenizer=IdTokenizer(31))(batch)
    del batch["noise_weight"]
    with pytest.raises(ValueError, match="noise_weight"):
        loss_of(small_model(), weighting="nelbo")(batch)
    del batch["target_ids"]
    with pytest.raises(ValueError, match="no target_ids"):
        loss_of(small_model())(batch)


@settings(max_examples=25)
@given(
    rows=st.integers(0, 9),
    seed=st.integers(0, 99),
    kind=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_cross_entropy_equals_the_plain_one(rows, seed, kind):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 6, generator=generator).to(kind).requires_grad_()
    head = torch.randn(6, 11, generator=generator).to(kind).requires_grad_()
    targets = torch.randint(11, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)
    weighted_cross_entropy(hidden @ head, targets, weights).mul(3.0).backward()
    ours = hidden.grad.clone(), head.grad.clone()
    hidden.grad = head.grad = None
    each = cross_entropy((hidden @ head).float(), targets, reduction="none")
    (3.0 * (each * weights).sum()).backward()
    tolerance = {"atol": 0.2, "rtol": 0.05} if kind == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(ours, (hidden.grad, head.grad), **tolerance)


def test_cross_entropy_of_large_and_forbidden_logits():
    logits = torch.tensor([[1e4, 0.0, -math.inf], [-1e4, -1e4, -1e4 + 1]], requires_grad=True)
    targets, weights = torch.tensor([0, 2]), torch.tensor([0.5, 2.0])
    ours = weighted_cross_entropy(logits, targets, weights)
    ours.backward()
    gradient, logits.grad = logits.grad, None
    plain = (cross_entropy(logits, targets, reduction="none") * weights).sum()
    plain.backward()
    torch.testing.assert_close((ours, gradient), (plain, logits.grad))


def test_cross_entropy_in_tiles_and_a_second_backward(monkeypatch):
    monkeypatch.setattr("spanwise.mlm.cross_entropy.TILE_ELEMENTS", 8)
    logits = torch.randn(5, 4, requires_grad=True)
    targets, weights = torch.tensor([0, 1, 2, 3, 0]), torch.rand(5)
    total = weighted_cross_entropy(logits, targets, weights)
    torch.testing.assert_close(total, (cross_entropy(logits, targets, reduction="none") * weights).sum())
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()
