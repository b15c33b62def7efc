# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline: how they refer to each other, in which order they run, and how their mistakes are reported."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import RecipeError
from podium.recipe import CriticSection, CustomOnPolicyRecipe, GrpoRecipe, PipelineRecipe, Recipe, dump_recipe
from podium.recipe.changes import changes
from podium.recipe.pipeline import find_cycle, ordered, references
from podium.recipe.pipeline_loading import (
    load_any_recipe,
    parse_pipeline,
    recipe_schema,
    resolved_pipeline,
    stage_recipe,
)

DEFAULTS: dict[str, Any] = {
    "program": "sft",
    "data": {"train": [{"path": "train.jsonl"}]},
    "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
    "steps": 4,
}


def pipeline(stages: dict[str, Any], **keys: Any) -> PipelineRecipe:
    return parse_pipeline({"program": "pipeline", "defaults": DEFAULTS, "stages": stages, "run": {"name": "p"}, **keys})


def problems(stages: dict[str, Any], **keys: Any) -> list[str]:
    """One line for each problem, as reported."""
    with pytest.raises(RecipeError) as caught:
        pipeline(stages, **keys)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


# --- merging ---


def test_a_stage_has_the_defaults_section_by_section_unless_it_says_otherwise() -> None:
    made = pipeline({"a": {"model": "base", "optimizer": {"lr": 0.5}, "data": {"train": [{"path": "other.jsonl"}]}}})

    recipe = stage_recipe(made, "a", {}, Path("runs/p"))

    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay, recipe.steps) == (0.5, 0.1, 4)
    assert [source.path for source in recipe.data.train] == ["other.jsonl"]
    assert (recipe.run.name, recipe.run.folder) == ("a", "runs/p")


def test_a_model_that_is_only_a_path_keeps_the_other_defaults_of_its_section() -> None:
    defaults = {**DEFAULTS, "model": {"path": "base", "dtype": "float32"}}
    made = pipeline({"a": {}, "b": {"model": "${stage.a}"}}, defaults=defaults)

    recipe = stage_recipe(made, "b", {"a": "/runs/p/a/export"}, Path("runs/p"))

    assert (recipe.model.path, recipe.model.dtype) == ("/runs/p/a/export", "float32")


# --- references ---


def test_a_reference_may_stand_wherever_a_checkpoint_may() -> None:
    values = {
        "model": {"path": "${stage.a}"},
        "teachers": [{"path": "x"}, {"path": "${stage.b}"}],
        "algorithm": {"kl": {"reference": "${stage.c}"}},
        "rollout": {"stop": ["costs ${price}", "$"]},
    }
    assert [(each.key, each.stage) for each in references(values)] == [
        ("model.path", "a"), ("teachers.1.path", "b"), ("algorithm.kl.reference", "c"),
    ]  # fmt: skip


def test_stages_run_behind_what_they_need_else_as_they_are_written() -> None:
    made = pipeline(
        {"c": {"model": "${stage.a}"}, "b": {"model": "base"}, "a": {"model": "base"}, "d": {"model": "${stage.c}"}}
    )
    assert made.order() == ("b", "a", "c", "d")
    assert made.parents() == {"c": ("a",), "b": (), "a": (), "d": ("c",)}


@given(st.permutations([f"s{number}" for number in range(7)]), st.data())
def test_every_order_has_each_stage_once_and_behind_all_its_parents(names: list[str], data: st.DataObject) -> None:
    written = data.draw(st.permutations(names))
    # Parents only among those that come before in `names`: no cycle, whatever the order in which they are written.
    parents = {name: data.draw(st.lists(st.sampled_from(names[: names.index(name)] or names[:1]), max_size=3))
               if names.index(name) else [] for name in written}  # fmt: skip

    found = ordered(parents)

    assert sorted(found) == sorted(names)
    assert all(found.index(parent) < found.index(name) for name in names for parent in parents[name])
    assert find_cycle(parents) == ()


@given(st.dictionaries(st.sampled_from("abcde"), st.lists(st.sampled_from("abcde"), max_size=3), min_size=1))
def test_a_reported_cycle_is_one_and_without_one_there_is_an_order(sampled: dict[str, list[str]]) -> None:
    parents = {name: [parent for parent in found if parent in sampled] for name, found in sampled.items()}

    cycle = find_cycle(parents)

    if cycle:
        assert cycle[0] == cycle[-1]
        assert all(after in parents[before] for before, after in itertools.pairwise(cycle))
    else:
        assert sorted(ordered(parents)) == sorted(parents)


# --- mistakes ---


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            {"sft": {"model": "base"}, "b": {"model": "${stage.sftt}"}},
            "stages.b.model: there is no stage 'sftt'. Did you mean ${stage.sft}?",
        ),
        (
            {"sft": {"model": "base"}, "b": {"model": {"path": "${stage.other}"}}},
            "stages.b.model.path: there is no stage 'other'. There are: sft, b.",
        ),
        (
            {"a": {"model": "${stage.a}"}},
            "stages.a.model: stage a cannot begin with its own weights. Name another stage, or a folder or hub id.",
        ),
        (
            {"a": {"model": "${stage.b}"}, "b": {"model": "${stage.c}"}, "c": {"model": "${stage.a}"}},
            "stages.a.model: the stages wait for each other: a -> b -> c -> a. Let one of them begin with other "
            "weights.",
        ),
        (
            {"a": {"model": "base"}, "b": {"model": "${stage.a}/step-4"}},
            "stages.b.model: '${stage.a}/step-4' is not a reference. Write ${stage.NAME} and nothing beside it, "
            "e.g. ${stage.sft}.",
        ),
        (
            {"a": {"model": "${sft}"}},
            "stages.a.model: '${sft}' is not a reference. Write ${stage.NAME} and nothing beside it, "
            "e.g. ${stage.sft}.",
        ),
        (
            {"a": {"model": "base"}, "b": {"model": "base", "data": {"train": [{"path": "${stage.a}"}]}}},
            "stages.b.data.train.0.path: ${stage.a} is a folder of weights, and data is asked for here. Name a file "
            "or dataset.",
        ),
        (
            {"a": {"model": "base"}, "b": {"model": {"path": "base", "lora": {"adapter": "${stage.a}"}}}},
            "stages.b.model.lora.adapter: what stage a makes is a whole model, adapters merged. Set model.path to "
            "${stage.a}.",
        ),
        (
            {"a": {"model": "base", "run": {"name": "mine"}}},
            "stages.a.run.name: a stage's folder is a/ in that of the pipeline. Remove it; the pipeline's own is "
            "run.name.",
        ),
        (
            {"a": {"model": "base", "program": "pipeline"}},
            "stages.a.program: a stage is a recipe, and this is a pipeline. Write its stages out in this one.",
        ),
        (
            {"a": {"model": "base", "optimizer": {"lrr": 1.0}}},
            "stages.a.optimizer.lrr: unknown key. Did you mean optimizer.lr?",
        ),
        (
            {"a.b": {"model": "base"}},
            "stages.a.b: the name of a stage is letters, digits, - and _ (it is a folder's name too).",
        ),
        ({"a": None}, "stages.a: input should be a valid dictionary, found None."),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_with_its_key(stages: dict[str, Any], message: str) -> None:
    assert problems(stages) == [message]


def test_mistakes_of_all_stages_are_reported_at_once_and_those_of_the_defaults_once() -> None:
    defaults = {**DEFAULTS, "optimizer": {"lr": -1.0}}
    found = problems(
        {
            "a": {"model": "base"},
            "b": {"model": "${stage.c}", "steps": 0},
            "d": {"model": "base", "optimizer": {"lr": 1}},
        },
        defaults=defaults,
    )
    assert found == [
        "stages.b.model: there is no stage 'c'. There are: a, b, d.",
        "defaults.optimizer.lr: input should be greater than 0, found -1.0. (This is so in stage a, b.)",
        "stages.b.steps: input should be greater than or equal to 1, found 0. (Optimizer steps, or rounds of "
        "generating and updating. The data repeats.)",
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"steps": 3}, "steps: unknown key. It belongs to the stages: write defaults.steps for all of them, or"),
        ({"run": {"name": "p", "seed": 1}}, "run.seed: unknown key. It belongs to the stages: write defaults.run.seed"),
        ({"stages": {}}, "stages: dictionary should have at least 1 item"),
        ({"default": {}}, "default: unknown key. Did you mean defaults?"),
    ],
)
def test_keys_of_the_pipeline_itself_are_checked(keys: dict[str, Any], message: str) -> None:
    (line,) = problems(**{"stages": {"a": {"model": "base"}}, **keys})
    assert line.startswith(message)


# --- files ---


def _file(folder: Path, stages: dict[str, Any]) -> Path:
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump({"program": "pipeline", "defaults": DEFAULTS, "stages": stages}))
    return file


def test_the_program_says_what_a_file_is_and_the_file_names_it(tmp_path: Path) -> None:
    plain = tmp_path / "plain.yaml"
    plain.write_text(yaml.safe_dump({**DEFAULTS, "model": {"path": "base"}}))
    assert isinstance(load_any_recipe(plain), Recipe)

    made = load_any_recipe(_file(tmp_path, {"a": {"model": "base"}}))
    assert isinstance(made, PipelineRecipe)
    assert made.run.name == "mine"


def test_overrides_reach_into_stages_and_devices_are_every_stages(tmp_path: Path) -> None:
    file = _file(tmp_path, {"a": {"model": "base", "placement": {"devices": 3}}, "b": {"model": "${stage.a}"}})

    made = load_any_recipe(file, ["stages.a.steps=9", "defaults.optimizer.lr=0.25", "placement.devices=2"])

    assert isinstance(made, PipelineRecipe)
    recipes = [stage_recipe(made, name, {"a": "x"}, tmp_path) for name in ("a", "b")]
    assert [(each.steps, each.optimizer.lr, each.placement.devices) for each in recipes] == [(9, 0.25, 2), (4, 0.25, 2)]


def test_an_override_of_a_stage_that_is_not_there_makes_none(tmp_path: Path) -> None:
    file = _file(tmp_path, {"sft": {"model": "base"}})
    with pytest.raises(
        RecipeError, match=r"--set stages\.stf\.steps=9: there is no stage 'stf'\. Did you mean stages\.sft"
    ):
        load_any_recipe(file, ["stages.stf.steps=9"])
    assert isinstance(load_any_recipe(file, ["stages.more={model: base}"]), PipelineRecipe)


def test_a_reference_between_braces_needs_quotes(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("program: pipeline\nstages:\n  a: {model: base}\n  b: {model: ${stage.a}}\n")
    with pytest.raises(RecipeError, match=r'line 4, .* Between braces, write a reference in quotes: {path: "\${stage'):
        load_any_recipe(file)


def test_a_resolved_pipeline_says_the_same_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "base").mkdir()
    requested = load_any_recipe(_file(tmp_path, {"a": {"model": "base"}, "b": {"model": "${stage.a}"}}))
    assert isinstance(requested, PipelineRecipe)

    made = resolved_pipeline(requested)

    assert made.stages["a"]["model"]["path"] == str(tmp_path / "base")
    assert made.stages["b"]["model"]["path"] == "${stage.a}"
    assert made.stages["b"]["data"]["train"][0]["path"] == str(tmp_path / "train.jsonl")
    assert made.stages["b"]["data"]["max_length"] is None
    assert resolved_pipeline(made) == made
    assert parse_pipeline(yaml.safe_load(dump_recipe(made))) == made
    before, after = (stage_recipe(each, "b", {"a": "x"}, Path("runs")) for each in (requested, made))
    assert {change.key for change in changes(before, after)} == {"data.train.0.path"}


def test_the_schema_knows_both_kinds() -> None:
    schema = recipe_schema()
    assert set(schema["$defs"]["PipelineRecipe"]["properties"]) == {"program", "stages", "defaults", "run"}
    assert schema["$defs"]["GrpoRecipeInStage"]["properties"].keys() == GrpoRecipe.model_fields.keys()


def test_a_default_that_a_stages_program_does_not_have_is_refused_once_with_the_stage() -> None:
    stages = {
        "a": {"program": "sft", "model": "base"},
        "b": {"program": "grpo", "model": "${stage.a}", "reward": [{"verifier": "exact_match"}]},
    }
    with pytest.raises(RecipeError) as caught:
        pipeline(stages, defaults={**DEFAULTS, "tokens_per_step": 256})
    message = str(caught.value)

    assert "(1 problem)" in message
    assert "\n  defaults.tokens_per_step: grpo has no such key; " in message
    assert message.endswith("(This is so in stage b.)")


def test_a_custom_program_is_a_stage(tmp_path: Path) -> None:
    stages = {
        "a": {"program": "sft", "model": "base"},
        "b": {"program": "mine.py:train", "signal": "on_policy", "model": "${stage.a}", "options": {"a": 1}},
    }
    made = load_any_recipe(_file(tmp_path, stages), overrides=["stages.b.options.a=2", "stages.b.critic={}"])
    assert isinstance(made, PipelineRecipe)

    recipe = stage_recipe(made, "b", {"a": "x"}, Path("runs"))

    assert isinstance(recipe, CustomOnPolicyRecipe)
    assert (recipe.options, recipe.critic_section, recipe.model.path) == ({"a": 2}, CriticSection(), "x")
