"""transformers' models in loss and predictor, and ours in transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from spanwise.mlm import (
    BidirectionalCausalLM,
    DefaultMLMCollator,
    LogitsShiftBy1,
    MLMLoss,
    MLMPredictor,
    RotaryTransformerMLMModel,
    as_mlm_model,
    load_masked_lm,
)
from tests.mlm.helpers import MASK, IdTokenizer, ragged_batch, small_model

TOKENIZER = IdTokenizer()
SIZES = {
    "vocab_size": 30, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "pad_token_id": 0,
}  # fmt: skip
NONE = {"bos_token_id": None, "eos_token_id": None}


def backbone(name):
    torch.manual_seed(0)
    if name == "bert":
        return BertForMaskedLM(BertConfig(**SIZES, max_position_embeddings=64)).eval()
    if name == "roberta":
        return RobertaForMaskedLM(RobertaConfig(**SIZES, max_position_embeddings=64)).eval()
    if name == "modernbert":
        special = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
        return ModernBertForMaskedLM(ModernBertConfig(**SIZES, **special, attn_implementation="sdpa")).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES, **NONE, max_position_embeddings=64)).eval()


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_masked_lm_backbones_give_their_own_logits_at_chosen_positions(name):
    model = backbone(name)
    ids, mask = ragged_batch([5, 7, 3], 7)
    where = mask & (ids % 2 == 0)
    seen = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, given, out: seen.append(out.shape[:-1].numel()))
    wrapped = as_mlm_model(model)
    ours = wrapped(ids, mask, where=where)
    handle.remove()
    assert seen == [int(where.sum())]
    expected = model(input_ids=ids, attention_mask=mask.long()).logits
    torch.testing.assert_close(ours, expected[where], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(wrapped(ids, mask)[mask], expected[mask])


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
    torch.testing.assert_close(model(wide, mask)[:, 3:6], model(ids)[:, 1:], atol=1e-5, rtol=1e-4)
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


def test_flash_attention_is_refused_for_causal_models():
    model = backbone("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        BidirectionalCausalLM(model)


def test_a_body_without_a_head_is_refused():
    wrapped = as_mlm_model(backbone("bert").bert)
    ids, mask = ragged_batch([3], 3)
    with pytest.raises(ValueError, match="AutoModelForMaskedLM"):
        wrapped(ids, mask, where=mask)


def test_loading_finds_out_what_a_checkpoint_is(tmp_path):
    ours, bert, llama = small_model(), backbone("bert"), backbone("llama")
    for name, model in (("ours", ours), ("bert", bert), ("llama", llama)):
        model.save_pretrained(tmp_path / name)
    assert isinstance(load_masked_lm(tmp_path / "ours"), RotaryTransformerMLMModel)
    assert type(load_masked_lm(tmp_path / "bert").model) is BertForMaskedLM
    assert isinstance(load_masked_lm(tmp_path / "llama"), BidirectionalCausalLM)
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


def test_auto_classes_can_start_from_a_configuration():
    fresh = AutoModelForMaskedLM.from_config(
        AutoConfig.for_model("spanwise_mlm", num_embeddings=30, d_model=16, num_layers=1, nhead=2, rotary_emb_dim=8)
    )
    assert fresh.encoder[0].rotary_emb.inv_freq.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert not fresh.embed_tokens.weight[0].any()


def test_importing_the_room_first_registers_when_transformers_comes(tmp_path):
    """The other order is what this file itself does."""
    small_model().save_pretrained(tmp_path)
    program = (
        "import sys, spanwise.mlm\nassert 'transformers' not in sys.modules\n"
        "from transformers import AutoModelForMaskedLM\n"
        f"print(type(AutoModelForMaskedLM.from_pretrained({str(tmp_path)!r})).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "RotaryTransformerForMaskedLM", done.stderr
