"""The bound against enumeration; bytes, perplexity, entropy."""

from __future__ import annotations

import math

import pytest
import torch

from spanwise.mlm import CosineNoiseSchedule, DefaultMLMCollator, generative_perplexity, nelbo
from spanwise.mlm.likelihood import LikelihoodBound
from tests.mlm.helpers import MASK, IdTokenizer, small_model
from tests.reference.mlm_likelihood import any_order_nll, bernoulli_nelbo

TOKENIZER = IdTokenizer(8)


def collator(**options):
    return DefaultMLMCollator(
        TOKENIZER, None, loss_on_padding=False, add_bos=False, add_eos=False, truncate=None, **options
    )


def enumerated(model, tokens):
    with torch.no_grad():
        return any_order_nll(lambda ids: model(ids).log_softmax(-1), tokens, MASK)


def test_the_two_enumerations_agree():
    model = small_model(8)
    with torch.no_grad():
        bound = bernoulli_nelbo(lambda ids: model(ids).log_softmax(-1), [5, 6, 4], MASK)
    assert bound == pytest.approx(enumerated(model, [5, 6, 4]), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"masking": "exact", "t_sampling": "stratified"}, 0.01),
        ({"masking": "exact"}, 0.02),
        ({"t_sampling": "stratified"}, 0.05),
        ({}, 0.05),
        ({"noise_schedule": CosineNoiseSchedule()}, 0.05),
    ],
)
def test_the_bound_is_the_any_order_likelihood_of_a_two_token_row(options, tolerance):
    model = small_model(8)
    schedule = options.pop("noise_schedule", None)
    collate = collator(**options)
    collate.noise_schedule = schedule
    # The weight 1/t of independent masking has heavy tails, hence many draws.
    estimate = nelbo(model, TOKENIZER, collate, [{"input_ids": [5, 6]}], draws=20000, batch_size=5000)
    expected = enumerated(model, [5, 6])
    assert estimate.tokens == 2
    assert estimate.nats == pytest.approx(expected, rel=tolerance)
    assert estimate.nats_per_token == pytest.approx(expected / 2, rel=tolerance)


def test_the_bound_does_not_depend_on_the_batch_size_and_restores_training():
    model = small_model(8, dropout=0.3).train()
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [4]}]
    collate = collator(masking="exact")
    estimates = [nelbo(model, TOKENIZER, collate, rows, draws=6, batch_size=n).nats for n in (1, 5, 12)]
    assert estimates == pytest.approx([estimates[0]] * 3, rel=1e-5)
    assert model.training
    with pytest.raises(ValueError, match="at least 1"):
        nelbo(model, TOKENIZER, collate, rows, draws=0)


def test_exact_and_stratified_masking_narrows_the_estimate():
    model, rows = small_model(8), [{"input_ids": [4, 5, 6, 7] * 4}]
    spread = []
    for options in ({}, {"masking": "exact", "t_sampling": "stratified"}):
        estimates = [
            nelbo(model, TOKENIZER, collator(seed=seed, **options), rows, draws=16, batch_size=16).nats
            for seed in range(40)
        ]
        spread.append(torch.tensor(estimates).std())
    assert spread[1] < 0.4 * spread[0]


def test_bytes_are_those_of_utf8():
    assert LikelihoodBound(math.log(2) * 10, 3).bits_per_byte(["é", "漢字"]) == pytest.approx(10 / 8)
    assert LikelihoodBound(1.0, 0.0).bits_per_byte([]) == 0.0
    assert LikelihoodBound(0.0, 0.0).nats_per_token == 0.0


def test_generative_perplexity_comes_with_entropy(byte_bpe):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    judge = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(byte_bpe), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    ).eval()
    texts = ["the function returns", "the the the the"]
    judged = generative_perplexity(texts, judge, byte_bpe, batch_size=1)
    together = generative_perplexity(texts, judge, byte_bpe)
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([[byte_bpe.bos_token_id, *byte_bpe(text)["input_ids"]]])
        with torch.no_grad():
            total += float(judge(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert judged.perplexity == pytest.approx(math.exp(total / count), rel=1e-4)
    assert together.perplexity == pytest.approx(judged.perplexity, rel=1e-4)
    assert judged.tokens == count
    assert generative_perplexity(texts, judge.train(), byte_bpe) == together
    assert judge.training
    nothing = generative_perplexity([""], judge, byte_bpe)
    assert (nothing.perplexity, nothing.tokens) == (1.0, 0)
    varied = generative_perplexity(texts[:1], judge, byte_bpe).token_entropy
    assert generative_perplexity(texts[1:], judge, byte_bpe).token_entropy < varied
