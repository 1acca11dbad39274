from __future__ import annotations

import pytest
import yaml

from spanwise.train.recipe import RecipeError, load_recipe, parse_recipe, read_yaml, write_recipe

GOOD = {
    "task": "distill",
    "output": "out",
    "student": {"model": "some/model"},
    "teachers": [{"model": "other/model", "loss": "prefix_kl"}],
    "data": {"train": "corpus.jsonl"},
}


def test_a_recipe_round_trips_through_its_file(tmp_path):
    recipe = parse_recipe(GOOD)
    write_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_a_recipe_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        parse_recipe(GOOD).seed = 3


def test_every_mistake_is_said_at_once_with_the_nearest_key():
    wrong = GOOD | {
        "student": {"modle": "x"},
        "loss": {"kd_weigth": 1},
        "train": {"lerning_rate": 1e-3, "output_dir": "x"},
        "teachers": [{"model": "a", "url": "b"}, {"model": "a", "los": "kl"}],
    }
    with pytest.raises(RecipeError) as error:
        parse_recipe(wrong)
    message = str(error.value)
    for part in (
        "student.model: missing",
        "student.modle: unknown key; did you mean 'model'?",
        "loss.kd_weigth: unknown key; did you mean 'kd_weight'?",
        "did you mean 'learning_rate'?",
        "'output_dir' is set by output",
        "teachers.0: has model and url of model, cache, url, process; expected exactly one",
        "teachers.1.los: unknown key; did you mean 'loss'?",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.max_steps=7", 7),
        ("train.learning_rate=1e-3", 1e-3),
        ("train.bf16=true", True),
        ("train.optim=sgd", "sgd"),
    ],
)
def test_overrides_are_typed_as_yaml_is(override, expected):
    value = parse_recipe(GOOD, [override]).train[override.split("=")[0].split(".")[1]]
    assert value == expected
    assert type(value) is type(expected)


def test_an_override_reaches_into_a_list_and_clears_a_value():
    recipe = parse_recipe(GOOD, ["teachers.0.weight=0.5", "data.eval="])
    assert recipe.teachers[0].weight == 0.5
    assert recipe.data.eval is None


@pytest.mark.parametrize(
    ("override", "words"),
    [("train.max_steps", "has no '='"), ("teachers.3.weight=1", "1 entries"), ("output.x=1", "one step too long")],
)
def test_a_bad_override_says_what_is_wrong(override, words):
    with pytest.raises(RecipeError, match=words):
        parse_recipe(GOOD, [override])


def test_scientific_notation_is_a_number():
    assert read_yaml("a: 1e-3\nb: -2E+4\nc: 1.5e3\nd: e5\n", name="x") == {"a": 1e-3, "b": -2e4, "c": 1500.0, "d": "e5"}


def test_no_is_a_word_and_false_is_not():
    content = read_yaml("a: no\nb: off\nc: yes\nd: false\ne: true\n", name="x")
    assert content == {"a": "no", "b": "off", "c": "yes", "d": False, "e": True}


def test_an_option_of_another_loss_is_refused():
    teacher = {"model": "a", "loss": {"name": "gold", "keep": 4, "reverse": True}}
    with pytest.raises(RecipeError, match="the loss 'gold' has no keep"):
        parse_recipe(GOOD | {"teachers": [teacher]})


def test_a_key_that_stands_twice_is_refused():
    with pytest.raises(RecipeError, match="seed stands more than once"):
        read_yaml("seed: 1\noutput: x\nseed: 2\n", name="x")


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "a: [1\n", "a: !!python/object:os.system x\n"])
def test_what_is_no_recipe_is_refused(text):
    with pytest.raises(RecipeError):
        read_yaml(text, name="broken.yaml")


def test_an_unknown_task_names_the_nearest(tmp_path):
    with pytest.raises(RecipeError, match="did you mean 'distill'"):
        parse_recipe(GOOD | {"task": "distil"})
    with pytest.raises(FileNotFoundError, match="spanwise recipes list"):
        load_recipe(tmp_path / "nowhere.yaml")


def test_the_input_is_not_changed():
    before = yaml.safe_dump(GOOD)
    parse_recipe(GOOD, ["train.max_steps=7", "teachers.0.weight=2"])
    assert yaml.safe_dump(GOOD) == before


def test_nothing_to_train_on_is_refused():
    with pytest.raises(RecipeError, match="both 0"):
        parse_recipe(GOOD | {"loss": {"kd_weight": 0, "ce_weight": 0}})
    with pytest.raises(RecipeError, match="no teachers"):
        parse_recipe(GOOD | {"teachers": [], "loss": {"ce_weight": 0}})
