# SPDX-License-Identifier: Apache-2.0
"""`podium schema` is one JSON schema that accepts what Podium accepts: every program, custom ones, pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from helpers.recipes import recipe_values
from podium.recipe.pipeline_loading import recipe_schema
from podium.recipe.programs import BUILT_IN, CUSTOM

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads(json.dumps(recipe_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_schema_has_every_program_and_forbids_unknown_keys() -> None:
    parts = recipe_schema()["$defs"]

    for kind in (*BUILT_IN.values(), *CUSTOM.values()):
        assert parts[kind.__name__]["properties"].keys() == kind.model_fields.keys()
        assert {"program", "model", "data", "optimizer"} <= set(parts[kind.__name__]["required"])
        assert parts[kind.__name__]["anyOf"] == [{"required": ["steps"]}, {"required": ["epochs"]}]
        assert "required" not in parts[f"{kind.__name__}InStage"]
    assert all(part["additionalProperties"] is False for part in parts.values() if part.get("type") == "object")
    assert parts["OptimizerSection"]["properties"]["schedule"]["enum"] == ["constant", "linear", "cosine"]


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/*.yaml")), ids=lambda file: f"{file.parent.name}/{file.name}")
def test_the_recipes_of_the_examples_match_the_schema(validator: Any, file: Path) -> None:
    validator.validate(yaml.safe_load(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("program=reward_model", "rows_per_step=4"),
        ("program=dpo", "preference={loss: simpo, gamma: 2}"),
        ("program=grpo", "reward=[{verifier: exact_match}, {model: m}, {function: 'a.py:f', style: trl}]"),
        ("program=grpo", "rollout={staleness: 1, on_new_weights: keep}", "algorithm.correction=auto"),
        ("program=grpo", "algorithm.correction=off"),
        ("program=grpo", "algorithm.correction=none"),
        ("program=grpo", "algorithm.correction=null"),
        ("program=grpo", "algorithm.correction=token_mask"),
        ("program=grpo", "algorithm.correction={cap: 3}"),
        ("program='my.py:train'", "signal=fixed", "options={a: [1, {b: null}]}"),
        ("program='my.module:train'", "signal=on_policy", "critic={}", "algorithm={lam: 0.9, keep_per_prompt: 2}"),
    ],
)
def test_what_podium_accepts_matches_the_schema(validator: Any, overrides: tuple[str, ...]) -> None:
    validator.validate(recipe_values(*overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        ("program=grpoo",),
        ("program=grpo", "critic={}"),
        ("program=grpo", "rollout.staleness=-1"),
        ("program=grpo", "algorithm.correction=true"),
        ("program=grpo", "algorithm.correction=tis"),
        ("program=dpo", "preference={loss: sigmoid, gamma: 2}"),
        ("program=grpo", "reward=[{verifier: exact_match, style: trl}]"),
        ("program='my.py:train'",),
        ("program=sft", "signal=fixed"),
        ("program='my.py:train'", "signal=fixed", "critic={}"),
    ],
)
def test_what_podium_refuses_does_not_match_the_schema(validator: Any, overrides: tuple[str, ...]) -> None:
    assert not validator.is_valid(recipe_values(*overrides))


def test_a_stage_may_leave_keys_to_the_defaults(validator: Any) -> None:
    stages = {"a": {"program": "sft", "model": "base"}, "b": {"program": "ppo", "critic": {"lr": 1}}}
    pipeline = {"program": "pipeline", "defaults": {"optimizer": {"betas": [0.9, 0.95]}}, "stages": stages}

    validator.validate(pipeline)
    assert not validator.is_valid({**pipeline, "stages": {"a": {"program": "sft", "critic": {}}}})
