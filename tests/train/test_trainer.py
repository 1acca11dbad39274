"""The trainer on real runs: the same numbers however a step is cut up, and whatever happened in between."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from spanwise.spans.table import token_table, tokenizer_fingerprint
from spanwise.train import distill
from spanwise.train.evaluation import measure
from spanwise.train.fused_losses import LastHidden, fused_losses
from spanwise.train.recipe import parse_recipe
from spanwise.train.run import train
from spanwise.train.run_folder import checkpoints
from spanwise.train.run_log import read_log
from spanwise.xtoken.losses import Head
from spanwise.xtoken.losses.cross_entropy import CrossEntropyRows
from spanwise.xtoken.losses.plan import plan_tokens
from tests.train import runs


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return runs.save_teacher(tmp_path_factory.mktemp("teacher"))


def losses(content, **options):
    return train(parse_recipe(content), **options)["loss_per_step"]


def test_a_run_ends_with_a_model_a_report_and_a_log(tmp_path, teacher):
    result = train(parse_recipe(runs.recipe(tmp_path, teacher, eval_strategy="steps", eval_steps=2)))
    folder = Path(result["output"])
    assert len(result["loss_per_step"]) == 4
    assert 0 < result["bits_per_byte"] < 10
    log = read_log(folder / "log.jsonl")
    steps = [entry for entry in log if entry["kind"] == "step"]
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4]
    for entry in steps:
        assert {"loss", "ce", "kd", "kd/0", "kd/0_count", "ce_count", "tokens_per_second", "grad_norm"} <= set(entry)
        assert entry["loss"] == pytest.approx(entry["ce"] + entry["kd"], rel=1e-5)
    page = (folder / "report.html").read_text()
    assert "Terms, apart" in page
    assert "http://" not in page
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    card = (folder / "README.md").read_text()
    assert f"teacher {teacher}: prefix_kl" in card
    assert tokenizer_fingerprint(tokenizer) in card
    assert not list(folder.rglob("training_args.bin"))


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_accumulation_gives_the_same_curve(tmp_path, teacher, packing):
    def run(name, size, accumulation, packed):
        content = runs.recipe(tmp_path / name, teacher)
        content["data"]["packing"] = packed
        content["train"] |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        return losses(content)

    plain = run("plain", 4, 1, False)
    torch.testing.assert_close(run("cut", 2, 2, packing), plain, rtol=2e-5, atol=1e-6)
    if packing:
        torch.testing.assert_close(run("packed", 4, 1, True), plain, rtol=2e-5, atol=1e-6)


def test_an_epoch_that_does_not_divide_counts_every_row_once(tmp_path, teacher):
    path = tmp_path / "seven.jsonl"
    path.write_text("".join(json.dumps({"text": f"row number {i} of seven"}) + "\n" for i in range(7)))
    content = runs.recipe(tmp_path, teacher, num_train_epochs=1)
    del content["train"]["max_steps"]
    content["data"] |= {"train": str(path)}
    result = train(parse_recipe(content))
    steps = [entry for entry in read_log(Path(result["output"]) / "log.jsonl") if entry["kind"] == "step"]
    tokenizer = AutoTokenizer.from_pretrained(result["output"])
    expected = sum(len(tokenizer(f"row number {i} of seven")["input_ids"]) - 1 for i in range(7))
    assert len(steps) == 2
    assert sum(entry["ce_count"] for entry in steps) == expected


@pytest.mark.filterwarnings("error:the fused loss is not used")
@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("prefix_kl", None),
        ("projected_kl", None),
        ("gold", None),
        ("prefix_kl", "bf16"),
        ("gold", "bf16"),
        ("prefix_kl", "activation_checkpointing"),
    ],
)
def test_the_fused_head_gives_the_same_curve(tmp_path, teacher, monkeypatch, family, way):
    products = []

    def spied(hidden, *arguments):
        products.append(hidden.product)
        return fused_losses(hidden, *arguments)

    monkeypatch.setattr(distill, "fused_losses", spied)
    curves = []
    for fused in (False, True):
        content = runs.recipe(tmp_path / str(fused), teacher, **({way: True} if way else {}))
        content["teachers"][0]["loss"] = family
        content["loss"] = {"fused": fused}
        curves.append(losses(content))
    torch.testing.assert_close(curves[1], curves[0], rtol=2e-5, atol=1e-6)
    assert products == [torch.bfloat16 if way == "bf16" else None] * 4, "every step of the second run, in its type"


def test_products_in_float16_stay_in_the_weights_own_type():
    """Gradients are made before a scaler lifts them, and float16 would round the small ones to nothing."""
    weight = torch.randn(11, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    states = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    rows = CrossEntropyRows(plan_tokens(torch.tensor([[1, 2, 3, 4]])), 11, 1e-9)
    gradients = []
    for product in (None, torch.float16):
        (gradient,) = torch.autograd.grad(LastHidden(states, product).over(Head(weight), rows), weight)
        gradients.append(gradient)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_dynamic_scaling_uses_the_step_before(tmp_path, teacher):
    content = runs.recipe(tmp_path, teacher)
    content["loss"] = {"dynamic": True}
    result = train(parse_recipe(content))
    steps = [entry for entry in read_log(Path(result["output"]) / "log.jsonl") if entry["kind"] == "step"]
    assert steps[0]["dynamic_ratio"] == 1.0
    for before, now in itertools.pairwise(steps):
        assert now["dynamic_ratio"] == pytest.approx(before["ce"] / before["kd"], rel=1e-5)
        assert now["loss"] == pytest.approx(now["ce"] + now["dynamic_ratio"] * now["kd"], rel=1e-5)


def test_a_streamed_corpus_trains_and_groups_are_possible(tmp_path, teacher):
    streamed = runs.recipe(tmp_path / "streamed", teacher)
    streamed["data"]["stream"] = True
    assert all(math.isfinite(loss) for loss in losses(streamed))
    grouped = runs.recipe(tmp_path / "grouped", teacher, train_sampling_strategy="group_by_length")
    assert all(math.isfinite(loss) for loss in losses(grouped))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_stream_leaves_out_is_counted_once_also_after_a_resume(tmp_path, teacher, workers):
    path = tmp_path / "rows.jsonl"
    texts = ["", *(f"row number {i} of eight" for i in range(4)), " ", "", *(f"and number {i}" for i in range(4)), ""]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    content = runs.recipe(tmp_path, teacher, max_steps=2, save_strategy="steps", save_steps=1)
    content["data"] |= {"train": str(path), "stream": True, "shuffle_buffer": 3}
    content["train"]["dataloader_num_workers"] = workers
    result = train(parse_recipe(content))
    assert result["left_out"] == {"rows without text": 4}
    assert "rows without text" in Path(result["report"]).read_text()
    shutil.rmtree(checkpoints(Path(result["output"]))[-1])
    again = train(parse_recipe(content), resume=True)
    assert again["left_out"] == {"rows without text": 4}
    assert again["loss_per_step"] == result["loss_per_step"]


def test_several_teachers_of_several_families(tmp_path, teacher):
    content = runs.recipe(tmp_path, teacher)
    content["teachers"] = [
        {"model": str(teacher), "loss": "prefix_kl", "weight": 0.5},
        {"model": str(teacher), "loss": {"name": "alm", "reverse": True}},
        {"model": str(teacher), "loss": {"name": "projected_kl", "vocab_topk": 64}},
    ]
    result = train(parse_recipe(content))
    entry = read_log(Path(result["output"]) / "log.jsonl")[0]
    assert entry["kd"] == pytest.approx(0.5 * entry["kd/0"] + entry["kd/1"] + entry["kd/2"], rel=1e-5)


def test_an_adapted_student_learns_from_its_own_base(tmp_path):
    tokenizer = runs.tiny_tokenizers.byte_level_bpe(400)
    base = runs.save_teacher(tmp_path / "base", tokenizer)
    content = runs.recipe(tmp_path)
    content["student"] = {
        "model": str(base),
        "peft": {"r": 4, "target_modules": "all-linear"},
        "embedding_learning_rate": 1e-4,
        "merge": True,
    }
    content["teachers"] = [{"model": "base", "loss": "kl"}]
    result = train(parse_recipe(content))
    first = read_log(Path(result["output"]) / "log.jsonl")[0]
    assert abs(first["kd"]) < 1e-5, "adapters begin as the identity, so base and student agree"
    merged = AutoModelForCausalLM.from_pretrained(result["output"])
    assert not hasattr(merged, "peft_config")


def test_a_quantised_file_becomes_a_student_that_trains_and_saves(tmp_path):
    """GGUF weights can be neither trained nor saved as they are loaded; ours are a dequantised clone."""
    content = runs.recipe(tmp_path, max_steps=1, per_device_train_batch_size=1)
    content["student"] = {"model": "builtin:smollm2", "peft": {"r": 2, "target_modules": ["q_proj"]}}
    content["data"] |= {"eval": None, "window_bytes": 60}
    result = train(parse_recipe(content))
    assert (Path(result["output"]) / "adapter_model.safetensors").is_file()


def test_a_teacher_may_be_placed_by_device_map(tmp_path, teacher):
    content = runs.recipe(tmp_path, teacher, max_steps=1)
    content["teachers"][0]["options"] = {"device_map": "cpu"}
    assert losses(content)


def test_the_real_teacher_teaches(tmp_path):
    """SmolLM2-135M: the loss falls, and the run says what the teacher contributed."""
    content = runs.recipe(tmp_path, "builtin:smollm2", max_steps=3, per_device_train_batch_size=2)
    content["teachers"][0]["dtype"] = "bfloat16"
    content["train"]["learning_rate"] = 1e-2
    result = train(parse_recipe(content))
    steps = [entry for entry in read_log(Path(result["output"]) / "log.jsonl") if entry["kind"] == "step"]
    assert steps[-1]["ce"] < steps[0]["ce"]
    assert all(entry["kd/0"] > 0 and entry["kd/0_count"] > 0 for entry in steps)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"student": {"model": runs.config(100), "tokenizer": {"vocab_size": 400}}}, "head scores 100 tokens"),
        ({"teachers": [{"model": "base", "loss": "kl"}]}, "expected student.peft"),
        ({"teachers": [{"model": "TEACHER", "loss": "kl"}]}, "another tokenizer than the student"),
        ({"student": {"model": "nowhere/at-all"}}, "no tokenizer could be loaded"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(tmp_path, teacher, change, words):
    content = runs.recipe(tmp_path) | change
    for section in content["teachers"]:
        section["model"] = section["model"].replace("TEACHER", str(teacher))
    with pytest.raises(ValueError, match=words):
        train(parse_recipe(content))


def test_the_command_prints_one_object(tmp_path, teacher):
    path = runs.write(runs.recipe(tmp_path, teacher), tmp_path / "recipe.yaml")
    done = runs.run_command("train", str(path), "train.max_steps=2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {"loss_per_step", "bits_per_byte", "output", "report"} <= set(result)
    again = runs.run_command("train", str(path), "--json")
    assert again.returncode == 2
    assert "not empty" in json.loads(again.stdout)["error"]


class DamageAfterStepTwo(TrainerCallback):
    """Makes every later model worse than the one of step 2."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))


def test_the_run_ends_with_the_checkpoint_that_measured_best(tmp_path):
    content = runs.recipe(tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
    result = train(parse_recipe(content), callbacks=[DamageAfterStepTwo()])
    log = read_log(Path(result["output"]) / "log.jsonl")
    at = {entry["step"]: entry["bits_per_byte"] for entry in log if entry["kind"] == "evaluation"}
    assert at[4] > at[2] + 0.1, "the damage shows"
    assert result["bits_per_byte"] == at[2]
    kept, tokenizer = (kind.from_pretrained(result["output"]) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert measure(kept, tokenizer, runs.held_out(1)).bits_per_byte == pytest.approx(at[2], rel=1e-6)


class Tracker(TrainerCallback):
    """What a tracker is told."""

    def __init__(self):
        self.steps, self.evaluations = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.steps.append((state.global_step, dict(logs)))
        elif "eval_bits_per_byte" in logs:
            self.evaluations.append((state.global_step, dict(logs)))


def test_a_tracker_hears_what_the_log_says(tmp_path, teacher):
    content = runs.recipe(tmp_path, teacher, max_steps=5, logging_steps=2, eval_strategy="steps", eval_steps=2)
    tracker = Tracker()
    result = train(parse_recipe(content), callbacks=[tracker])
    log = read_log(Path(result["output"]) / "log.jsonl")
    steps = [entry for entry in log if entry["kind"] == "step"]
    assert [step for step, _ in tracker.steps] == [2, 4]
    for last, heard in tracker.steps:
        both = steps[last - 2 : last]
        assert {"loss", "ce", "kd", "kd/0", "kd/0_count", "kd/0/coverage", "tokens_per_second"} <= set(heard)
        for name in set(both[1]) - {"kind", "step", "learning_rate", "grad_norm"}:
            assert heard[name] == pytest.approx((both[0][name] + both[1][name]) / 2, rel=1e-9), name
        assert heard["learning_rate"] == both[1]["learning_rate"]
        assert heard["grad_norm"] == pytest.approx(both[1]["grad_norm"], rel=1e-6)
    measured = {entry["step"]: entry for entry in log if entry["kind"] == "evaluation"}
    for step, heard in tracker.evaluations:
        for name in ("bits_per_byte", "next_token_accuracy", "bytes", "tokens"):
            assert heard[f"eval_{name}"] == measured[step][name]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["indexed", "streamed"])
def test_the_log_says_how_much_a_teacher_covers_and_how_many_bits_a_byte_costs(tmp_path, stream, accumulation):
    """A teacher that folds case and drops blanks spells other bytes than the student now and then."""
    teacher = runs.save_teacher(tmp_path / "teacher", runs.tiny_tokenizers.wordpiece())
    student = runs.tiny_tokenizers.byte_level_bpe()
    student.save_pretrained(tmp_path / "tokenizer")
    texts = ["Some Words in CAPITALS, some not", "naïve café and ﬁne print", "plain words alone", "Tab\there,  blanks"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    content = runs.recipe(tmp_path, teacher, max_steps=1, per_device_train_batch_size=4 // accumulation)
    content["train"]["gradient_accumulation_steps"] = accumulation
    content["teachers"][0]["loss"] = "alm"
    content["student"]["tokenizer"] = str(tmp_path / "tokenizer")
    content["data"] = {"train": str(path), "stream": stream}
    result = train(parse_recipe(content))
    (entry,) = read_log(Path(result["output"]) / "log.jsonl")

    task = distill.build(parse_recipe(content), tmp_path)
    batch = task.collator([{"text": text} for text in texts])
    inside = trained = size = 0
    for row in range(len(texts)):
        for place in range(1, int(batch["input_lengths"][row])):
            chunk = int(batch["alignment_0_student_chunk_id"][row, place])
            correct = batch["alignment_0_pair_is_correct"][row] & batch["alignment_0_pair_valid"][row]
            inside += chunk >= 0 and bool(correct[chunk])
            trained += 1
            size += len(token_table(student).bytes_of(int(batch["input_ids"][row, place])))
    assert 0 < inside < trained == entry["ce_count"]
    assert entry["kd/0/coverage"] == pytest.approx(inside / trained, rel=1e-6)
    assert entry["train_bits_per_byte"] == pytest.approx(entry["ce"] * trained / math.log(2) / size, rel=1e-6)
    page = Path(result["report"]).read_text()
    assert "Coverage: trained tokens" in page
    assert "Training bits per byte" in page
