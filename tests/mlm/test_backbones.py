"""transformers' models in loss and predictor, and ours in transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForMaskedLM, BertForMaskedLM

from spanwise.mlm import (
    BidirectionalCausalLM,
    DefaultMLMCollator,
    LogitsShiftBy1,
    MaskedLMBackbone,
    MLMLoss,
    MLMPredictor,
    MLMSeq2SeqCollator,
    MLMSeq2SeqPredCollator,
    MLMSeq2SeqTrainCollator,
    PackedMLMCollator,
    RotaryTransformerMLMModel,
    as_mlm_model,
    load_masked_lm,
)
from spanwise.mlm.backbones import is_causal, score
from tests.mlm.helpers import EOS, MASK, PAD, SIZES, IdTokenizer, backbone, ragged_batch, small_model

TOKENIZER = IdTokenizer()


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "xlm", "flaubert"])
def test_masked_lm_backbones_give_their_own_logits_at_chosen_positions(name):
    model = backbone(name)
    ids, mask = ragged_batch([5, 7, 3], 7)
    where = mask & (ids % 2 == 0)
    seen = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, given, out: seen.append(out.shape[:-1].numel()))
    wrapped = as_mlm_model(model)
    assert type(wrapped) is MaskedLMBackbone
    ours = wrapped(ids, mask, where=where)
    handle.remove()
    assert seen == [int(where.sum())]
    expected = model(input_ids=ids, attention_mask=mask.long()).logits
    torch.testing.assert_close(ours, expected[where], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(wrapped(ids, mask)[mask], expected[mask])


COLLATORS = {
    "default": lambda: DefaultMLMCollator(TOKENIZER, None, None, loss_on_padding=False, truncate=None),
    "seq2seq": lambda: MLMSeq2SeqCollator(TOKENIZER, loss_on_padding=False, truncate=None),
    "seq2seq_train": lambda: MLMSeq2SeqTrainCollator(TOKENIZER, loss_on_padding=False, truncate=None),
    "packed": lambda: PackedMLMCollator(TOKENIZER, 20),
}


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "llama"])
@pytest.mark.parametrize("collator", COLLATORS)
def test_a_row_loses_the_same_alone_and_among_others(name, collator):
    """Alone a row is as wide as it is; among others it is padded, on the left where the collator does that."""
    loss = MLMLoss(model=backbone(name, sharp=True), tokenizer=TOKENIZER)
    rows = [
        {"input_ids": [*range(4, 4 + n), EOS, 9, 8, EOS], "prompt_ids": [*range(10, 10 + m)], "epoch": 0, "position": n}
        for n, m in ((2, 7), (5, 1), (14, 3))
    ]
    together = COLLATORS[collator]()(rows)
    whole = loss.parts(together)
    apart = []
    for row in range(3):
        part = {key: value[row : row + 1] for key, value in together.items() if isinstance(value, torch.Tensor)}
        real = part["attention_mask"][0].bool()
        columns = {key: value[:, real] if value.ndim == 2 else value for key, value in part.items()}
        apart.append(loss.parts(columns))
    assert float(whole.count) > 5
    torch.testing.assert_close(whole.total, sum(part.total for part in apart), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "llama"])
@pytest.mark.parametrize("options", [{"confidence": "top_prob", "temperature": 0}, {"ddpm_cache": True}])
@pytest.mark.parametrize("left", [True, False])
def test_a_prompt_is_continued_the_same_alone_and_beside_a_longer_one(name, options, left):
    model = backbone(name, sharp=True)
    rows = [{"prompt_ids": [5, 6], "idx": 3}, {"prompt_ids": [*range(4, 24)], "idx": 9}]
    collator = MLMSeq2SeqPredCollator(TOKENIZER)
    fill = MLMPredictor(4, 6, TOKENIZER, model, **options)
    alone, together = collator(rows[:1]), collator(rows)
    if not left:
        for field in ("input_ids", "attention_mask"):
            together[field][0] = together[field][0].roll(3)
    whole = fill.predict(together)["ids"]
    assert torch.equal(whole[:1, -6:], fill.predict(alone)["ids"][:, -6:])
    assert torch.equal(whole[1:], fill.predict(collator(rows[1:]))["ids"])


def test_token_types_reach_a_model_that_has_them():
    model, (ids, mask) = backbone("bert", sharp=True), ragged_batch([5, 3], 5)
    kinds = torch.ones_like(ids)
    ours = as_mlm_model(model)(ids, mask, None, kinds)[mask]
    plain = model(input_ids=ids, attention_mask=mask.long(), token_type_ids=kinds).logits[mask]
    torch.testing.assert_close(ours, plain)
    assert not torch.allclose(ours, as_mlm_model(model)(ids, mask)[mask])


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "llama"])
def test_a_mask_of_query_and_key_says_what_one_of_keys_says(name, kernel):
    model = backbone(name, sharp=True)
    model.set_attn_implementation(kernel)
    ids, mask = ragged_batch([9, 4, 0], 9)
    square = mask[:, None, :].expand(-1, 9, -1).long()
    wrapped = as_mlm_model(model)
    torch.testing.assert_close(wrapped(ids, square)[mask], wrapped(ids, mask)[mask], atol=1e-4, rtol=1e-4)
    assert wrapped(ids, square).isfinite().all()


def test_positions_behind_pad_are_counted_from_there_and_bound_the_length():
    """RoBERTa's first token takes the row behind PAD's, so its table serves one token less."""
    wrapped = as_mlm_model(backbone("roberta"))
    assert wrapped.max_length == 63
    assert as_mlm_model(backbone("bert")).max_length == 64
    longest = torch.full((1, 63), 5)
    assert wrapped(longest).shape == (1, 63, 30)
    with pytest.raises(ValueError, match="expected 0 to 62"):
        wrapped(torch.full((1, 64), 5))
    with pytest.raises(ValueError, match="expected 0 to 29"):
        wrapped(torch.full((1, 2), 30))
    with pytest.raises(ValueError, match="expected at most 63"):
        MLMPredictor(1, 1, TOKENIZER, wrapped).predict({"input_ids": longest})


@pytest.mark.parametrize("name", ["bert", "roberta", "llama"])
def test_padding_may_be_trained_on(name):
    rows = [{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9, 10]}]
    batch = DefaultMLMCollator(TOKENIZER, 8)(rows)
    batch["input_ids"][:, -1] = MASK
    assert (batch["target_ids"][:, -1] == PAD).all()
    loss = MLMLoss(loss_on_padding=True, model=backbone(name), tokenizer=TOKENIZER)(batch)["loss"]
    assert loss.item() > 1


@pytest.mark.parametrize("name", ["bert", "modernbert", "llama"])
def test_loss_and_predictor_take_backbones(name):
    model = backbone(name)
    rows = [{"input_ids": [5, 6, 7, 8], "epoch": 0, "position": place} for place in range(3)]
    batch = DefaultMLMCollator(TOKENIZER, 8, None, loss_on_padding=False, masking="exact")(rows)
    loss = MLMLoss(model=model, tokenizer=TOKENIZER)(batch)["loss"]
    scored = batch["input_ids"] == MASK
    logits = as_mlm_model(model)(batch["input_ids"], batch["attention_mask"])
    torch.testing.assert_close(loss, cross_entropy(logits[scored], batch["target_ids"][scored]))
    loss.backward()
    assert model.get_input_embeddings().weight.grad.any()
    out = MLMPredictor(3, 5, TOKENIZER, model, confidence="top_prob").predict({"input_ids": torch.tensor([[5, 6]])})
    assert not (out["ids"] == MASK).any()


def test_a_causal_model_attends_both_ways_and_is_read_one_to_the_left():
    model = BidirectionalCausalLM(backbone("llama"))
    ids, mask = ragged_batch([6], 6)
    changed = ids.clone()
    changed[0, 5] = 4 + (int(ids[0, 5]) - 3) % 26
    assert not torch.allclose(model(ids, mask)[0, 1], model(changed, mask)[0, 1])
    everything = model(ids, mask)
    where = torch.tensor([[True, False, True, False, False, True]])
    torch.testing.assert_close(model(ids, mask, where=where), everything[where])
    additive = torch.zeros(1, 1, 6, 6)
    bare = model.model(input_ids=ids, attention_mask=additive).logits
    torch.testing.assert_close(everything, LogitsShiftBy1()(bare))


def test_a_causal_model_sees_no_padding():
    model = BidirectionalCausalLM(backbone("llama"))
    ids, _ = ragged_batch([4], 4)
    wide = torch.cat([torch.zeros(1, 2, dtype=torch.long), ids, torch.zeros(1, 1, dtype=torch.long)], 1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0]])
    torch.testing.assert_close(model(wide, mask)[:, 2:6], model(ids), atol=1e-5, rtol=1e-4)
    split = torch.cat([wide[:, :4], wide[:, :1], wide[:, 4:]], 1)
    gap = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0]])
    torch.testing.assert_close(model(split, gap)[gap == 1], model(ids)[0], atol=1e-5, rtol=1e-4)
    assert model(wide, torch.zeros_like(mask)).isfinite().all()


def test_a_causal_checkpoint_learns_as_a_masked_model():
    """Copying: the second half of a row repeats the first, so hidden tokens follow from what is visible later too."""
    model = backbone("llama").train()
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(4, 12, (256, 4), generator=generator)
    rows = [{"input_ids": row, "epoch": 0, "position": place} for place, row in enumerate(torch.cat([half, half], 1))]
    collator = DefaultMLMCollator(
        TOKENIZER, 8, None, add_bos=False, add_eos=False, masking="exact", t_sampling="stratified"
    )
    loss = MLMLoss(model=model, tokenizer=TOKENIZER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = []
    for step in range(120):
        batch = collator([{**row, "epoch": step} for row in rows[(step % 4) * 64 :][:64]])
        value = loss(batch)["loss"]
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(value.item())
    assert sum(values[-10:]) / 10 < 0.8 * values[0]
    # A causal model could not know the first half: its next-token loss there stays at log 8.
    batch = {"input_ids": torch.cat([torch.full((64, 4), MASK), half[:64]], 1)}
    filled = MLMPredictor(4, tokenizer=TOKENIZER, model=model, temperature=0, confidence="top_prob").predict(batch)
    assert (filled["ids"][:, :4] == half[:64]).float().mean() > 0.35


def test_the_shift_as_a_hook_reads_no_padding_and_no_other_document():
    bare = small_model(seed=2)
    ids, _ = ragged_batch([4], 4)
    wide = torch.cat([torch.zeros(1, 2, dtype=torch.long), ids], 1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    hook, every = LogitsShiftBy1(), torch.ones_like(ids, dtype=torch.bool)
    alone = score(bare, ids, None, None, every, logits_hook=hook)
    torch.testing.assert_close(alone, LogitsShiftBy1()(bare(ids))[0])
    torch.testing.assert_close(score(bare, wide, mask, None, mask == 1, logits_hook=hook), alone)
    pair, segments = torch.cat([ids, ids], 1), torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2]])
    packed = score(bare, pair, None, None, segments > 0, segment_ids=segments, logits_hook=hook)
    torch.testing.assert_close(packed, torch.cat([alone, alone]))


def test_flash_attention_is_refused_where_a_mask_of_query_and_key_is_needed():
    for name in ("llama", "bert"):
        model = backbone(name)
        model.config._attn_implementation_internal = "flash_attention_2"
        ids, mask = ragged_batch([3], 3)
        with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
            as_mlm_model(model)(ids, mask[:, None, :].expand(-1, 3, -1))


def test_what_is_causal_is_told_by_the_tables_of_transformers_not_by_a_name():
    masked = ("XLMWithLMHeadModel", "FlaubertWithLMHeadModel", "BertForMaskedLM", "RotaryTransformerForMaskedLM")
    assert not any(is_causal(name) for name in masked)
    assert all(is_causal(name) for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "OwnForCausalLM", "BertLMHeadModel"))


def test_a_body_without_a_head_is_refused():
    wrapped = as_mlm_model(backbone("bert").bert)
    ids, mask = ragged_batch([3], 3)
    with pytest.raises(ValueError, match="AutoModelForMaskedLM"):
        wrapped(ids, mask, where=mask)


def test_loading_finds_out_what_a_checkpoint_is(tmp_path):
    models = {"ours": small_model()} | {name: backbone(name) for name in ("bert", "llama", "xlm")}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    assert isinstance(load_masked_lm(tmp_path / "ours"), RotaryTransformerMLMModel)
    assert type(load_masked_lm(tmp_path / "bert").model) is BertForMaskedLM
    assert isinstance(load_masked_lm(tmp_path / "llama"), BidirectionalCausalLM)
    assert type(load_masked_lm(tmp_path / "xlm")) is MaskedLMBackbone
    with pytest.raises(ValueError, match="no model could be loaded"):
        load_masked_lm(tmp_path / "nothing")


def test_auto_classes_load_our_checkpoints(tmp_path):
    model = small_model(activation="gelu")
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).d_model == 16
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    ids, mask = ragged_batch([5, 3], 5)
    out = loaded(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(~mask, -100))
    torch.testing.assert_close(out.logits, model(ids, mask))
    torch.testing.assert_close(out.loss, cross_entropy(model(ids, mask)[mask], ids[mask]))
    torch.testing.assert_close(loaded(ids, mask, where=mask), model(ids, mask, where=mask))
    loaded.save_pretrained(tmp_path / "again")
    again = RotaryTransformerMLMModel.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(again(ids, mask), model(ids, mask), rtol=0, atol=0)
    assert set(again.state_dict()) == set(model.state_dict())


def test_a_vocabulary_may_grow_in_transformers_and_comes_back(tmp_path):
    small_model().save_pretrained(tmp_path)
    grown = AutoModelForMaskedLM.from_pretrained(tmp_path)
    grown.resize_token_embeddings(33, mean_resizing=False)
    ids = torch.tensor([[5, 32]])
    grown.save_pretrained(tmp_path / "grown")
    again = RotaryTransformerMLMModel.from_pretrained(tmp_path / "grown")
    assert again.num_embeddings == grown.num_embeddings == grown.config.vocab_size == 33
    torch.testing.assert_close(again(ids), grown(ids).logits)
    torch.testing.assert_close(grown(ids[:, :1]).logits[..., :30], small_model()(ids[:, :1]))


def test_what_answers_with_more_than_logits_is_a_model_too():
    plain, twin = small_model(), AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **SIZES)).eval()
    ids, mask = ragged_batch([5, 3], 5)

    def bare(x, attention_mask, positions):
        return twin(input_ids=x, attention_mask=attention_mask.long())

    torch.testing.assert_close(score(bare, ids, mask, None, mask), score(as_mlm_model(twin), ids, mask, None, mask))
    config = AutoConfig.for_model("spanwise_mlm", **plain.arguments)
    ours = AutoModelForMaskedLM.from_config(config).eval()
    ours.load_state_dict(plain.state_dict())
    hooked = [score(model, ids, mask, None, mask, logits_hook=LogitsShiftBy1()) for model in (ours, plain)]
    torch.testing.assert_close(*hooked)


def test_auto_classes_can_start_from_a_configuration():
    fresh = AutoModelForMaskedLM.from_config(
        AutoConfig.for_model("spanwise_mlm", num_embeddings=30, d_model=16, num_layers=1, nhead=2, rotary_emb_dim=8)
    )
    assert fresh.encoder[0].rotary_emb.inv_freq.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert not fresh.embed_tokens.weight[0].any()


@pytest.mark.parametrize("first", ["AutoModelForMaskedLM", "BertForMaskedLM"])
def test_importing_the_room_first_registers_when_transformers_comes(tmp_path, first):
    """The other order is what this file itself does. A model's own module asks for configurations before there are
    models to register."""
    small_model().save_pretrained(tmp_path)
    program = (
        "import sys, spanwise.mlm\nassert 'transformers' not in sys.modules\n"
        f"from transformers import {first}\nfrom transformers import AutoModelForMaskedLM\n"
        f"print(type(AutoModelForMaskedLM.from_pretrained({str(tmp_path)!r})).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "RotaryTransformerForMaskedLM", done.stderr
