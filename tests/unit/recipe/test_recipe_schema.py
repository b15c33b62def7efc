# SPDX-License-Identifier: Apache-2.0
"""A recipe that is mistyped is refused with the key, the value and the fix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from helpers.recipes import make_recipe, recipe_values
from podium.errors import RecipeError
from podium.recipe import ModelSection, Recipe, SftRecipe, dump_recipe, load_recipe, parse_recipe

VALID = """
program: sft
model: {path: models/base}
data:
  train: [{path: data/train.jsonl}]
optimizer: {lr: 2e-5}
steps: 10
"""


def _written(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def _refused(values: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(values)
    return str(caught.value)


def _suggests(override: str, key: str) -> bool:
    """Whether the error for an unknown key names this key, and not only in a list of all that are known."""
    unknown = override.partition("=")[0]
    return re.search(rf"\n  {unknown}: [^,]* {key}\b", _refused(recipe_values(override))) is not None


def test_a_valid_file_gives_a_recipe_with_the_documented_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(_written(tmp_path, VALID))

    assert recipe.optimizer.lr == 2e-5
    assert recipe.data.train[0].weight == 1.0
    assert recipe.tokens_per_step == 16_384
    assert recipe.placement.devices == 1
    assert recipe.optimizer.clip_norm == 1.0
    assert recipe.data.heldout == ()


@pytest.mark.parametrize(
    ("file", "name"), [("arithmetic.yaml", "arithmetic"), ("my sums v2.yml", "my-sums-v2"), ("---.yaml", "run")]
)
def test_a_run_is_named_after_its_file(tmp_path: Path, file: str, name: str) -> None:
    assert load_recipe(_written(tmp_path, VALID, file)).run.name == name


def test_a_name_in_the_recipe_wins_over_the_files(tmp_path: Path) -> None:
    assert load_recipe(_written(tmp_path, VALID + "run: {name: mine}")).run.name == "mine"


@pytest.mark.parametrize("written", ["2e-5", "2E-5", "2.0e-5", "0.00002", "+2e-5"])
def test_scientific_notation_without_a_point_is_a_number(tmp_path: Path, written: str) -> None:
    recipe = load_recipe(_written(tmp_path, VALID.replace("2e-5", written)))

    assert recipe.optimizer.lr == 2e-5


@pytest.mark.parametrize(
    ("override", "suggested"),
    [
        ("optimizer.warmup_step=5", "optimizer.warmup_steps"),
        ("setps=5", "steps"),
        ("data.train.0.wieght=2", "data.train.0.weight"),
        ("evaluation.generation.promts=2", "evaluation.generation.prompts"),
    ],
)
def test_a_misspelt_key_is_answered_with_the_nearest_one(override: str, suggested: str) -> None:
    assert _suggests(override, suggested)


@pytest.mark.parametrize(
    ("override", "suggested"),
    [
        ("lr=1e-3", "optimizer.lr"),
        ("warmup_steps=3", "optimizer.warmup_steps"),
        ("optimizer.devices=2", "placement.devices"),
        ("run.max_length=2", "data.max_length"),
    ],
)
def test_a_misplaced_key_is_reported_with_its_right_place(override: str, suggested: str) -> None:
    assert _suggests(override, suggested)


@pytest.mark.parametrize(
    ("override", "suggested"),
    [
        ("learning_rate=1e-3", "optimizer.lr"),
        ("num_train_epochs=3", "epochs"),
        ("gradient_accumulation_steps=4", "micro_batch_tokens"),
        ("optimizer.max_grad_norm=1", "optimizer.clip_norm"),
        ("data.validation=[]", "data.heldout"),
    ],
)
def test_a_name_that_other_trainers_use_is_translated(override: str, suggested: str) -> None:
    assert _suggests(override, suggested)


def test_an_unknown_key_like_nothing_else_lists_what_is_known_there() -> None:
    complaint = _refused(recipe_values("checkpoint.zzz=1"))

    assert re.search(r"checkpoint\.zzz: .*: every, keep, keep_best, background, timeout_s[^\w,]", complaint)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("steps=ten", "steps:", "'ten'"),
        ("steps=true", "steps:", "True"),
        ("steps=1.5", "steps:", "1.5"),
        ("steps='10'", "steps:", "'10'"),
        ("steps=0", "steps:", "0"),
        ("optimizer.lr=-1", "optimizer.lr:", "-1"),
        ("optimizer.lr=.inf", "optimizer.lr:", "inf"),
        ("optimizer.lr=.nan", "optimizer.lr:", "nan"),
        ("optimizer.lr=fast", "optimizer.lr:", "'fast'"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1:", "missing"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1:", "1.0"),
        ("optimizer.schedule=cosin", "optimizer.schedule:", "'cosin'"),
        ("placement.devices=0", "placement.devices:", "0"),
        ("placement.devices=true", "placement.devices:", "True"),
        ("data.train=[]", "data.train:", "[]"),
        ("data.train=[1]", "data.train.0:", "1"),
        ("data.train.0.weight=0", "data.train.0.weight:", "0"),
        ("data.train.0.columns=[a]", "data.train.0.columns:", "['a']"),
        ("data.trained=user", "data.trained:", "'user'"),
        ("model=7", "model:", "7"),
        ("model.path=''", "model.path:", "''"),
        ("model.path=7", "model.path:", "7"),
        ("run.name='../up'", "run.name:", "'../up'"),
        ("run.seed=-1", "run.seed:", "-1"),
        ("run.loggers=[wandbb]", "run.loggers.0", "wandbb"),
        ("evaluation.generation.score=nearly", "evaluation.generation.score", "nearly"),
        ("program=grpoo", "program:", "'grpoo'"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(override: str, key: str, value: str) -> None:
    complaint = _refused(recipe_values(override))

    assert f"\n  {key}" in complaint
    assert value in complaint


def test_true_is_not_a_learning_rate() -> None:
    _refused(recipe_values("optimizer.lr=true"))


@pytest.mark.parametrize("key", ["program", "model", "data", "optimizer", "steps"])
def test_a_missing_key_is_named(key: str) -> None:
    values = recipe_values()
    del values[key]

    assert f"\n  {key}: required" in _refused(values)


def test_a_missing_key_inside_a_section_is_named_with_its_path_and_meaning() -> None:
    complaint = _refused(recipe_values("model={}"))

    assert "model.path: required" in complaint
    assert f"({ModelSection.model_fields['path'].description})" in complaint


def test_all_problems_are_listed_at_once() -> None:
    complaint = _refused(recipe_values("setps=5", "steps=0", "optimizer.lr=-1"))

    assert "(3 problems)" in complaint


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_file_lists_what_is_required(tmp_path: Path, text: str) -> None:
    file = _written(tmp_path, text)

    with pytest.raises(RecipeError, match="required") as caught:
        load_recipe(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(("text", "kind"), [("- a\n- b\n", "list"), ("just words", "str"), ("7", "int")])
def test_a_file_that_is_no_mapping_says_how_to_begin(tmp_path: Path, text: str, kind: str) -> None:
    with pytest.raises(RecipeError, match=rf"recipe\.yaml .* {kind}\b.*`program: sft`"):
        load_recipe(_written(tmp_path, text))


def test_a_key_written_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    file = _written(tmp_path, VALID + "steps: 20\n")

    with pytest.raises(RecipeError, match=r"recipe\.yaml, line 8: .*'steps' .*twice"):
        load_recipe(file)


def test_a_nested_key_written_twice_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"line 6: .*'lr' .*twice"):
        load_recipe(_written(tmp_path, VALID.replace("{lr: 2e-5}", "{lr: 2e-5, lr: 3e-5}")))


def test_invalid_yaml_is_refused_with_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"recipe\.yaml .*YAML: line 3, column 6\b"):
        load_recipe(_written(tmp_path, "program: sft\nmodel: {path: x\nsteps: 1\n"))


def test_a_yaml_key_that_is_a_list_is_refused_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        load_recipe(_written(tmp_path, VALID + "? [a, b]\n: 1\n"))


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes("run: {name: Süm}".encode("latin-1"))

    with pytest.raises(RecipeError, match=r"recipe\.yaml .*UTF-8.*\(byte 13\)"):
        load_recipe(file)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(RecipeError, match=rf"{path}.*`podium schema`"):
            load_recipe(path)


def test_a_recipe_is_frozen_all_the_way_down() -> None:
    recipe = make_recipe()

    with pytest.raises(ValidationError, match="frozen"):
        recipe.steps = 5  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        recipe.optimizer.lr = 0.1  # type: ignore[misc]
    assert isinstance(recipe.data.train, tuple)


def test_a_folder_whose_name_looks_like_a_number_stays_a_folder(tmp_path):
    recipe = make_recipe("model.path='0E0'", "run.folder='1e-5'")
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert (recipe.model.path, recipe.run.folder) == ("0E0", "1e-5")


@pytest.mark.slow
@given(
    lr=st.floats(min_value=1e-12, max_value=1e3),
    steps=st.integers(min_value=1, max_value=10**9),
    seed=st.integers(min_value=0, max_value=2**63),
    path=st.text(min_size=1).filter(lambda text: text.strip() == text and text.isprintable()),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]*", fullmatch=True),
    clip=st.none() | st.floats(min_value=1e-6, max_value=1e6),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    weights=st.lists(st.floats(min_value=1e-6, max_value=1e6), min_size=1, max_size=4),
)
def test_a_dumped_recipe_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, lr: float, steps: int, seed: int, path: str, name: str,
    clip: float | None, schedule: str, weights: list[float],
) -> None:  # fmt: skip
    recipe = SftRecipe.model_validate(
        {
            "program": "sft",
            "model": {"path": path},
            "data": {"train": [{"path": path, "weight": weight} for weight in weights]},
            "optimizer": {"lr": lr, "clip_norm": clip, "schedule": schedule},
            "steps": steps,
            "run": {"name": name, "seed": seed},
        }
    )
    file = tmp_path_factory.mktemp("dump") / "recipe.yaml"
    file.write_text(dump_recipe(recipe), encoding="utf-8")

    assert load_recipe(file) == recipe


def test_the_base_class_is_no_recipe() -> None:
    with pytest.raises(ValidationError, match="parse_recipe"):
        Recipe.model_validate(recipe_values())


def test_fixed_data_runs_as_spmd() -> None:
    assert make_recipe().execution == "spmd"
