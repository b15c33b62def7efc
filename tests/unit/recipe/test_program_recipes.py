# SPDX-License-Identifier: Apache-2.0
"""Each program has its own recipe: which sections it has, whose key a refused one is, custom programs, warnings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from helpers.recipes import recipe_values
from podium.checks import problems_of
from podium.data.fingerprints import recipe_fingerprint, recipe_inputs
from podium.errors import RecipeError
from podium.recipe import (
    AnyRecipe,
    CriticSection,
    CustomOnPolicyRecipe,
    CustomSpmdRecipe,
    DistillRecipe,
    DpoRecipe,
    ExpertIterationRecipe,
    GrpoRecipe,
    OnPolicyDistillRecipe,
    OnPolicyRecipe,
    PpoRecipe,
    Recipe,
    RewardModelRecipe,
    SftRecipe,
    SpmdRecipe,
    dump_recipe,
    parse_recipe,
)
from podium.recipe.keys import owners_of, program_keys
from podium.recipe.programs import BUILT_IN
from podium.recipe.resolving import resolved
from podium.recipe.warnings import recipe_warnings

SHARED = {"program", "model", "data", "optimizer", "steps", "epochs", "micro_batch_tokens", "placement"}
SHARED |= {"checkpoint", "evaluation", "run"}
FIXED = SHARED | {"tokens_per_step", "rows_per_step"}
ON_POLICY = SHARED | {"rollout", "reward", "grading", "algorithm", "environment", "sandbox"}
SECTIONS: dict[str, set[str]] = {
    "sft": FIXED | {"rollout", "algorithm"},
    "dpo": FIXED | {"rollout", "preference"},
    "reward_model": FIXED | {"reward_model"},
    "distill": FIXED | {"rollout", "teachers", "distill"},
    "grpo": ON_POLICY,
    "ppo": ON_POLICY | {"critic"},
    "on_policy_distill": ON_POLICY | {"teachers"},
    "expert_iteration": ON_POLICY,
}
UPDATE = {"reduction", "constant", "epochs", "mini_batches", "mask_truncated"}
POLICY = UPDATE | {
    "loss",
    "clip_low",
    "clip_high",
    "dual_clip",
    "entropy",
    "kl",
    "proximal",
    "correction",
    "max_kl_behavior",
}
ALGORITHM: dict[str, set[str]] = {
    "sft": {"loss"},
    "grpo": POLICY | {"overlong", "advantage", "gamma", "credit", "turn_discount", "dynamic_sampling", "max_refills"},
    "ppo": POLICY | {"overlong", "gamma", "lam"},
    "on_policy_distill": POLICY,
    "expert_iteration": UPDATE | {"overlong", "keep_per_prompt"},
}
# The least that a section may hold.
EXAMPLE: dict[str, Any] = {
    "teachers": [{"path": "models/large"}],
    "reward": [{"verifier": "exact_match"}],
    "environment": {"tools": ["a.py:f"]},
    "tokens_per_step": 100,
    "rows_per_step": 4,
}
CUSTOM = ("program='my_method.py:train'",)


def values_of(program: str, *overrides: str) -> dict[str, Any]:
    """The shortest recipe of a program."""
    needed = {name: EXAMPLE[name] for name in ("teachers", "reward") if name in SECTIONS[program]}
    return {**recipe_values(f"program={program}", *overrides), **needed}


def refused(values: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(values)
    return str(caught.value)


# --- sections ---


@pytest.mark.parametrize("program", SECTIONS)
def test_a_program_has_the_sections_that_it_reads(program: str) -> None:
    assert set(BUILT_IN[program].model_fields) == SECTIONS[program]


@pytest.mark.parametrize("program", ALGORITHM)
def test_an_algorithm_has_the_keys_that_its_program_reads(program: str) -> None:
    assert {key.split(".")[1] for key in program_keys()[program] if key.startswith("algorithm.")} == ALGORITHM[program]


@pytest.mark.parametrize("program", SECTIONS)
def test_every_section_of_another_program_is_refused_with_the_programs_that_have_it(program: str) -> None:
    for section in sorted(set.union(*SECTIONS.values()) - SECTIONS[program]):
        reported = refused({**values_of(program), section: EXAMPLE.get(section, {})})
        assert "(1 problem)" in reported
        for owner in owners_of([section]):
            assert re.search(rf"\n  {section}: {program} .*\b{owner}\b", reported)
        for other, sections in SECTIONS.items():
            assert (section in sections) == (other in owners_of([section]))


FIXED_PROGRAMS = "sft dpo reward_model distill"
ON_POLICY_PROGRAMS = "grpo ppo on_policy_distill expert_iteration"


@pytest.mark.parametrize(
    ("program", "override", "key", "owners"),
    [
        ("grpo", "critic.lr=1", "critic", "ppo"),
        ("grpo", "algorithm.lam=1", "algorithm.lam", "ppo"),
        ("ppo", "algorithm.advantage=gae", "algorithm.advantage", "grpo"),
        ("ppo", "algorithm.dynamic_sampling=false", "algorithm.dynamic_sampling", "grpo"),
        ("sft", "rollout.top_p=0.9", "rollout.top_p", ON_POLICY_PROGRAMS),
        ("sft", "distill={}", "distill", "distill"),
        ("dpo", "data.trained=assistant", "data.trained", "sft distill"),
        ("sft", "placement.layout=colocated", "placement.layout", ON_POLICY_PROGRAMS),
        ("sft", "rollout.engine=native", "rollout.engine", ON_POLICY_PROGRAMS),
        ("grpo", "tokens_per_step=64", "tokens_per_step", FIXED_PROGRAMS),
        ("sft", "evaluation={generation: {samples: 2}}", "evaluation.generation.samples", ON_POLICY_PROGRAMS),
        ("sft", "signal=fixed", "signal", "custom"),
        ("grpo", "options={}", "options", "custom"),
        (
            "reward_model",
            "evaluation.generation={}",
            "evaluation.generation",
            f"sft dpo distill {ON_POLICY_PROGRAMS}",
        ),
    ],
)
def test_a_key_of_another_program_is_named_with_that_program(
    program: str, override: str, key: str, owners: str
) -> None:
    (line,) = refused(values_of(program, override)).splitlines()[1:]
    beginning = f"  {key}: {program} "
    assert line.startswith(beginning)
    assert set(re.findall(r"\w+", line.removeprefix(beginning))) & {*BUILT_IN, "custom"} == set(owners.split())


def test_a_misspelt_key_is_no_key_of_another_program() -> None:
    assert re.search(r"\n  critc: [^,]* critic\b", refused(values_of("ppo", "critc.lr=1")))


def test_all_problems_are_listed_at_once_in_whatever_section() -> None:
    reported = refused(values_of("grpo", "critic={}", "stpes=3", "steps=0", "algorithm.lam=1"))

    assert "(4 problems)" in reported


# --- classes ---


@pytest.mark.parametrize(
    ("program", "kind", "family"),
    [
        ("sft", SftRecipe, SpmdRecipe),
        ("dpo", DpoRecipe, SpmdRecipe),
        ("reward_model", RewardModelRecipe, SpmdRecipe),
        ("distill", DistillRecipe, SpmdRecipe),
        ("grpo", GrpoRecipe, OnPolicyRecipe),
        ("ppo", PpoRecipe, OnPolicyRecipe),
        ("on_policy_distill", OnPolicyDistillRecipe, OnPolicyRecipe),
        ("expert_iteration", ExpertIterationRecipe, OnPolicyRecipe),
    ],
)
def test_a_recipe_is_of_its_programs_class_and_reads_back_equal(
    program: str, kind: type[Recipe], family: type[Recipe]
) -> None:
    recipe = parse_recipe(values_of(program))

    assert type(recipe) is kind
    assert isinstance(recipe, family)
    assert recipe.execution == ("spmd" if family is SpmdRecipe else "controlled")
    assert parse_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe
    assert TypeAdapter(AnyRecipe).validate_python(values_of(program)) == recipe


def test_a_recipe_of_the_time_of_one_class_is_refused_key_by_key() -> None:
    """Such a dump has defaults of sections that the program does not have."""
    reported = refused({**values_of("sft"), "critic": {"path": None}, "reward": [], "environment": None})

    assert "(3 problems)" in reported
    for key in ("critic", "reward", "environment"):
        assert f"\n  {key}: sft " in reported


# --- custom programs ---


def test_a_custom_program_on_policy_has_every_on_policy_section() -> None:
    recipe = parse_recipe(
        recipe_values(
            *CUSTOM, "signal=on_policy", "critic={lr: 1}", "teachers=[large]", "rollout.top_p=0.9", "reward=[]",
            "algorithm={lam: 0.9, keep_per_prompt: 2, dynamic_sampling: true, advantage: 'my_method.py:mine'}",
            "options={schedule: [1, 0.5], name: {a: null}}",
        )
    )  # fmt: skip

    assert isinstance(recipe, CustomOnPolicyRecipe)
    assert (recipe.program, recipe.signal, recipe.execution) == ("my_method.py:train", "on_policy", "controlled")
    assert recipe.options == {"schedule": [1, 0.5], "name": {"a": None}}
    assert recipe.critic_section == CriticSection(lr=1)
    assert recipe.teacher_sections[0].path == "large"
    assert recipe.rollout.top_p == 0.9
    assert parse_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe


def test_a_custom_program_with_fixed_data_has_what_sft_has() -> None:
    recipe = parse_recipe(recipe_values(*CUSTOM, "signal=fixed", "data.trained=everything", "model.dropout=true"))

    assert isinstance(recipe, CustomSpmdRecipe)
    assert (recipe.signal, recipe.execution, recipe.teachers, recipe.options) == ("fixed", "spmd", (), {})
    assert set(CustomSpmdRecipe.model_fields) == SECTIONS["sft"] - {"algorithm"} | {"signal", "teachers", "options"}
    assert parse_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe


def test_a_custom_program_needs_no_critic_reward_or_groups() -> None:
    recipe = parse_recipe(recipe_values(*CUSTOM, "signal=on_policy", "rollout.samples_per_prompt=1"))

    assert isinstance(recipe, CustomOnPolicyRecipe)
    assert (recipe.critic_section, recipe.reward) == (None, ())


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (CUSTOM, "signal"),
        ((*CUSTOM, "signal=offline"), "signal"),
        ((*CUSTOM, "signal=[fixed]"), "signal"),
        ((*CUSTOM, "signal=fixed", "critic={}"), "critic"),
        ((*CUSTOM, "signal=fixed", "options=[1]"), "options"),
        (("program='my method:'", "signal=fixed"), "program"),
        (("program='no.py:1x'", "signal=fixed"), "program"),
        (("program=[grpo]",), "program"),
    ],
)
def test_what_is_wrong_with_a_custom_program_is_named(overrides: tuple[str, ...], key: str) -> None:
    reported = refused(recipe_values(*overrides))

    assert f"\n  {key}: " in reported
    assert "(1 problem)" in reported


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_method.py").write_text("def train(run):\n    pass\n")
    return tmp_path


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("none.py:train", r"program: .* none\.py\b"),
        ("my_method.py:trian", r"program: my_method\.py .*'trian'.*: train[^\w,]"),
        ("no_such_module:train", "program: .*'no_such_module'"),
    ],
)
def test_a_program_that_is_not_there_is_found_by_the_check(here: Path, program: str, message: str) -> None:
    recipe = parse_recipe(recipe_values(f"program='{program}'", "signal=fixed"))

    assert any(re.match(message, str(problem)) for problem in problems_of(recipe))


def test_a_program_that_is_there_passes_the_check(here: Path) -> None:
    recipe = parse_recipe(recipe_values(*CUSTOM, "signal=fixed"))

    assert not any(str(problem).startswith("program") for problem in problems_of(recipe))


def test_the_code_of_a_program_is_part_of_the_recipes_fingerprint(here: Path) -> None:
    (here / "model").mkdir()
    (here / "data.jsonl").write_text('{"text": "a"}\n')
    overrides = ("model.path=model", "model.init=random", "data.train=[{path: data.jsonl}]", "signal=on_policy")
    recipe = resolved(parse_recipe(recipe_values(*CUSTOM, *overrides)), {})
    assert recipe.program == f"{here}/my_method.py:train"

    before = recipe_fingerprint(recipe, recipe_inputs(recipe, here / "model"))
    (here / "my_method.py").write_text("def train(run):\n    return None\n")

    assert recipe_fingerprint(recipe, recipe_inputs(recipe, here / "model")) != before


# --- warnings ---


def test_an_adapter_on_random_weights_is_warned_of_and_allowed() -> None:
    recipe = parse_recipe(recipe_values("model={path: m, init: random, lora: {}}"))

    (warning,) = recipe_warnings(recipe)
    assert warning.startswith("model.lora: ")
    assert recipe_warnings(parse_recipe(recipe_values("model={path: m, lora: {}}"))) == []
