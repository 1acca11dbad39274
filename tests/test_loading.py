"""Tokenizers and models from what people have."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import Trainer, TrainingArguments

from spanwise.loading import BUILTIN_SMOLLM2, cache_dir, file_digest, load_model, load_tokenizer, smollm2_gguf
from tests import tiny_tokenizers
from tests.train import runs

TEXT = "Tokens as spans: naïve café 中文 👩‍🚀 <|im_end|> 1234"


def test_a_tokenizer_from_every_form_is_the_same(tmp_path):
    saved = tiny_tokenizers.byte_level_bpe()
    saved.save_pretrained(tmp_path)
    ids = saved(TEXT)["input_ids"]
    for source in (tmp_path, str(tmp_path), tmp_path / "tokenizer.json"):
        assert load_tokenizer(source)(TEXT)["input_ids"] == ids
    bare = tmp_path / "bare.json"
    bare.write_text((tmp_path / "tokenizer.json").read_text())
    assert load_tokenizer(bare)(TEXT)["input_ids"] == ids


def test_a_gguf_file_gives_a_model_that_can_be_saved_and_trained(tmp_path):
    model, tokenizer = load_model(BUILTIN_SMOLLM2), load_tokenizer(BUILTIN_SMOLLM2)
    assert not getattr(model, "is_quantized", False)
    assert getattr(model.config, "quantization_config", None) is None
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    Trainer(model, TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True))
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=2, do_sample=False)
    assert "Paris" in tokenizer.decode(written[0])


def test_the_conversion_is_kept_and_keyed_by_content():
    load_tokenizer(smollm2_gguf())
    kept = cache_dir() / "gguf" / file_digest(smollm2_gguf())[:24]
    assert (kept / "tokenizer" / "tokenizer.json").is_file()
    assert not [entry for entry in kept.iterdir() if entry.name.startswith("tmp")], "a conversion was left half done"


def test_a_model_keeps_its_type_unless_asked(tmp_path):
    folder = runs.save_teacher(tmp_path)
    assert load_model(folder).dtype == torch.float32
    assert load_model(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["nowhere", "missing/model", "./not-here"])
def test_what_is_not_there_is_named_with_the_fix(name):
    for load in (load_tokenizer, load_model):
        with pytest.raises(ValueError, match="could be loaded from") as error:
            load(name)
        assert "Fix:" in str(error.value)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": "nonsense"}))
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        load_tokenizer(path)


@pytest.mark.parametrize("size", [7, 5_000, 400_000])
def test_a_gguf_file_that_was_cut_off_is_named(size, tmp_path, monkeypatch):
    monkeypatch.setenv("SPANWISE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "cut.gguf"
    with smollm2_gguf().open("rb") as whole:
        path.write_bytes(whole.read(size))
    with pytest.raises(
        ValueError, match=r"could not be read as GGUF.*expected a whole GGUF file.*probably.*Fix: fetch"
    ):
        load_tokenizer(path)
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_a_missing_gguf_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        load_model(tmp_path / "model.gguf")


def test_the_cache_follows_the_users_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("SPANWISE_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("SPANWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "spanwise"
