"""The encoder against its written-out twin, padded and without padding."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.mlm import RotaryTransformerMLMModel
from spanwise.mlm.model import count_positions
from tests.mlm.helpers import PAD, ragged_batch, small_model
from tests.reference.mlm_padded_model import padded_logits


def twin(model, ids, mask, positions=None, allowed=None):
    positions = count_positions(mask) if positions is None else positions
    allowed = mask[:, None, :].expand(-1, ids.shape[1], -1) if allowed is None else allowed
    return padded_logits(
        model.state_dict(keep_vars=True), ids, allowed, positions, heads=2, rotated=4,
        activation=model.arguments["activation"],
    )  # fmt: skip


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("bare", [False, True])
def test_equals_the_padded_twin(activation, bare):
    model = small_model(activation=activation, final_layer_without_normalization=bare)
    ids, mask = ragged_batch([5, 7, 1], 7)
    torch.testing.assert_close(model(ids, mask)[mask], twin(model, ids, mask)[mask])


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_chosen_positions_without_padding_equal_the_padded_twin_in_value_and_gradient(lengths, seed):
    model = small_model()
    ids, mask = ragged_batch(lengths, 6, seed)
    where = mask & (torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.5)
    weight = torch.randn(30, generator=torch.Generator().manual_seed(seed))
    ours = model(ids, mask, where=where)
    (ours @ weight).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    allowed = mask[:, None, :].expand(-1, 6, -1) | ~mask.any(1)[:, None, None]
    slow = twin(model, ids, mask, allowed=allowed)[where]
    torch.testing.assert_close(ours, slow)
    (slow @ weight).sum().backward()
    for name, parameter in model.named_parameters():
        expected = parameter.grad
        if name == "embed_tokens.weight":
            expected = expected.clone()
            expected[PAD] = 0
        torch.testing.assert_close(gradients[name], expected, atol=1e-4, rtol=1e-4, msg=name)


def test_segments_do_not_see_one_another_and_restart():
    model = small_model()
    ids, _ = ragged_batch([7], 7)
    segments = torch.tensor([[1, 1, 1, 2, 2, 0, 0]])
    packed = model(ids, segment_ids=segments)
    apart = [model(ids[:, :3]), model(ids[:, 3:5])]
    torch.testing.assert_close(packed[:, :5], torch.cat(apart, 1))
    where = torch.tensor([[False, True, True, True, False, False, False]])
    torch.testing.assert_close(model(ids, segment_ids=segments, where=where), packed[where])


def test_padding_on_the_left_changes_nothing():
    model = small_model()
    ids, _ = ragged_batch([5], 5)
    shifted = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids, torch.zeros(1, 2, dtype=torch.long)], 1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 0, 0]])
    torch.testing.assert_close(model(shifted, mask)[:, 3:8], model(ids))


@pytest.mark.parametrize("kind", [torch.bool, torch.long, torch.float32])
def test_two_and_three_dimensional_masks_agree_whatever_their_type(kind):
    model = small_model()
    ids, mask = ragged_batch([4, 6], 6)
    square = mask[:, None, :].expand(-1, 6, -1).contiguous()
    torch.testing.assert_close(model(ids, square.to(kind))[mask], model(ids, mask.to(kind))[mask])


def test_query_times_key_masks_are_obeyed():
    model = small_model()
    ids, mask = ragged_batch([6, 6], 6)
    causal = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 6, 6)
    torch.testing.assert_close(model(ids, causal), twin(model, ids, mask, allowed=causal))


def test_a_row_of_padding_stays_finite():
    model = small_model()
    ids, mask = ragged_batch([0, 3], 4)
    assert model(ids, mask).isfinite().all()
    assert model(ids, mask, where=mask).isfinite().all()


def test_positions_none_counts_attended_tokens():
    model = small_model()
    ids, mask = ragged_batch([3, 5], 5)
    torch.testing.assert_close(model(ids, mask), model(ids, mask, count_positions(mask)))
    assert model(ids[0]).shape == (5, 30)


def test_token_types_are_accepted_and_unused():
    model = small_model()
    ids, mask = ragged_batch([3, 5], 5)
    kinds = torch.ones_like(ids)
    torch.testing.assert_close(model(ids, mask, token_type_ids=kinds), model(ids, mask), rtol=0, atol=0)


def test_the_head_sees_chosen_positions_only():
    model = small_model()
    ids, mask = ragged_batch([5, 7], 7)
    where = mask.clone()
    where[:, 2:] = False
    seen = []
    model.output_layer.linear.register_forward_hook(lambda module, given, out: seen.append((given[0].shape, out.shape)))
    embedded = []
    model.embed_tokens.register_forward_hook(lambda module, given, out: embedded.append(out.shape))
    model(ids, mask, where=where)
    assert seen == [((4, 16), (4, 30))]
    assert embedded == [(12, 16)]


def test_the_last_layer_ends_where_logits_are_asked_for():
    """Everything is attended to, and only what is read goes through the last feed-forward, padded or not."""
    model = small_model()
    ids, mask = ragged_batch([5, 7], 7)
    where = mask & (torch.arange(7) % 3 == 0)
    rows = []
    for layer in model.encoder:
        layer.mlp.register_forward_hook(lambda module, given, out: rows.append(out.shape[:-1].numel()))
    model(ids, mask, where=where)
    assert rows == [12, int(where.sum())]
    rows.clear()
    square = mask[:, None, :].expand(-1, 7, -1)
    torch.testing.assert_close(model(ids, square, where=where), model(ids, mask)[where])
    assert rows == [14, int(where.sum()), 14, 14]


def test_only_flash_attention_may_be_asked_for_and_says_the_same():
    ids, mask = ragged_batch([5, 3], 5)
    plain, forced = small_model(), small_model(force_flash_attn=True)
    torch.testing.assert_close(forced(ids, mask, where=mask), plain(ids, mask, where=mask))
    used = []
    forced.encoder[0].o_proj.register_forward_hook(lambda *_: used.append(torch.backends.cuda.math_sdp_enabled()))
    forced(ids, mask, where=mask)
    assert used == [False]
    assert torch.backends.cuda.math_sdp_enabled()


def test_padding_is_zero_and_gets_no_gradient():
    model = small_model()
    ids, mask = ragged_batch([2, 4], 4)
    model(ids, mask).sum().backward()
    assert not model.embed_tokens.weight[PAD].any()
    assert not model.embed_tokens.weight.grad[PAD].any()


def test_state_dict_has_the_reference_names():
    names = set(small_model().state_dict())
    layer = {
        f"encoder.{i}.{name}"
        for i in range(2)
        for name in (
            "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "attn_qkv.weight", "o_proj.weight",
            "mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias", "rotary_emb.inv_freq",
        )
    }  # fmt: skip
    ends = {"embed_tokens.weight", "output_layer.norm_final.weight", "output_layer.norm_final.bias"}
    assert names == layer | ends | {"output_layer.linear.weight"}


def test_weight_decay_spares_biases_and_norms():
    model = small_model()
    decayed = {name for name, _ in model.get_named_params_for_weight_decay()}
    spared = {name for name, _ in model.get_named_params_for_no_weight_decay()}
    assert decayed | spared == {name for name, _ in model.named_parameters()}
    assert not decayed & spared
    assert all("bias" in name or "norm" in name for name in spared)


def test_dropout_acts_in_training_only():
    model = small_model(dropout=0.5)
    ids, mask = ragged_batch([6], 6)
    torch.testing.assert_close(model(ids, mask), model(ids, mask))
    model.train()
    assert not torch.equal(model(ids, mask, where=mask), model(ids, mask, where=mask))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rotary_emb_dim": 64}, "rotary_emb_dim=8"),
        ({"activation": "swish", "rotary_emb_dim": 8}, "relu"),
        ({"nhead": 3, "rotary_emb_dim": 4}, "multiple"),
        ({"num_layers": 0, "rotary_emb_dim": 8}, "at least 1"),
        ({"padding_idx": 8, "rotary_emb_dim": 8}, "num_embeddings=8"),
    ],
)
def test_wrong_sizes_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        RotaryTransformerMLMModel(**{"num_embeddings": 8, "d_model": 16, "num_layers": 1, "nhead": 2, **arguments})


def test_rows_longer_than_the_model_are_refused():
    model = small_model(max_length=4)
    with pytest.raises(ValueError, match="max_length is 4"):
        model(torch.full((1, 5), 5))
    with pytest.raises(ValueError, match="positions run from 0 to 9"):
        model(torch.full((1, 2), 5), positions=torch.tensor([[0, 9]]))
    assert model(torch.full((1, 4), 5)).shape == (1, 4, 30)


def test_ids_without_an_embedding_are_refused():
    for ids in ([[5, 30]], [[-100, 5]]):
        with pytest.raises(ValueError, match="expected 0 to 29"):
            small_model()(torch.tensor(ids))


def test_chosen_padding_is_refused():
    ids, mask = ragged_batch([2, 4], 4)
    with pytest.raises(ValueError, match="loss_on_padding=False"):
        small_model()(ids, mask, where=torch.ones_like(mask))


def test_masks_with_heads_are_refused():
    with pytest.raises(ValueError, match="dimension of heads"):
        small_model()(torch.full((1, 2), 5), torch.ones(1, 1, 2, 2))


def test_saved_and_loaded_weights_are_equal(tmp_path):
    model = small_model(activation="gelu")
    model.save_pretrained(tmp_path)
    loaded = RotaryTransformerMLMModel.from_pretrained(tmp_path)
    ids, mask = ragged_batch([3, 6], 6)
    torch.testing.assert_close(loaded(ids, mask), model(ids, mask), rtol=0, atol=0)
    assert json.loads((tmp_path / "config.json").read_text())["activation"] == "gelu"


def test_checkpoints_that_do_not_fit_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        RotaryTransformerMLMModel.from_pretrained(tmp_path)
    small_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_embeddings": 31}))
    with pytest.raises(ValueError, match="another vocabulary"):
        RotaryTransformerMLMModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "spanwise_mlm"}))
    with pytest.raises(ValueError, match="num_embeddings"):
        RotaryTransformerMLMModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="not copied whole"):
        RotaryTransformerMLMModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match="'bert'"):
        RotaryTransformerMLMModel.from_pretrained(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_ragged_on_a_gpu_equals_padded(kind):
    model = RotaryTransformerMLMModel(50, 64, 2, 2, dropout=0.0, rotary_emb_dim=32).eval().cuda().to(kind)
    ids, mask = (part.cuda() for part in ragged_batch([5, 33, 64, 17], 64, size=50))
    tolerance = {"atol": 2e-4, "rtol": 1e-3} if kind == torch.float32 else {"atol": 6e-2, "rtol": 6e-2}
    torch.testing.assert_close(model(ids, mask, where=mask), model(ids, mask)[mask], **tolerance)
