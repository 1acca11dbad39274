"""Bits per byte: every byte once, whatever the tokenizer and the windows."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from spanwise.spans.table import token_table
from spanwise.train.evaluation import document_windows, measure
from tests import tiny_tokenizers
from tests.train import runs

texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=300)


def tiny_model(size, positions=4096, seed=0):
    torch.manual_seed(seed)
    fields = runs.config(size, max_position_embeddings=positions)
    del fields["model_type"]
    return LlamaForCausalLM(LlamaConfig(**fields)).eval()


@pytest.fixture(scope="module")
def uniform():
    """A model that holds every one of the tokenizer's tokens equally likely."""
    model = tiny_model(len(tiny_tokenizers.byte_level_bpe()))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    return model


@settings(max_examples=30)
@given(texts, st.integers(16, 80), st.integers(1, 80))
def test_every_token_is_scored_once_and_windows_stay_in_their_bytes(text, window_bytes, stride):
    tokenizer = tiny_tokenizers.byte_level_bpe()
    table = token_table(tokenizer)
    stride = min(stride, window_bytes)
    windows = document_windows(text, tokenizer, table, window_bytes=window_bytes, stride_bytes=stride)
    scored = [token for window in windows for token in window.ids[window.scored_from :]]
    assert scored == tokenizer(text, add_special_tokens=False)["input_ids"]
    longest = max((len(table.bytes_of(token)) for token in scored), default=0)
    for place, window in enumerate(windows):
        assert window.scored_from >= 1, "every scored token has a predictor"
        begins = window.ids[0] == tokenizer.bos_token_id
        assert begins or place > 0, "the start token stands before the document"
        size = len(table.join(window.ids[begins:]))
        assert size <= window_bytes + longest + 3
        assert begins or table.bytes_of(window.ids[0])[0] & 0xC0 != 0x80, "a window begins at a character"


def test_a_uniform_model_needs_log2_of_its_vocabulary_per_token(uniform):
    tokenizer = tiny_tokenizers.byte_level_bpe()
    documents = ["plain words", "naïve 中文 👩‍🚀", "x" * 500]
    found = measure(uniform, tokenizer, documents, window_bytes=64, stride_bytes=32, batch_size=3)
    tokens = sum(len(tokenizer(text)["input_ids"]) for text in documents)
    assert found.tokens == tokens
    assert found.bytes == sum(len(text.encode()) for text in documents)
    assert found.bits_per_byte == pytest.approx(tokens * math.log2(len(tokenizer)) / found.bytes, rel=1e-6)


def test_one_window_equals_the_plain_computation():
    tokenizer = tiny_tokenizers.byte_level_bpe()
    model = tiny_model(len(tokenizer))
    text = "A short document, scored in one window."
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]])
    with torch.no_grad():
        logp = model(input_ids=ids).logits.double().log_softmax(-1)
    nats = -logp[0, :-1].gather(1, ids[0, 1:, None]).sum()
    found = measure(model, tokenizer, [text])
    assert found.nats == pytest.approx(float(nats), rel=1e-5)
    assert found.hits == int((logp[0, :-1].argmax(-1) == ids[0, 1:]).sum())


def test_batching_and_neighbours_change_nothing():
    tokenizer = tiny_tokenizers.byte_level_bpe()
    model = tiny_model(len(tokenizer))
    documents = [tiny_tokenizers.corpus()[i][:700] for i in range(4)]
    one = measure(model, tokenizer, documents, window_bytes=200, stride_bytes=100, batch_size=1)
    many = measure(model, tokenizer, documents, window_bytes=200, stride_bytes=100, batch_size=7)
    apart = [measure(model, tokenizer, [text], window_bytes=200, stride_bytes=100) for text in documents]
    assert many.nats == pytest.approx(one.nats, rel=1e-5)
    assert sum(part.nats for part in apart) == pytest.approx(one.nats, rel=1e-5)


def test_a_wider_head_is_cut_before_the_softmax():
    tokenizer = tiny_tokenizers.byte_level_bpe()
    narrow, wide = tiny_model(len(tokenizer)), tiny_model(len(tokenizer) + 64)
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    with torch.no_grad():
        wide.load_state_dict(
            {
                name: torch.cat([value, torch.full((64, value.shape[1]), 9.0)]) if name in tables else value
                for name, value in narrow.state_dict().items()
            }
        )
    text = ["the padding of a head holds no probability"]
    assert measure(wide, tokenizer, text).nats == pytest.approx(measure(narrow, tokenizer, text).nats, rel=1e-5)


def test_the_model_is_left_as_it_was(uniform):
    uniform.train()
    measure(uniform, tiny_tokenizers.byte_level_bpe(), ["text"])
    assert uniform.training
    uniform.eval()


def test_errors_say_what_to_change(uniform):
    tokenizer = tiny_tokenizers.byte_level_bpe()
    with pytest.raises(ValueError, match="no token"):
        measure(uniform, tokenizer, ["", ""])
    with pytest.raises(ValueError, match="stride from 1 to the window"):
        measure(uniform, tokenizer, ["text"], window_bytes=10, stride_bytes=20)
    with pytest.raises(ValueError, match=r"lower eval\.window_bytes"):
        measure(tiny_model(len(tokenizer), positions=8), tokenizer, ["many more tokens than eight positions " * 3])


def test_the_command_measures_and_agrees_with_a_teacher(tmp_path):
    teacher = runs.save_teacher(tmp_path / "teacher")
    student = runs.save_teacher(tmp_path / "student", tiny_tokenizers.byte_level_bpe(), seed=1)
    data = tmp_path / "held-out.jsonl"
    data.write_text(json.dumps({"text": "Some held-out text. " * 20}) + "\n")
    done = runs.run_command("eval", str(student), "--data", str(data), "--teacher", str(teacher), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"bits_per_byte", "next_token_accuracy", "bytes", "tokens", "teacher_agreement"} <= set(found)
    assert found["bytes"] == 400
    done = runs.run_command("eval", str(tmp_path / "nothing"), "--data", str(data), "--json")
    assert done.returncode == 2
    assert "no tokenizer could be loaded" in json.loads(done.stdout)["error"]


def test_a_model_agrees_with_itself(tmp_path):
    from spanwise.train.agreement import teacher_agreement

    tokenizer = tiny_tokenizers.byte_level_bpe()
    model = tiny_model(len(tokenizer))
    assert teacher_agreement(model, tokenizer, model, tokenizer, ["the same model, the same tokenizer"]) == 1.0
