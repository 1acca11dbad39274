"""Histories on disk: what is written, when, and read back."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from spanwise.mlm import HistoryPluginBase, HistoryTopKPlugin, MLMPredictor
from tests.mlm.helpers import MASK, IdTokenizer, small_model


def predict(history, rows=2, **options):
    fill = MLMPredictor(3, tokenizer=IdTokenizer(), model=small_model(), history=history, **options)
    return fill.predict({"input_ids": torch.full((rows, 4), 7)})


def test_every_step_is_written_and_read_back(tmp_path):
    history = HistoryTopKPlugin(tmp_path, k=5)
    out = predict(history, max_new_tokens=6, confidence="top_prob")
    names = [entry["fid"] for entry in history.to_dict()]
    assert [name.rsplit("_", 1)[1] for name in names] == ["0", "1"]
    assert all(len(name.rsplit("_", 1)[0]) == 32 for name in names)
    for row, name in enumerate(names):
        reader = HistoryTopKPlugin.from_serialized(tmp_path, name)
        assert reader.get_num_steps() == out["steps_taken"][row] == 3
        first = reader.get(0)
        assert first["p"] is None
        assert first["pids"] is None
        assert (first["x"] == MASK).all()
        last = reader.get(3)
        assert torch.equal(last["x"], out["ids"][row, 4:])
        one = reader.get(1)
        assert one["p"].shape == one["pids"].shape == (6, 5)
        assert (one["p"].diff(dim=1) <= 0).all()
        filled = one["x"] != MASK
        assert (one["pids"] != MASK).all()
        assert filled.sum() == 2


@pytest.mark.parametrize(
    "order", [{}, {"confidence": "top_prob"}, {"ddpm_cache": True}, {"remasking": 0.5}, {"block_size": 2}]
)
def test_steps_are_the_forwards_and_leave_no_gap(tmp_path, order):
    """A row that is done stays as it is while the others go on."""
    history = HistoryTopKPlugin(tmp_path, k=1)
    fill = MLMPredictor(6, tokenizer=IdTokenizer(), model=small_model(), history=history, **order)
    out = fill.predict({"input_ids": torch.tensor([[5, MASK, 6, 7, 8, 9], [MASK] * 6])})
    readers = [HistoryTopKPlugin.from_serialized(tmp_path, entry["fid"]) for entry in history.to_dict()]
    assert [reader.get_num_steps() for reader in readers] == [out["forwards"]] * 2
    assert out["forwards"] >= max(out["steps_taken"])
    for row, reader in enumerate(readers):
        steps = [reader.get(step)["x"] for step in range(out["forwards"] + 1)]
        assert all(step is not None for step in steps)
        assert torch.equal(steps[-1], out["ids"][row])
        assert sum(not torch.equal(a, b) for a, b in pairwise(steps)) >= 1
    if "remasking" not in order:
        assert out["forwards"] == max(out["steps_taken"])
        done = readers[0].get(out["steps_taken"][0])["x"]
        assert torch.equal(done, out["ids"][0])


def test_steps_that_fill_nothing_are_no_steps_of_a_history():
    told = []

    class Note(HistoryPluginBase):
        def update_history(self, step_results):
            told.append(step_results["current_step"])

    fill = MLMPredictor(6, tokenizer=IdTokenizer(), model=small_model(), history=Note(), remasking=0.3)
    forwards = set()
    for seed in range(5):
        out = fill.predict({"input_ids": torch.tensor([[5] + [MASK] * 4])}, seed=seed)
        assert told == list(range(out["forwards"] + 1))
        assert out["steps_taken"] == [out["forwards"]]
        forwards.add(out["forwards"])
        told.clear()
    assert min(forwards) < 4


def test_without_k_and_new_tokens_whole_rows_are_kept(tmp_path):
    history = HistoryTopKPlugin(tmp_path)
    fill = MLMPredictor(1, tokenizer=IdTokenizer(), model=small_model(), history=history)
    fill.predict({"input_ids": torch.tensor([[5, MASK, 6]])})
    step = HistoryTopKPlugin.from_serialized(tmp_path, history.to_dict()[0]["fid"]).get(1)
    assert step["x"].shape == (3,)
    assert step["p"].shape == (3, 30)
    assert step["p"][1].sum() == pytest.approx(1)


def test_distributions_are_kept_of_watched_columns_alone():
    """A prompt of a thousand tokens beside eight new ones must not cost a thousand distributions."""
    seen = []

    class Note(HistoryPluginBase):
        def update_history(self, step_results):
            if step_results["p"] is not None:
                seen.append(step_results["p"].untyped_storage().nbytes())

    fill = MLMPredictor(2, 3, IdTokenizer(), small_model(), history=Note(), confidence="top_prob")
    out = fill.predict({"input_ids": torch.tensor([[5, MASK, 6, 7, 8, 9]])})
    assert not (out["ids"] == MASK).any()
    assert set(seen) == {3 * 30 * 4}


def test_a_new_prediction_and_reset_begin_anew(tmp_path):
    history = HistoryTopKPlugin(tmp_path, k=1)
    predict(history, max_new_tokens=2)
    first = history.to_dict()
    predict(history, rows=3, max_new_tokens=2)
    assert len(history.to_dict()) == 3
    assert history.to_dict()[0] != first[0]
    history.reset()
    with pytest.raises(ValueError, match="holds none"):
        history.to_dict()


def test_rows_may_not_change_within_a_history(tmp_path):
    history = HistoryTopKPlugin(tmp_path, k=1, max_new_tokens=2)
    history.update_history({"x": torch.zeros(2, 2), "p": None, "current_step": 0})
    with pytest.raises(ValueError, match="call reset"):
        history.update_history({"x": torch.zeros(3, 2), "p": None, "current_step": 1})


def test_missing_histories_are_named(tmp_path):
    with pytest.raises(ValueError, match="there is no history 'x_0'"):
        HistoryTopKPlugin.from_serialized(tmp_path, "x_0")
    with pytest.raises(ValueError, match="from_serialized"):
        HistoryTopKPlugin(tmp_path).get(0)


def test_a_plugin_of_ones_own_needs_one_method():
    steps = []

    class Note(HistoryPluginBase):
        def update_history(self, step_results):
            steps.append((step_results["current_step"], step_results["x"].shape, step_results["p"] is None))

    predict(Note(), max_new_tokens=3)
    assert steps == [(0, (2, 3), True), (1, (2, 3), False), (2, (2, 3), False), (3, (2, 3), False)]
