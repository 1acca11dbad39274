"""Filling: counts of forwards, independence of rows, orders, caches, and what is refused."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from spanwise.mlm import CosineNoiseSchedule, HistoryPluginBase, LogitsShiftBy1, MLMPredictor
from tests.mlm.helpers import MASK, PAD, IdTokenizer, backbone, small_model

TOKENIZER = IdTokenizer()
ORDERS = {
    "uniform": {},
    "top_prob": {"confidence": "top_prob"},
    "margin": {"confidence": "margin"},
    "entropy": {"confidence": "entropy"},
    "threshold": {"confidence": "top_prob", "threshold": 0.9},
    "entropy_threshold": {"confidence": "entropy", "threshold": 2.0},
    "factor": {"factor": 1.5},
    "ddpm_cache": {"ddpm_cache": True},
    "remasking": {"remasking": 0.4},
    "blocks": {"block_size": 3},
    "prefix_cache": {"block_size": 2, "cache": "prefix", "confidence": "top_prob"},
    "dual_cache": {"block_size": 2, "cache": "dual"},
}


class Counting(torch.nn.Module):
    """A model that notes how many rows each of its calls had."""

    takes_where, max_length, num_embeddings = True, 64, 30

    def __init__(self):
        super().__init__()
        self.inner = small_model()
        self.calls: list[int] = []

    def forward(self, ids, attention_mask=None, positions=None, *, where=None):
        self.calls.append(len(ids))
        assert where is None or bool(where.any(1).all()), "a row without anything to fill was run"
        return self.inner(ids, attention_mask, positions, where=where)


def prompts(lengths, width=6, *, masks=0, left=True):
    """Ids 4… with padding, then ``masks`` MASK."""
    ids = torch.full((len(lengths), width + masks), PAD)
    mask = torch.zeros(len(lengths), width + masks, dtype=torch.long)
    for row, length in enumerate(lengths):
        begin = width - length if left else 0
        ids[row, begin : begin + length] = torch.arange(4, 4 + length) + row
        ids[row, begin + length : begin + length + masks] = MASK
        mask[row, begin : begin + length + masks] = 1
    return {"input_ids": ids, "attention_mask": mask}


def predictor(steps=4, model=None, **options):
    return MLMPredictor(steps, tokenizer=TOKENIZER, model=small_model() if model is None else model, **options)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("steps", [1, 3, 50])
def test_every_mask_is_filled_within_the_steps(name, steps):
    batch = prompts([2, 5, 6])
    before = batch["input_ids"].clone()
    out = predictor(steps, max_new_tokens=7, **ORDERS[name]).predict(batch)
    assert torch.equal(batch["input_ids"], before)
    assert not (out["ids"] == MASK).any()
    assert torch.equal(out["ids"][:, :6], before)
    assert all(1 <= taken <= min(steps, 7) for taken in out["steps_taken"])
    assert out["output_start_idx"].tolist() == [6, 6, 6]
    assert out["tokens_per_forward"] == [7 / taken for taken in out["steps_taken"]]
    assert len(out["text"]) == len(out["time_taken"]) == 3
    assert out["loss"] is None


@pytest.mark.parametrize("name", [name for name in ORDERS if "cache" not in name or name == "ddpm_cache"])
def test_no_forward_has_a_row_with_nothing_to_fill(name):
    model = Counting()
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8], [5, MASK, 7, 8], [MASK, MASK, MASK, MASK]])}
    out = predictor(9, model, **ORDERS[name]).predict(batch)
    assert out["steps_taken"][0] == 0
    assert out["steps_taken"][1] == 1
    assert len(model.calls) == out["forwards"] <= 1 + 4
    assert sum(model.calls) == sum(out["steps_taken"])
    assert out["tokens_per_forward"][0] == 0


def test_nothing_to_fill_costs_no_forward():
    model = Counting()
    batch = {"input_ids": torch.tensor([[5, 6]])}
    out = predictor(4, model, max_new_tokens=0).predict(batch)
    assert model.calls == []
    assert out["ids"].tolist() == [[5, 6]]
    assert (out["steps_taken"], out["forwards"]) == ([0], 0)


def test_all_masks_in_one_step():
    out = predictor(1).predict({"input_ids": torch.full((2, 5), MASK)})
    assert not (out["ids"] == MASK).any()
    assert out["steps_taken"] == [1, 1]


def test_masks_are_split_evenly_over_the_steps():
    history = []

    class Note(HistoryPluginBase):
        def observe(self, x, scored, step, max_new_tokens):
            history.append(int((x == MASK).sum()))

    predictor(4, max_new_tokens=10, history=Note()).predict(prompts([3]))
    filled = [before - after for before, after in pairwise(history)]
    assert sum(filled) == 10
    assert set(filled) <= {2, 3}


@settings(max_examples=12)
@given(
    name=st.sampled_from(sorted(ORDERS)),
    order=st.permutations(range(4)),
    size=st.integers(1, 4),
    padding=st.integers(0, 3),
)
def test_a_row_does_not_depend_on_order_size_or_padding(name, order, size, padding):
    lengths = [2, 4, 6, 3]
    fill = predictor(4, max_new_tokens=5, temperature=1.5, **ORDERS[name])
    batch = prompts(lengths) | {"idx": torch.arange(4)}
    whole = fill.predict(batch, seed=3)
    chosen = order[:size]
    wider = prompts(lengths, 6 + padding)
    part = {key: value[chosen] for key, value in wider.items()} | {"idx": torch.tensor(chosen)}
    out = fill.predict(part, seed=3)
    assert torch.equal(out["ids"][:, -5:], whole["ids"][chosen][:, -5:])
    assert out["steps_taken"] == [whole["steps_taken"][row] for row in chosen]


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("block", [1, 3])
def test_ragged_prompts_with_a_cache_equal_one_by_one(cache, block, left):
    fill = predictor(6, temperature=0.7, cache=cache, block_size=block, confidence="top_prob")
    lengths = [1, 6, 3]
    together = fill.predict(prompts(lengths, masks=8, left=left) | {"idx": torch.arange(3)})
    for row, length in enumerate(lengths):
        ids = torch.cat([torch.arange(4, 4 + length) + row, torch.full((8,), MASK)])[None]
        alone = fill.predict({"input_ids": ids, "idx": torch.tensor([row])})
        begin = 6 - length if left else 0
        assert torch.equal(together["ids"][row, begin : begin + length + 8], alone["ids"][0])
        assert together["steps_taken"][row] == alone["steps_taken"][0]


def test_a_cache_of_one_block_equals_no_cache():
    batch = prompts([2, 5])
    plain = predictor(4, max_new_tokens=6, confidence="top_prob", temperature=0).predict(batch)
    for cache in ("prefix", "dual"):
        one_step_blocks = predictor(1, max_new_tokens=6, cache=cache, block_size=6, temperature=0).predict(batch)
        assert torch.equal(one_step_blocks["ids"], predictor(1, max_new_tokens=6, temperature=0).predict(batch)["ids"])
    blocks = predictor(6, max_new_tokens=6, cache="dual", block_size=1, temperature=0).predict(batch)
    uncached = predictor(6, max_new_tokens=6, block_size=1, temperature=0).predict(batch)
    assert torch.equal(blocks["ids"], uncached["ids"])
    assert plain["ids"].shape == blocks["ids"].shape


def test_a_cached_step_runs_the_block_alone():
    model, widths = small_model(), []
    model.embed_tokens.register_forward_hook(lambda module, given, out: widths.append(out.shape[1]))
    predictor(8, model, max_new_tokens=8, cache="dual", block_size=4).predict(prompts([6, 4]))
    assert widths == [14, 4, 4, 4, 14, 4, 4, 4]
    widths.clear()
    predictor(8, model, max_new_tokens=8, cache="prefix", block_size=4).predict(prompts([6, 4]))
    assert widths == [14, 8, 8, 8, 14, 4, 4, 4]


def test_the_same_seed_repeats_and_another_differs():
    fill, batch = predictor(3, max_new_tokens=12), prompts([4, 4])
    first = fill.predict(batch, seed=1)["ids"]
    assert torch.equal(first, fill.predict(batch, seed=1)["ids"])
    assert not torch.equal(first, fill.predict(batch, seed=2)["ids"])
    assert torch.equal(fill.predict(batch)["ids"], fill.predict(batch, seed=0)["ids"])
    assert not torch.equal(first, fill.predict(batch, seed=2**80)["ids"])


def test_mask_and_suppressed_tokens_are_never_drawn():
    model = small_model()
    with torch.no_grad():
        model.output_layer.linear.weight[MASK] = 50 * model.output_layer.norm_final.weight
        model.output_layer.norm_final.bias.fill_(5.0)
    out = predictor(2, model, max_new_tokens=20, suppress_tokens=range(5, 99)).predict(prompts([3]))
    assert set(out["ids"][0, 6:].tolist()) <= {0, 2, 3, 4}


def test_masks_that_are_not_attended_are_filled_too():
    batch = {"input_ids": torch.tensor([[5, MASK, MASK]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    assert not (predictor().predict(batch)["ids"] == MASK).any()


def test_greedy_top_prob_fills_the_surest_first():
    model, batch = small_model(), {"input_ids": torch.tensor([[5, MASK, 7, MASK, MASK]])}
    out = predictor(3, model, temperature=0, confidence="top_prob").predict(batch)
    ids = batch["input_ids"].clone()
    with torch.no_grad():
        for _ in range(3):
            logits = model(ids)
            logits[..., MASK] = -math.inf
            best = logits.softmax(-1).max(-1)
            place = best.values.masked_fill(ids != MASK, -1).argmax()
            ids[0, place] = best.indices[0, place]
    assert torch.equal(out["ids"], ids)


@pytest.mark.parametrize("confidence", ["prob_diff", "top_prob", "entropy"])
def test_a_small_threshold_fills_one_position_per_step_and_a_large_one_all(confidence):
    one = predictor(50, max_new_tokens=6, confidence=confidence, threshold=1e-9).predict(prompts([4]))
    assert one["steps_taken"] == [6]
    every = predictor(50, max_new_tokens=6, confidence=confidence, threshold=1e9).predict(prompts([4]))
    assert every["steps_taken"] == [1]


@pytest.mark.parametrize("schedule", [None, CosineNoiseSchedule()])
def test_reveal_times_follow_the_schedule(schedule):
    """After step k of 4 the share hidden at time 1 - k/4 is left; 56 positions leave no step without one."""
    shares = []

    class Note(HistoryPluginBase):
        def observe(self, x, scored, step, max_new_tokens):
            shares.append(float((x[:, 1:] == MASK).float().mean()))

    fill = predictor(4, max_new_tokens=56, ddpm_cache=True, noise_schedule=schedule, history=Note())
    fill.predict({"input_ids": torch.full((64, 1), 5)})
    times = [1 - step / 4 for step in range(5)]
    expected = [time if schedule is None else 1 - math.cos(time * math.pi / 2) for time in times]
    assert shares == pytest.approx(expected, abs=4 * math.sqrt(0.25 / (64 * 56)))
    assert shares[-1] == 0


def test_reveal_times_of_few_positions_cost_no_empty_step():
    few = predictor(1000, max_new_tokens=5, ddpm_cache=True, noise_schedule=CosineNoiseSchedule()).predict(prompts([4]))
    assert few["steps_taken"] == [few["forwards"]]
    assert few["forwards"] <= 5


def test_without_confidence_every_position_is_as_likely_to_be_next():
    seen = []

    class Note(HistoryPluginBase):
        def observe(self, x, scored, step, max_new_tokens):
            seen.append(x == MASK)

    rows = 800
    predictor(8, history=Note()).predict({"input_ids": torch.full((rows, 8), MASK)})
    for before, after in pairwise(seen):
        filled = (before & ~after).float()
        assert (filled.sum(1) == 1).all()
        assert filled.mean(0).tolist() == pytest.approx([1 / 8] * 8, abs=4 * math.sqrt(7 / 64 / rows))


@pytest.mark.parametrize("new", [None, 4])
@pytest.mark.parametrize("name", ORDERS)
def test_a_row_of_padding_changes_nothing_in_any_order(name, new):
    batch = prompts([3, 0, 5], masks=3)
    batch["input_ids"][1] = PAD
    batch["attention_mask"][1] = 0
    batch["idx"] = torch.arange(3)
    others = {key: value[[0, 2]] for key, value in batch.items()}
    fill = predictor(5, max_new_tokens=new, **ORDERS[name])
    out, without = fill.predict(batch), fill.predict(others)
    assert torch.equal(out["ids"][[0, 2]], without["ids"])
    assert (out["ids"][1, :9] == PAD).all()
    assert not (out["ids"] == MASK).any()
    assert (out["steps_taken"][1] == 0) == (new is None)


def test_remasking_hides_filled_positions_again_and_spares_the_prompt():
    seen = []

    class Note(HistoryPluginBase):
        def observe(self, x, scored, step, max_new_tokens):
            seen.append(x.clone())

    model = Counting()
    batch = prompts([4])
    predictor(12, model, max_new_tokens=12, remasking=0.9, history=Note()).predict(batch)
    again = [((a != MASK) & (b == MASK)).sum() for a, b in pairwise(seen)]
    assert sum(again) > 0
    assert all(torch.equal(x[:, :6], batch["input_ids"]) for x in seen)
    assert len(model.calls) <= 12


def test_a_hook_shifts_the_logits():
    model = small_model()
    batch = {"input_ids": torch.tensor([[5, 6, MASK, 8]])}
    out = predictor(1, model, temperature=0, logits_hook=LogitsShiftBy1()).predict(batch)
    with torch.no_grad():
        logits = model(batch["input_ids"])[0, 1]
    logits[MASK] = -math.inf
    assert int(out["ids"][0, 2]) == int(logits.argmax())


def test_decode_takes_rows_whole(byte_bpe):
    text = "漢字 and 🙂"
    ids = torch.tensor([byte_bpe(text)["input_ids"]])
    assert MLMPredictor(1, tokenizer=byte_bpe).decode({"x": ids})[0] == [text]
    assert MLMPredictor(1, tokenizer=byte_bpe).decode({"x": ids[:0]})[0] == []


def test_a_character_that_prompt_and_answer_share_comes_out_whole(byte_bpe):
    """Where the tokenizer splits inside a character, the prompt may end with half of it."""
    tokenizer = copy.deepcopy(byte_bpe)
    tokenizer.add_special_tokens({"mask_token": "<mask>", "pad_token": "<pad>"})
    ids = torch.tensor([tokenizer("a 🙂!")["input_ids"]])
    width = next(n for n in range(1, ids.shape[1]) if "�" in tokenizer.decode(ids[0, :n]))

    def model(x, attention_mask, positions):
        return one_hot(ids.expand(len(x), -1), len(tokenizer)).float()

    fill = MLMPredictor(9, ids.shape[1] - width, tokenizer, model, temperature=0)
    assert fill.predict({"input_ids": ids[:, :width]})["text"] == ["a 🙂!"]


def test_every_part_of_a_model_is_left_in_the_mode_it_was_in():
    model = small_model(dropout=0.5).train()
    model.encoder[0].eval()
    modes = [part.training for part in model.modules()]
    assert set(modes) == {True, False}
    fill = predictor(2, model, max_new_tokens=8)
    assert torch.equal(fill.predict(prompts([4]))["ids"], fill.predict(prompts([4]))["ids"])
    assert [part.training for part in model.modules()] == modes
    outside = backbone("bert")
    predictor(2, outside, max_new_tokens=2).predict(prompts([4]))
    assert not any(part.training for part in outside.modules())


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 0}, {"max_new_tokens": -1}, {"top_k": 0}, {"top_p": 0}, {"top_p": 0.0}, {"top_p": 1.5},
        {"top_k": 3, "top_p": 0.5}, {"temperature": -1}, {"temperature": float("nan")}, {"confidence": "best"},
        {"threshold": 0.5}, {"confidence": "entropy", "factor": 1.0}, {"cache": "dual"},
        {"cache": "all", "block_size": 2}, {"block_size": 0}, {"remasking": 2.0},
        {"ddpm_cache": True, "remasking": 0.1}, {"top_p_rule": "none"},
        {"ddpm_cache": True, "confidence": "top_prob"},
        {"cache": "dual", "block_size": 2, "logits_hook": LogitsShiftBy1()},
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused_when_given(options):
    with pytest.raises(ValueError, match="Fix: "):
        MLMPredictor(**{"max_steps": 2, **options})


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="expected at most 64"):
        predictor(4, max_new_tokens=60).predict(prompts([6]))
    with pytest.raises(ValueError, match="no model"):
        MLMPredictor(1, tokenizer=TOKENIZER).predict(prompts([2]))
    with pytest.raises(ValueError, match="no tokenizer"):
        MLMPredictor(1, model=small_model()).decode({"x": torch.zeros(1, 1, dtype=torch.long)})
    with pytest.raises(ValueError, match="another vocabulary"):
        MLMPredictor(1, model=small_model(), tokenizer=IdTokenizer(40)).predict(prompts([2]))
    with pytest.raises(ValueError, match="one key for each row"):
        predictor().predict(prompts([2]) | {"idx": torch.arange(3)})
    with pytest.raises(ValueError, match="under attention_mask"):
        predictor().predict(prompts([2]) | {"attention_mask": torch.ones(1, 3)})
    with pytest.raises(ValueError, match="under input_ids"):
        predictor().predict({"input_ids": torch.tensor([5, MASK])})
    with pytest.raises(ValueError, match="cache=None"):
        predictor(1, Counting(), cache="dual", block_size=2).predict(prompts([2], masks=1))
