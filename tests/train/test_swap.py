from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spanwise.spans.table import token_table
from spanwise.train.evaluation import measure
from spanwise.train.swap import longest_match, plan_swap, swap_to_folder, swap_tokenizer
from tests import tiny_tokenizers
from tests.train import runs


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return runs.save_teacher(tmp_path_factory.mktemp("old"), tiny_tokenizers.byte_level_bpe(420, start=8))


def test_byte_equal_tokens_are_copied_and_the_others_are_the_mean_of_their_pieces(old):
    old_tokenizer, new_tokenizer = AutoTokenizer.from_pretrained(old), tiny_tokenizers.byte_level_bpe(600)
    model = AutoModelForCausalLM.from_pretrained(old)
    before = model.get_input_embeddings().weight.detach().clone()
    head = model.get_output_embeddings().weight.detach().clone()
    plan = swap_tokenizer(model, old_tokenizer, new_tokenizer)
    old_table, new_table = token_table(old_tokenizer), token_table(new_tokenizer)
    seen = {"copied": 0, "mean": 0}
    for token in range(len(new_tokenizer)):
        pieces = plan.pieces[token]
        for rows, now in ((before, model.get_input_embeddings()), (head, model.get_output_embeddings())):
            torch.testing.assert_close(now.weight[token], rows[pieces].mean(0))
        if not bool(new_table.special[token]):
            assert old_table.join(pieces) == new_table.bytes_of(token)
            seen["copied" if len(pieces) == 1 else "mean"] += 1
    assert seen["copied"] > 250
    assert seen["mean"] > 10
    assert model.config.vocab_size == len(new_tokenizer)


def test_roles_are_matched(old):
    old_tokenizer, new_tokenizer = AutoTokenizer.from_pretrained(old), tiny_tokenizers.sentencepiece_bpe()
    plan = plan_swap(old_tokenizer, new_tokenizer)
    assert plan.pieces[new_tokenizer.bos_token_id] == [old_tokenizer.bos_token_id]
    assert plan.pieces[new_tokenizer.eos_token_id] == [old_tokenizer.eos_token_id]


def test_bytes_that_no_token_begins_with_are_passed_over():
    assert longest_match("é".encode(), {b"\xc3": 7, b"\xa9": 8}) == [7, 8]
    assert longest_match(b"??", {}) == []


def test_the_same_tokenizer_changes_nothing(old):
    tokenizer = AutoTokenizer.from_pretrained(old)
    model = AutoModelForCausalLM.from_pretrained(old)
    before = measure(model, tokenizer, ["some text to measure"]).nats
    plan = swap_tokenizer(model, tokenizer, tokenizer)
    assert plan.exact_share > 0.99
    assert measure(model, tokenizer, ["some text to measure"]).nats == pytest.approx(before, rel=1e-6)


def test_the_command_writes_a_loadable_folder_or_nothing(tmp_path, old):
    tiny_tokenizers.byte_level_bpe(600).save_pretrained(tmp_path / "new")
    done = runs.run_command("swap", str(old), str(tmp_path / "new"), "-o", str(tmp_path / "out"), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["path"] == str(tmp_path / "out")
    assert 0.5 < found["exact_share"] < 1
    assert (
        len(AutoTokenizer.from_pretrained(found["path"]))
        == AutoModelForCausalLM.from_pretrained(found["path"]).config.vocab_size
    )
    with pytest.raises(ValueError, match="exists already"):
        swap_to_folder(str(old), str(tmp_path / "new"), tmp_path / "out")
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith("tmp")]


def test_the_real_model_survives_a_swap(smollm2_tokenizer):
    """SmolLM2 on another vocabulary is far better than chance, before any training."""
    from spanwise.loading import BUILTIN_SMOLLM2, load_model
    from spanwise.train.builtin import builtin_documents
    from spanwise.train.student import train_byte_bpe

    new_tokenizer = train_byte_bpe(builtin_documents("builtin:tales"), 8_000)
    model = load_model(BUILTIN_SMOLLM2, dtype=torch.bfloat16)
    text = [builtin_documents("builtin:tales:eval")[0][:1200]]
    before = measure(model, smollm2_tokenizer, text).bits_per_byte
    swap_tokenizer(model, smollm2_tokenizer, new_tokenizer)
    after = measure(model, new_tokenizer, text).bits_per_byte
    assert before < after < 1.5 * before
