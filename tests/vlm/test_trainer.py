"""Training: a plain transformers.Trainer with our collator, what a second shift does, and the recipe's task."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from spanwise.batch import for_trainer, model_inputs
from spanwise.train.digits import DIGITS, HELD_OUT, digit_rows
from spanwise.train.recipe import RecipeError, load_recipe, parse_recipe
from spanwise.train.vlm import VisionTask, build, with_other_images
from spanwise.vlm import VLMCollator
from spanwise.vlm.inspect import tokens_of_row
from tests.vlm import processors
from tests.vlm.tiny_model import qwen2_5_vl_model

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "white": (250, 250, 250)}
ANSWERS = {"red": "it is red", "green": "grass, so green", "blue": "as the sky", "white": "snow white"}


def rows() -> list[dict[str, Any]]:
    return [
        {
            "conversation": [
                {"role": "user", "content": [
                    {"type": "image", "image": Image.new("RGB", (28, 28), rgb)}, {"type": "text", "text": "colour?"},
                ]},
                {"role": "assistant", "content": [{"type": "text", "text": ANSWERS[name]}]},
            ]
        }
        for name, rgb in COLOURS.items()
    ]  # fmt: skip


def exact_answers(model: Any, batch: Any) -> float:
    with torch.no_grad():
        chosen = model(**model_inputs(batch)).logits.argmax(-1)
    right = (chosen == batch["labels"]) | (batch["labels"] == -100)
    return float(right.all(dim=1).float().mean())


class ShiftedTwice:
    """What a consumer does who does not know that labels leave shifted: shift them once more."""

    def __init__(self, collator: VLMCollator) -> None:
        self.collator = collator

    def __call__(self, batch: list[dict[str, Any]]) -> dict[str, Any]:
        inputs = for_trainer(self.collator)(batch)
        inputs.pop("shift_labels")
        return inputs


@pytest.mark.parametrize("twice", [False, True])
def test_a_plain_trainer_learns_and_a_second_shift_ruins_it(tmp_path: Path, twice: bool) -> None:
    processor = processors.build("qwen2_5_vl")
    model = qwen2_5_vl_model(processor.tokenizer, hidden=32)
    collator = VLMCollator(processor)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=60, per_device_train_batch_size=4, learning_rate=5e-3, report_to="none",
        disable_tqdm=True, remove_unused_columns=False, save_strategy="no", logging_steps=1000, use_cpu=True, seed=0,
        lr_scheduler_type="constant", dataloader_pin_memory=False,
    )  # fmt: skip
    data: Any = rows()
    Trainer(
        model=model, args=arguments, train_dataset=data,
        data_collator=ShiftedTwice(collator) if twice else for_trainer(collator),
    ).train()  # fmt: skip
    assert exact_answers(model.eval(), collator(rows())) == (0.0 if twice else 1.0)


def test_collators_work_in_loader_workers() -> None:
    collator = VLMCollator(processors.build("gemma3"))
    assert pickle.loads(pickle.dumps(collator))(rows())["labels"].equal(collator(rows())["labels"])
    data: Any = rows()
    loader = torch.utils.data.DataLoader(data, batch_size=2, collate_fn=collator, num_workers=1)
    assert sum(len(batch["input_ids"]) for batch in loader) == 4


def test_every_token_has_a_kind() -> None:
    processor = processors.build("qwen2_5_vl")
    batch = VLMCollator(processor)(rows())
    for row in range(4):
        tokens = tokens_of_row(batch, row, processor)
        answer = list(ANSWERS.values())[row]
        assert "".join(text for text, kind in tokens if kind == "label") == answer + "<|im_end|>"
        assert {kind for _, kind in tokens} >= {"label", "media", "given"}
        assert sum(kind == "padding" for _, kind in tokens) == int((batch["attention_mask"][row] == 0).sum())


def test_digits() -> None:
    train, held_out = digit_rows(DIGITS), digit_rows(DIGITS + HELD_OUT)
    assert (len(train), len(held_out)) == (1438, 359)
    others = with_other_images(held_out[:20])
    for row, other in zip(held_out, others, strict=False):
        assert other["conversation"][1] == row["conversation"][1]
        assert other["conversation"][0]["content"][0]["image"] is not row["conversation"][0]["content"][0]["image"]
    with pytest.raises(ValueError, match="no built-in data set"):
        digit_rows("builtin:digit")


@pytest.mark.parametrize("packing", [False, True])
def test_the_task_of_a_recipe(tmp_path: Path, packing: bool) -> None:
    recipe: Any = load_recipe("recipes/vlm-digits.yaml", [f"output={tmp_path}", f"data.packing={str(packing).lower()}"])
    task = build(recipe, tmp_path)
    batch = task.collator([task.train_rows[place] | {"loss_multiplier": float(place < 3)} for place in range(4)])
    counted = task.counts(batch)["ce"]
    assert counted == (batch["labels"] != -100).sum()
    three = task.collator([task.train_rows[place] for place in range(3)])
    assert counted == task.counts(three)["ce"]
    plain = task.losses(task.model, batch, {"ce": 1.0})["ce"]
    half = task.losses(task.model, batch, {"ce": 0.5})["ce"]
    torch.testing.assert_close(half.total, plain.total * 0.5)
    unpacked = task.plain_collator([task.train_rows[place] for place in range(3)])
    alone = task.losses(task.model, unpacked, {"ce": 1.0})["ce"]
    torch.testing.assert_close(plain.total, alone.total, rtol=1e-2, atol=1e-2)  # packs carry pixels in bfloat16
    page = task.report_sections()[0].html
    assert 'title="media"' in page
    assert page.count("data:image/png") == 3


@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_batch_of_long_rows_teaches_nothing_and_is_counted(tmp_path: Path, packing: str) -> None:
    options = [f"output={tmp_path}", f"data.packing={packing}", "data.context_length=32", "vision.drop_overlong=true"]
    task = build(load_recipe("recipes/vlm-digits.yaml", options), tmp_path)
    fits, long = task.train_rows[0], rows()[0]
    long["conversation"][0]["content"][1]["text"] = "so many words " * 20
    batch = task.collator([long])
    assert batch["left_out"] == {"overlong": 1}
    assert task.counts(batch)["ce"] == 0
    parts = task.losses(task.model, batch, {"ce": 1.0})["ce"]
    assert parts.total == 0
    parts.total.backward()
    mixed = task.collator([long, fits])
    assert mixed["left_out"] == {"overlong": 1}
    assert task.counts(mixed)["ce"] == task.counts(task.collator([fits]))["ce"] > 0


def short_run(folder: Path, steps: int, *options: str, resume: bool = False) -> dict[str, Any]:
    from spanwise.train.run import train

    given = [
        f"output={folder}", f"train.max_steps={steps}", "train.save_steps=2", "train.warmup_steps=0",
        "train.lr_scheduler_type=constant", "train.per_device_train_batch_size=4", *options,
    ]  # fmt: skip
    return train(load_recipe("recipes/vlm-digits.yaml", given), resume=resume)


def test_a_resumed_run_has_its_own_weights(tmp_path: Path) -> None:
    """Qwen2.5-VL's files name the weights of its vision tower otherwise than its modules; a run must find them."""
    whole = short_run(tmp_path / "whole", 4, "data.eval=null")["loss_per_step"]
    assert short_run(tmp_path / "half", 2, "data.eval=null")["loss_per_step"] == whole[:2]
    again = short_run(tmp_path / "half", 4, "data.eval=null", resume=True)["loss_per_step"]
    assert again == pytest.approx(whole, rel=1e-6)


def test_the_best_checkpoint_is_what_a_run_ends_with(tmp_path: Path) -> None:
    """Two steps answer nothing, nor do four: the first of equals is the best."""
    (question, answer) = rows()[0]["conversation"]
    question["content"][0]["image"].save(tmp_path / "red.png")
    question["content"][0] = {"type": "image", "image": str(tmp_path / "red.png")}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"conversation": [question, answer]}) + "\n")
    short_run(tmp_path / "run", 4, f"data.eval={tmp_path / 'rows.jsonl'}")
    ended, second, fourth = (
        load_file(tmp_path / "run" / name / "model.safetensors") for name in (".", "checkpoint-2", "checkpoint-4")
    )
    assert all(torch.equal(ended[key], second[key]) for key in second)
    assert not all(torch.equal(ended[key], fourth[key]) for key in fourth)


def packed_recipe(tmp_path: Path, *options: str) -> Any:
    return load_recipe("recipes/vlm-digits.yaml", [f"output={tmp_path}", "data.packing=true", *options])


def test_packs_with_adapters_count_positions_on_three_axes_too(tmp_path: Path) -> None:
    task = build(packed_recipe(tmp_path, "student.peft={r: 2, target_modules: [q_proj]}"), tmp_path)
    batch = task.collator([task.train_rows[place] for place in range(2)])
    assert batch["position_ids"].shape == (3, *batch["input_ids"].shape)


def test_packs_are_refused_where_the_attention_would_not_obey_their_mask(tmp_path: Path) -> None:
    recipe = packed_recipe(tmp_path)
    task = build(recipe, tmp_path)
    task.model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"data.packing is true and the student's attention is 'eager'.*Fix: "):
        VisionTask(recipe, task.model, task.processing_class, task.train_rows, None)


def test_a_recipe_s_mistakes_are_said() -> None:
    base = {"task": "vlm", "output": "x", "data": {"train": DIGITS}}
    with pytest.raises(RecipeError, match=r"expected student.tokenizer={vocab_size: N}"):
        parse_recipe(base | {"student": {"model": {"model_type": "qwen2_5_vl"}}})
    with pytest.raises(RecipeError, match=r"vision.lables: unknown key; did you mean 'labels'"):
        parse_recipe(base | {"student": {"model": "m"}, "vision": {"lables": "proven"}})


@pytest.mark.full
def test_the_recipe_reads_digits(tmp_path: Path) -> None:
    from spanwise.train.run import train

    result = train(load_recipe("recipes/vlm-digits.yaml", [f"output={tmp_path / 'run'}"]))
    assert result["exact"] >= 0.93
    assert result["wrong_image_exact"] <= 0.20


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_batch_trains_on_a_gpu(dtype: torch.dtype) -> None:
    processor = processors.build("qwen2_5_vl")
    model = qwen2_5_vl_model(processor.tokenizer).to("cuda", dtype)
    collator = VLMCollator(processor, packing="neat", max_length=128, get_rope_index=model.model.get_rope_index)
    batch = collator(rows()).to("cuda")
    logits = model(**model_inputs(batch), use_cache=False).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    assert torch.isfinite(loss)
