"""Recipes, training, evaluation and generation, from the command line and from Python."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from spanwise import cli
from spanwise.mlm import MLMPredictor, RotaryTransformerMLMModel, load_masked_lm
from spanwise.mlm.generate import SAMPLERS, generate
from spanwise.mlm.sudoku import all_grids, make_puzzles, split_grids, sudoku_tokenizer
from spanwise.train.mlm import TaskRecipe, TokenCollator, build
from spanwise.train.recipe import RecipeError, load_recipe, parse_recipe
from spanwise.train.run import train
from spanwise.train.student import train_byte_bpe
from tests.tiny_tokenizers import corpus

TINY = {"model_type": "spanwise_mlm", "d_model": 16, "num_layers": 1, "nhead": 2, "rotary_emb_dim": 8, "dropout": 0.0}


def text_recipe(folder, **changes):
    text = folder / "text.jsonl"
    if not text.exists():
        text.write_text("".join(json.dumps({"text": page[:600]}) + "\n" for page in corpus()[:6]))
    recipe = {
        "task": "mlm",
        "output": str(folder / "run"),
        "student": {"model": TINY | {"max_length": 64}, "tokenizer": {"vocab_size": 300}},
        "data": {"train": str(text), "eval": str(text), "window_bytes": 60, "context_length": 48},
        "eval": {"documents": 2},
        "generation": {"draws": 1},
        "train": {"max_steps": 3, "per_device_train_batch_size": 4, "save_steps": 3, "use_cpu": True},
    }
    return parse_recipe(recipe | changes)


def run_cli(capsys, *words):
    with pytest.raises(SystemExit) as leave:
        cli.main([*words, "--json"])
    return leave.value.code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def sudoku_run(tmp_path_factory):
    """Six steps of the sudoku recipe with a small model."""
    folder = tmp_path_factory.mktemp("sudoku")
    head = ("student.model.nhead=2", "student.model.rotary_emb_dim=8")
    changes = ("student.model.d_model=16", "train.use_cpu=true", *head)
    sizes = ("train.max_steps=6", "train.per_device_train_batch_size=32", "train.save_steps=6", "train.eval_steps=6")
    recipe = load_recipe("recipes/mlm-sudoku.yaml", [f"output={folder / 'run'}", "eval.documents=8", *changes, *sizes])
    return folder / "run", train(recipe)


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return folder / "run", train(text_recipe(folder))


def test_the_sudoku_recipe_runs(sudoku_run):
    folder, result = sudoku_run
    assert len(result["loss_per_step"]) == 6
    assert result["loss_per_step"][-1] < result["loss_per_step"][0]
    assert {"nelbo_nats_per_token", "exact_match", "token_accuracy"} <= set(result)
    model = RotaryTransformerMLMModel.from_pretrained(folder)
    assert model.mask_idx == sudoku_tokenizer().mask_token_id


def test_the_text_recipe_runs_and_measures_in_bytes(text_run):
    folder, result = text_run
    assert result["loss_per_step"][0] == pytest.approx(5.7, abs=2.5)
    assert result["bits_per_byte"] > 0
    assert (folder / "model.safetensors").is_file()


def test_the_recipe_for_prose_runs(tmp_path):
    """As it is shipped, on its own corpus, but for the size and three steps instead of 600."""
    model = ("d_model=32", "num_layers=1", "nhead=2", "rotary_emb_dim=16")
    sizes = [f"student.model.{size}" for size in model] + ["student.tokenizer.vocab_size=400"]
    steps = ["train.max_steps=3", "train.save_steps=3", "train.eval_steps=3", "train.use_cpu=true"]
    few = ["train.per_device_train_batch_size=8", "eval.documents=1", "generation.draws=1"]
    recipe = load_recipe("recipes/mdlm-text.yaml", [f"output={tmp_path / 'run'}", *sizes, *steps, *few])
    result = train(recipe)
    assert len(result["loss_per_step"]) == 3
    # A bound in nats per token, of a model that knows nothing yet.
    assert result["nelbo_nats_per_token"] == pytest.approx(math.log(400), rel=0.3)
    assert result["bits_per_byte"] > 0
    assert load_masked_lm(tmp_path / "run").num_embeddings == 400 + len(("MASK", "PAD"))


def test_both_recipes_are_valid():
    for name in ("mlm-sudoku", "mdlm-text"):
        recipe = load_recipe(f"recipes/{name}.yaml")
        assert isinstance(recipe, TaskRecipe)
        assert yaml.safe_load(Path(f"recipes/{name}.yaml").read_text())["loss"]["loss_on_padding"] is False


def test_a_run_is_the_same_whatever_the_micro_batch(tmp_path):
    losses = []
    for size, accumulation in ((4, 1), (2, 2)):
        folder = tmp_path / str(size)
        folder.mkdir()
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        common = {"max_steps": 3, "save_strategy": "no", "use_cpu": True, "eval_strategy": "no"}
        recipe = text_recipe(folder, train=common | sizes)
        losses.append(train(recipe)["loss_per_step"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_rows_that_complete_a_batch_count_nothing(tmp_path):
    task = build(text_recipe(tmp_path), tmp_path)
    rows = [{**task.train_rows[place], "epoch": 0, "position": place} for place in range(3)]
    blank = {**task.train_rows[0], "epoch": 0, "position": -1, "loss_multiplier": 0.0}
    plain, completed = task.collator(rows), task.collator([*rows, blank])
    assert task.counts(plain) == task.counts(completed)
    first, second = (task.losses(task.model, batch, {"masked": 1.0})["masked"].total for batch in (plain, completed))
    torch.testing.assert_close(first, second)


def test_what_is_cut_is_counted(tmp_path):
    task = build(text_recipe(tmp_path), tmp_path)
    collator = TokenCollator(task.collator.inner, 10)
    batch = collator([{"input_ids": list(range(5, 25)), "epoch": 0, "position": 0}])
    assert batch["input_ids"].shape == (1, 10)
    assert batch["left_out"] == {"tokens beyond context_length": 12}


def test_mask_and_pad_are_added_and_a_causal_model_gets_room_for_them(tmp_path):
    own = train_byte_bpe(corpus()[:2], 300)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(own), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    own.save_pretrained(tmp_path / "llama")
    recipe = text_recipe(tmp_path, student={"model": str(tmp_path / "llama")})
    result = train(recipe)
    tokenizer = build(recipe, tmp_path / "run").processing_class
    assert tokenizer.mask_token == "<|mask|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert load_masked_lm(tmp_path / "run").num_embeddings == len(tokenizer) > len(own)
    assert result["nelbo_nats_per_token"] > 0
    other = {"model": str(tmp_path / "llama"), "tokenizer": {"vocab_size": len(own) + 40}}
    with pytest.raises(ValueError, match="another model's"):
        build(text_recipe(tmp_path, student=other), tmp_path)


@pytest.mark.parametrize(("length", "words"), [(2, "expected 3 to 64"), (65, "set data.context_length to 64 or less")])
def test_a_context_that_does_not_fit_is_refused_before_training(tmp_path, length, words):
    data = {"train": str(tmp_path / "text.jsonl"), "window_bytes": 60, "context_length": length}
    with pytest.raises(ValueError, match=words):
        build(text_recipe(tmp_path, data=data), tmp_path)


def test_rows_that_cannot_be_read_are_named(tmp_path):
    collator = build(text_recipe(tmp_path), tmp_path).collator
    place = {"epoch": 0, "position": 0}
    for row, words in (
        ({"text": "half a pair: \ud83d"}, "lone surrogate"),
        ({"text": 7}, "of type int"),
        ({"input_ids": "not tokenized"}, "flat list of token ids"),
        ({"messages": []}, "no text"),
    ):
        with pytest.raises(ValueError, match=words):
            collator([row | place])


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"loss": {"weighting": "nelbo", "norm": "masked"}}, "weighting mlm"),
        ({"loss": {"loss_on_padding": True}}, "loss_on_padding"),
        ({"loss": {"maskin": "exact"}}, "did you mean 'masking'"),
        ({"data": {"train": "x.jsonl", "packing": True}}, "no padding"),
        ({"data": {"train": "x.jsonl", "stream": True}}, "expected iid"),
    ],
)
def test_recipes_that_cannot_work_are_refused(tmp_path, section, words):
    with pytest.raises(RecipeError, match=words):
        text_recipe(tmp_path, **section)


def test_adapters_are_refused(tmp_path):
    recipe = text_recipe(tmp_path, student={"model": TINY, "tokenizer": {"vocab_size": 300}, "peft": {"r": 2}})
    with pytest.raises(ValueError, match=r"student\.peft"):
        build(recipe, tmp_path)


def test_generate_fills_gaps_from_the_command_line(capsys, sudoku_run):
    folder, _ = sudoku_run
    code, out = run_cli(capsys, "generate", str(folder), "--infill", "1 <mask> 3 4", "--infill", "<mask> 2")
    assert code == 0
    assert [len(text.split()) for text in out["texts"]] == [4, 2]
    assert out["texts"][0].split()[2:] == ["3", "4"]
    assert out["steps"] == [1, 1]
    assert out["forwards"] == 1


def test_generate_continues_and_begins(capsys, text_run):
    folder, _ = text_run
    prompts = ("--prompt", "The", "--prompt", "A longer prompt")
    code, out = run_cli(capsys, "generate", str(folder), *prompts, "--unconditional", "--max-new-tokens", "6")
    assert code == 0
    assert len(out["texts"]) == 3
    assert out["texts"][1].startswith("A longer prompt")
    assert out["steps"] == [6, 6, 6]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_has_a_name(text_run, sampler):
    folder, _ = text_run
    out = generate(folder, prompts=["One"], sampler=sampler, max_new_tokens=5, steps=3)
    assert all(1 <= steps <= 3 for steps in out["steps"])
    with pytest.raises(ValueError, match="max_steps=0"):
        generate(folder, prompts=["One"], sampler=sampler, steps=0)
    again = generate(folder, prompts=["One"], sampler=sampler, max_new_tokens=5, steps=3)
    assert again == out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--infill", "1 2"], "has no gap"),
        ([], "nothing was asked for"),
        (["--infill", "<mask>", "--sampler", "best"], "expected one of top_prob"),
        (["--infill", "<mask>", "--cache", "dual"], "block_size=8"),
        (["--prompt", "1", "--max-new-tokens", "40"], "expected at most 16"),
    ],
)
def test_generate_names_what_is_wrong(capsys, sudoku_run, words, message):
    code, out = run_cli(capsys, "generate", str(sudoku_run[0]), *words)
    assert code == 2
    assert message in out["error"]


def test_generate_needs_a_checkpoint_of_this_vocabulary(capsys, tmp_path, sudoku_run):
    code, out = run_cli(capsys, "generate", str(tmp_path), "--unconditional")
    assert code == 2
    assert "no tokenizer could be loaded" in out["error"]
    small = RotaryTransformerMLMModel(4, 8, 1, 1, rotary_emb_dim=8)
    small.save_pretrained(tmp_path)
    sudoku_tokenizer().save_pretrained(tmp_path)
    code, out = run_cli(capsys, "generate", str(tmp_path), "--infill", "<mask>")
    assert code == 2
    assert "another vocabulary" in out["error"]


def test_eval_knows_masked_checkpoints(capsys, sudoku_run, text_run):
    code, out = run_cli(capsys, "eval", str(sudoku_run[0]), "--data", "builtin:sudoku:eval", "--documents", "8")
    assert code == 0
    assert out == {name: pytest.approx(sudoku_run[1][name]) for name in out}
    held_out = text_run[0].parent / "text.jsonl"
    code, out = run_cli(capsys, "eval", str(text_run[0]), "--data", str(held_out), "--documents", "2")
    assert code == 0
    assert set(out) == {"nelbo_nats_per_token", "bits_per_byte", "exact_match", "token_accuracy"}
    nats = out["nelbo_nats_per_token"]
    assert 3 < nats < 9
    empty = held_out.with_name("empty.jsonl")
    empty.write_text('{"text": ""}\n')
    code, out = run_cli(capsys, "eval", str(text_run[0]), "--data", str(empty))
    assert code == 2
    assert "no token" in out["error"]


def test_sudoku_grids_and_puzzles():
    assert len(all_grids()) == len(set(all_grids())) == 288
    training, held_out = split_grids()
    assert not set(training) & set(held_out)
    for puzzle in make_puzzles(held_out, 5):
        assert puzzle.blanks.count(0) == 10
        assert all(blank in (0, digit) for blank, digit in zip(puzzle.blanks, puzzle.solution, strict=True))
    with pytest.raises(ValueError, match="0 to 12"):
        make_puzzles(held_out, 1, blanks=14)


@pytest.mark.full
def test_the_sudoku_recipe_solves_held_out_puzzles(tmp_path):
    result = train(load_recipe("recipes/mlm-sudoku.yaml", [f"output={tmp_path / 'run'}"]))
    assert result["exact_match"] >= 0.75
    predictor = MLMPredictor(16, tokenizer=sudoku_tokenizer(), model=load_masked_lm(tmp_path / "run"), temperature=0)
    assert not (predictor.predict({"input_ids": torch.ones(1, 16, dtype=torch.long)})["ids"] == 1).any()


def test_generate_writes_a_page_of_its_steps(capsys, tmp_path, sudoku_run):
    page = tmp_path / "page.html"
    code, out = run_cli(
        capsys,
        "generate",
        str(sudoku_run[0]),
        "--infill",
        "1 <mask> 3 <mask>",
        "--infill",
        "<mask> 2",
        "--page",
        str(page),
    )
    assert code == 0
    html = page.read_text()
    assert html.count('class="filled"') == 3
    assert html.count('class="hidden"') == 2 + 1 + 1
    assert "http" not in html
    assert [len(text.split()) for text in out["texts"]] == [4, 2]
