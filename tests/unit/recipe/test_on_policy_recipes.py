# SPDX-License-Identifier: Apache-2.0
"""Recipes of on-policy programs: every rule broken once, defaults by program, presets, changes, and paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.made_batches import on_policy_recipe, on_policy_values
from helpers.recipes import make_recipe
from podium.errors import RecipeError
from podium.recipe import AlgorithmSection, CorrectionSection, CriticSection, PpoRecipe, dump_recipe, parse_recipe
from podium.recipe.changes import changes, what_matters
from podium.recipe.pipeline_loading import load_any_recipe
from podium.recipe.resolving import resolved, with_steps
from podium.recipe.warnings import recipe_warnings

EXAMPLES = Path(__file__).parents[3] / "examples"
PPO, EXPERT = "program=ppo", "program=expert_iteration"
DISTILL = ("program=on_policy_distill", "teachers=[{path: models/large}]")
SPLIT = "placement={layout: split, devices: 2}"
HELDOUT = "data.heldout=[{path: h.jsonl}]"

# --- rules ---

RULES: list[tuple[tuple[str, ...], str]] = [
    # What makes an episode good.
    (("program=on_policy_distill",), "teachers"),
    (("reward=[]",), "reward"),
    ((EXPERT, "reward=[]"), "reward"),
    # Estimators.
    (("rollout.samples_per_prompt=1",), "rollout.samples_per_prompt"),
    (
        ("rollout.samples_per_prompt=1", "algorithm={advantage: reinforce_pp, dynamic_sampling: true}"),
        "algorithm.dynamic_sampling",
    ),
    (("algorithm.max_refills=4",), "algorithm.max_refills"),
    (("algorithm.constant=100",), "algorithm.constant"),
    (("algorithm.gamma=0.9",), "algorithm.gamma"),
    (("algorithm={loss: sequence_clipped, dual_clip: 3}",), "algorithm.dual_clip"),
    (("algorithm.overlong={buffer_tokens: 8}",), "algorithm.overlong.buffer_tokens"),
    (("algorithm.overlong={buffer_tokens: 4}", "environment={tools: ['a.py:f']}"), "algorithm.overlong"),
    (("algorithm.correction={low: 1}",), "algorithm.correction.low"),
    (("algorithm.correction={kind: token_mask, low: 3}",), "algorithm.correction.low"),
    # KL.
    (("algorithm.kl={coefficient: 1, estimator: k1}",), "algorithm.kl.estimator"),
    (("algorithm.kl={coefficient: 1, where: reward, estimator: k3_straight}",), "algorithm.kl.estimator"),
    (("algorithm.kl={coefficient: 1, horizon: 10000}",), "algorithm.kl.horizon"),
    (("algorithm.kl={coefficient: 1, reference: r, refresh_every: 2}",), "algorithm.kl.refresh_every"),
    ((*DISTILL, "algorithm.kl={coefficient: 1, where: reward}"), "algorithm.kl.where"),
    # Batches.
    (("algorithm.mini_batches=17",), "algorithm.mini_batches"),
    (("algorithm={proximal: never, correction: {}}",), "algorithm.proximal"),
    ((PPO, "critic.warmup_steps=100"), "critic.warmup_steps"),
    (("micro_batch_tokens=63",), "data.max_length"),
    (("rollout.max_new_tokens=64",), "data.max_length"),
    # Places.
    (("placement.launcher=local",), "placement.launcher"),
    (("placement.layout=split",), "placement.layout"),
    (("placement={layout: split, devices: 2, rollout_devices: 2}",), "placement.rollout_devices"),
    (("placement.rollout_devices=1",), "placement.rollout_devices"),
    (("placement={layout: elastic, devices: 1}",), "placement.layout"),
    (("placement={layout: elastic, devices: 2, rollout_devices: 2}",), "placement.rollout_devices"),
    (("reward=[{model: rm}]", "placement={layout: elastic, devices: 2}"), "placement.layout"),
    (("rollout.engine=vllm", "placement={layout: elastic, devices: 2}"), "rollout.engine"),
    (
        ("rollout.staleness=1", "rollout.on_new_weights=finish", "placement={layout: elastic, devices: 2}"),
        "rollout.on_new_weights",
    ),
    (("rollout.offload_optimizer=true", "placement={layout: elastic, devices: 2}"), "rollout.offload_optimizer"),
    (("placement={launcher: inline, devices: 2}",), "placement.devices"),
    (("rollout.engine=vllm",), "rollout.engine"),
    (("rollout.engine=vllm", "placement={layout: split, devices: 2}", "model.lora={}"), "rollout.engine"),
    (
        ("rollout.engine=vllm", "placement={layout: split, devices: 2}", "rollout.speculation={tokens: 8}"),
        "rollout.speculation.tokens",
    ),
    # What generators compute with.
    (("rollout.adapter=merged",), "rollout.adapter"),
    (("rollout.adapter=sometimes", "model.lora={}"), "rollout.adapter"),
    (
        (
            "rollout.adapter=merged",
            "model.lora={}",
            "placement={devices: 4, policy: {tensor: 2}, generator: {tensor: 2}}",
        ),
        "rollout.adapter",
    ),
    # Staleness.
    (("rollout.staleness=-1", SPLIT), "rollout.staleness"),
    (("rollout.staleness=true", SPLIT), "rollout.staleness"),
    (("rollout.staleness=0.5", SPLIT), "rollout.staleness"),
    (("rollout.staleness=1",), "rollout.staleness"),
    (("rollout.staleness=1", "placement={layout: colocated, devices: 4}"), "rollout.staleness"),
    (("rollout.staleness=1", "placement.launcher=inline"), "rollout.staleness"),
    ((EXPERT, "rollout.staleness=1"), "rollout.staleness"),
    ((EXPERT, "rollout.staleness=1", SPLIT), "rollout.staleness"),
    (("rollout.staleness=100", SPLIT), "rollout.staleness"),
    (("rollout.staleness=1", "rollout.offload_optimizer=true", SPLIT), "rollout.offload_optimizer"),
    (("rollout.on_new_weights=finish",), "rollout.on_new_weights"),
    (("rollout.on_new_weights=recompute", SPLIT), "rollout.on_new_weights"),
    (("rollout.on_new_weights=wait", "rollout.staleness=1", SPLIT), "rollout.on_new_weights"),
    (("rollout.staleness=1", SPLIT, "algorithm={proximal: never, mini_batches: 2}"), "algorithm.proximal"),
    # Truncated sampling.
    (("rollout.top_p=0",), "rollout.top_p"),
    (("rollout.top_p=1.1",), "rollout.top_p"),
    (("rollout.top_k=-1",), "rollout.top_k"),
    (("rollout.min_p=-0.1",), "rollout.min_p"),
    (("rollout.top_p=0.9", "algorithm.correction=none"), "algorithm.correction"),
    (("rollout.top_k=5", "algorithm.correction=off", PPO), "algorithm.correction"),
    (("rollout.min_p=0.1", "algorithm.correction=none", *DISTILL), "algorithm.correction"),
    (("rollout.top_p=0.9", "algorithm.proximal=never"), "algorithm.proximal"),
    (("rollout.top_p=0.9", "algorithm.kl={coefficient: 1, where: reward}"), "algorithm.kl.where"),
    (("rollout.record=auto",), "rollout.record"),
    (("algorithm.correction=tis",), "algorithm.correction.kind"),
    (("algorithm.correction=true",), "algorithm.correction"),
    (("algorithm.correction={cap: 0}",), "algorithm.correction.cap"),
    (("algorithm.correction={caps: 3}",), "algorithm.correction.caps"),
    (("algorithm.max_kl_behavior=0",), "algorithm.max_kl_behavior"),
    # Environments.
    (("environment={}",), "environment"),
    (("environment={environment: 'a.py:A', tools: ['a.py:f']}",), "environment"),
    # Rewards.
    (("reward=[{name: x}]",), "reward.0"),
    (("reward=[{verifier: exact_match}, {function: 'a.py:f', model: m}]",), "reward.1"),
    (("reward=[{verifier: exact_match, style: trl}]",), "reward.0.style"),
    (("reward=[{verifier: exact_match, style: auto}]",), "reward.0.style"),
    (("reward=[{model: m, per: batch}]",), "reward.0.per"),
    (("reward=[{model: m, options: {a: 1}}]",), "reward.0.options"),
]


@pytest.mark.parametrize(("overrides", "key"), RULES)
def test_a_broken_rule_names_its_key(overrides: tuple[str, ...], key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        on_policy_recipe(*overrides)

    assert f"\n  {key}: " in str(caught.value)
    assert "(1 problem)" in str(caught.value)  # no rule speaks of another's keys


@pytest.mark.parametrize("advantage", ["gae", "teacher", "solved"])
def test_what_needs_more_than_rewards_is_no_estimator_of_episodes(advantage: str) -> None:
    with pytest.raises(RecipeError, match=r"algorithm\.advantage: "):
        on_policy_recipe(f"algorithm.advantage={advantage}")


def test_a_reward_says_which_kind_of_reward_has_a_key() -> None:
    with pytest.raises(RecipeError, match=r"reward\.0\.options: model .*function and verifier\b"):
        on_policy_recipe("reward=[{model: m, options: {a: 1}}]")


def test_several_broken_rules_are_reported_together() -> None:
    with pytest.raises(RecipeError, match=r"\(3 problems\)"):
        on_policy_recipe("reward=[]", "algorithm.constant=1", "algorithm.mini_batches=99")


@pytest.mark.parametrize(
    "overrides",
    [
        ("rollout.samples_per_prompt=1", "algorithm.advantage=reinforce_pp"),
        ("rollout.samples_per_prompt=1", PPO),
        ("rollout.samples_per_prompt=1", EXPERT),
        ("rollout.samples_per_prompt=2", "algorithm.dynamic_sampling=true"),
        ("algorithm={reduction: constant, constant: 100}",),
        ("algorithm={advantage: reinforce_pp, gamma: 0.9}",),
        (PPO, "algorithm={gamma: 0.9, lam: 0.95, dual_clip: 3}"),
        ("algorithm.overlong={buffer_tokens: 7}",),
        ("algorithm.kl={coefficient: 1, estimator: k2}",),
        ("algorithm.kl={coefficient: 1, where: reward, estimator: k1}",),
        (*DISTILL, "algorithm.kl={coefficient: 1}"),
        (*DISTILL, "reward=[]"),
        ("algorithm.mini_batches=16",),
        (PPO, "critic.warmup_steps=99"),
        ("micro_batch_tokens=64",),
        ("rollout.max_new_tokens=63",),
        (EXPERT, "rollout.top_k=5"),
        ("rollout.top_p=0.9", "rollout.top_k=20", "rollout.min_p=0.01"),
        ("rollout.top_p=0.9", PPO),
        ("rollout.top_p=0.9", *DISTILL),
        ("rollout.top_p=0.9", "algorithm={proximal: always, correction: {kind: token_mask, low: 0.5, cap: 5}}"),
        ("rollout.top_p=0.9", "algorithm.kl={coefficient: 1, where: loss}"),
        ("rollout.top_p=0.9", "rollout.staleness=1", SPLIT),
        ("placement={layout: split, devices: 2, rollout_devices: 1}",),
        ("placement={layout: elastic, devices: 8, rollout_devices: 4}",),
        ("placement={layout: elastic, devices: 8, rollout_devices: 4}", "rollout.staleness=1"),
        ("placement={layout: split, devices: 2}", "rollout.engine=vllm"),
        ("rollout.staleness=1", "rollout.on_new_weights=recompute", SPLIT, "rollout.engine=vllm"),
        ("rollout.staleness=99", "rollout.on_new_weights=finish", SPLIT),
        ("rollout.staleness=1", "rollout.offload_optimizer=false", SPLIT),
        ("rollout.staleness=2", SPLIT, PPO),
        ("rollout.staleness=2", SPLIT, *DISTILL),
        ("rollout.staleness=1", SPLIT, "algorithm={correction: none, proximal: never, mini_batches: 2}"),
        ("rollout.staleness=1", SPLIT, "algorithm.proximal=never"),
        (
            "rollout.staleness=0",
            "rollout.on_new_weights=keep",
        ),
        (EXPERT, "rollout.staleness=0"),
        ("algorithm.max_kl_behavior=0.05",),
        ("placement.launcher=inline",),
        ("environment={environment: 'a.py:Game', options: {size: 3}}", "reward=[]"),
        ("environment={tools: ['a.py:f', 'a.py:g']}",),
        ("reward=[{function: 'a.py:f', style: trl}, {model: m, weight: 0}, {verifier: regex, options: {pattern: x}}]",),
        ("data.train.0.columns={prompt: q, reference: a, data_source: s, tools: t}",),
    ],
)
def test_the_border_of_a_rule_is_allowed(overrides: tuple[str, ...]) -> None:
    on_policy_recipe(*overrides)


def test_a_discount_that_nothing_reads_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"algorithm\.gamma"):
        on_policy_recipe("algorithm={advantage: reinforce_pp_baseline, gamma: 0.9}")


@pytest.mark.parametrize("name", ["reference", "data_source", "tools"])
def test_columns_of_tasks_are_read_by_on_policy_programs_only(name: str) -> None:
    on_policy_recipe(f"data.train.0.columns={{{name}: mine}}")

    with pytest.raises(RecipeError, match=rf"data\.train\.0\.columns\.{name}: .*completion, messages, prompt"):
        make_recipe(f"data.train.0.columns={{{name}: mine}}")


def test_a_staleness_that_no_token_can_have_is_refused_with_the_numbers() -> None:
    with pytest.raises(RecipeError, match=r"rollout\.staleness: 7 .*steps 5.* version 4.*\b4 or less"):
        on_policy_recipe("rollout.staleness=7", SPLIT, "steps=5")


@pytest.mark.parametrize("layout", ["split", "elastic"])
@pytest.mark.parametrize("rollout_devices", [4, 5])
def test_generators_on_all_devices_are_refused_with_the_numbers(layout: str, rollout_devices: int) -> None:
    """Also with staleness: who would learn from what is in flight?"""
    expected = (
        rf"placement\.rollout_devices: {rollout_devices} of 4 devices leaves none to learn on\. Lower it to 3 or less, "
        rf"or raise placement\.devices to {rollout_devices + 1} or more"
    )
    for staleness in (0, 2):
        with pytest.raises(RecipeError, match=expected):
            on_policy_recipe(
                f"rollout.staleness={staleness}",
                f"placement={{layout: {layout}, devices: 4, rollout_devices: {rollout_devices}}}",
            )
    assert on_policy_recipe(f"placement={{layout: {layout}, devices: 4, rollout_devices: 3}}").placement.devices == 4


def test_a_run_of_epochs_is_held_to_its_staleness_when_its_steps_are_counted() -> None:
    recipe = parse_recipe({key: value for key, value in on_policy_values(
        "rollout.staleness=5", SPLIT, "epochs=1").items() if key != "steps"})  # fmt: skip

    assert with_steps(recipe, 6).rollout.staleness == 5
    with pytest.raises(RecipeError, match=r"rollout\.staleness"):
        with_steps(recipe, 5)


# --- off-policy correction ---

CORRECTIONS: list[tuple[str, int, CorrectionSection | None]] = [
    ("auto", 0, None),
    ("auto", 4, None),  # the clipped loss has ratios against the weights that sampled
    ("none", 1, None),
    ("null", 1, None),
    ("off", 1, None),  # YAML: false
    ("'off'", 1, None),
    ("token_mask", 0, CorrectionSection(kind="token_mask")),
    ("{}", 0, CorrectionSection()),
    ("{kind: sequence_mask, low: 0.5}", 2, CorrectionSection(kind="sequence_mask", low=0.5)),
]


@pytest.mark.parametrize(("written", "staleness", "expected"), CORRECTIONS)
def test_the_correction_that_applies(written: str, staleness: int, expected: CorrectionSection | None) -> None:
    recipe = on_policy_recipe(f"algorithm.correction={written}", f"rollout.staleness={staleness}", SPLIT)

    assert recipe.correction == expected
    assert recipe.full_algorithm.correction == expected
    assert recipe.full_algorithm.needs_idle_episodes == (expected is not None)


@pytest.mark.parametrize(("written", "staleness", "expected"), CORRECTIONS)
def test_a_resolved_recipe_shows_what_the_correction_became(
    written: str, staleness: int, expected: CorrectionSection | None
) -> None:
    recipe = on_policy_recipe(f"algorithm.correction={written}", f"rollout.staleness={staleness}", SPLIT)

    once = resolved(recipe, {})

    assert once.algorithm.correction == expected
    assert resolved(once, {}) == once
    assert yaml.safe_load(dump_recipe(once))["algorithm"]["correction"] == (expected and expected.model_dump())


@pytest.mark.parametrize(
    "change",
    [
        "algorithm.epochs=2",
        "algorithm.mini_batches=2",
        "algorithm.proximal=always",
        "algorithm.loss=policy_gradient",
        "algorithm.loss=sequence_clipped",
        "algorithm.loss=clipped_weights",
        "algorithm.loss='mine.py:loss'",
    ],
)
def test_old_tokens_are_truncated_where_ratios_are_no_correction_or_have_several_steps(change: str) -> None:
    assert on_policy_recipe(change).correction is None
    assert on_policy_recipe(change, "rollout.staleness=1", SPLIT).correction == CorrectionSection(
        kind="token_truncate", cap=2.0
    )


def test_a_custom_program_has_staleness_and_its_correction() -> None:
    values = on_policy_values(
        "program='mine.py:train'", "signal=on_policy", "rollout.staleness=1", "algorithm.mini_batches=2", SPLIT
    )
    recipe = parse_recipe(values)

    assert recipe.correction == recipe.full_algorithm.correction == CorrectionSection()


def test_a_number_from_the_environment_stays_a_reference_in_a_resolved_correction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CAP", "3.5")
    recipe = resolved(on_policy_recipe("algorithm.correction={cap: '${env:CAP}'}"), {})

    assert recipe.correction == CorrectionSection(cap=3.5)
    assert "${env:CAP}" in dump_recipe(recipe)


@pytest.mark.parametrize("ignores_age", ["algorithm.loss=policy_gradient", "algorithm.proximal=always"])
def test_stale_tokens_that_count_like_new_ones_are_warned_of(ignores_age: str) -> None:
    stale, uncorrected = ("rollout.staleness=3", SPLIT), "algorithm.correction=none"
    (warning,) = recipe_warnings(on_policy_recipe(*stale, uncorrected, ignores_age))

    assert warning.startswith("algorithm.correction: ")
    assert "3" in warning
    assert recipe_warnings(on_policy_recipe(*stale, ignores_age)) == []
    assert recipe_warnings(on_policy_recipe(*stale, uncorrected)) == []  # the clipped loss has ratios
    assert recipe_warnings(on_policy_recipe(uncorrected, ignores_age)) == []


def test_a_product_of_truncated_weights_is_warned_of() -> None:
    for kind, is_warned in (("sequence_truncate", True), ("sequence_mask", True), ("sequence_geometric_mask", False)):
        warnings = recipe_warnings(on_policy_recipe("rollout.top_k=20", f"algorithm.correction={kind}"))
        assert [warning.startswith("algorithm.correction.kind: ") for warning in warnings] == [True] * is_warned
    assert recipe_warnings(on_policy_recipe("algorithm.correction=sequence_truncate")) == []


def test_auto_is_a_correction_where_sampling_is_truncated() -> None:
    recipe = resolved(on_policy_recipe("rollout.top_p=0.9"), {})

    assert recipe.correction == CorrectionSection()
    assert yaml.safe_load(dump_recipe(recipe))["algorithm"]["correction"] == CorrectionSection().model_dump()
    assert on_policy_recipe("rollout.top_p=1").correction is None


def test_what_came_with_staleness_does_not_count_in_a_fingerprint_where_it_is_off() -> None:
    """Stages of pipelines and runs of earlier versions keep their fingerprints."""
    added = ("rollout.staleness", "rollout.on_new_weights", "algorithm.max_kl_behavior")
    plain = what_matters(resolved(on_policy_recipe(SPLIT), {}))

    assert not plain.keys() & set(added)
    assert plain["algorithm.correction"] is None
    changes = ("rollout.staleness=1", "rollout.on_new_weights=finish", "algorithm.mini_batches=2", SPLIT)
    stale = what_matters(resolved(on_policy_recipe(*changes), {}))
    assert (stale["rollout.staleness"], stale["rollout.on_new_weights"]) == (1, "finish")
    assert stale["algorithm.correction.kind"] == "token_truncate"


# --- defaults ---


def test_the_shortest_recipe_has_the_documented_defaults() -> None:
    recipe = on_policy_recipe()

    algorithm, grading, critic = recipe.algorithm, recipe.grading, CriticSection()
    assert algorithm.advantage == "group_relative"
    assert (algorithm.loss, algorithm.reduction, algorithm.clip_low, algorithm.clip_high) == (
        "clipped", "token_mean", 0.2, 0.2
    )  # fmt: skip
    assert (algorithm.epochs, algorithm.mini_batches, algorithm.kl, algorithm.correction) == (1, 1, None, "auto")
    assert (recipe.rollout.staleness, recipe.rollout.on_new_weights) == (0, "keep")
    assert (recipe.correction, algorithm.max_kl_behavior) == (None, None)
    assert (grading.on_error, grading.max_failed_share, grading.solved_at) == ("drop_group", 0.5, 1.0)
    assert (critic.value_clip, critic.warmup_steps, critic.lr) == (0.2, 0, None)
    assert (recipe.rollout.temperature, recipe.rollout.engine, recipe.placement.layout) == (1.0, "native", "colocated")


@pytest.mark.parametrize("overrides", [(), (PPO,), DISTILL, (EXPERT,)])
def test_programs_that_generate_their_data_have_a_controller(overrides: tuple[str, ...]) -> None:
    assert on_policy_recipe(*overrides).execution == "controlled"


def test_what_a_program_has_no_key_for_is_off_in_the_full_algorithm() -> None:
    full = on_policy_recipe(EXPERT, "algorithm={keep_per_prompt: 2, epochs: 3}").full_algorithm

    assert full == AlgorithmSection(keep_per_prompt=2, epochs=3)
    assert (full.kl, full.correction, full.entropy, full.dynamic_sampling) == (None, None, 0.0, False)


@pytest.mark.parametrize(
    ("values", "spans", "needs_idle"),
    [
        ({}, False, False),
        ({"loss": "policy_gradient"}, False, False),
        ({"loss": "sequence_clipped"}, True, False),
        ({"loss": "mine.py:loss"}, True, True),
        ({"entropy": 0.1}, False, True),
        ({"kl": {"coefficient": 1}}, False, True),
        ({"correction": {}}, False, True),
    ],
)
def test_a_loss_declares_what_it_needs(values: dict[str, Any], spans: bool, needs_idle: bool) -> None:
    algorithm = AlgorithmSection.model_validate(values)

    assert (algorithm.loss_spans_tokens, algorithm.needs_idle_episodes) == (spans, needs_idle)


# --- presets ---

PRESETS = {
    "GRPO": "algorithm: {advantage: group_relative, kl: {coefficient: 0.001}}",
    "Dr.GRPO": "algorithm: {advantage: group_centered, reduction: constant, constant: 512}",
    "DAPO": """algorithm:
  clip_low: 0.2
  clip_high: 0.28
  dynamic_sampling: true
  overlong: {buffer_tokens: 64}
  mask_truncated: true""",
    "GSPO": "algorithm: {loss: sequence_clipped, reduction: sequence_mean_mean, clip_low: 3.0e-4, clip_high: 4.0e-4}",
    "CISPO": "algorithm: {loss: clipped_weights, clip_low: 1.0, clip_high: 4.0}",
    "RLOO": "algorithm: {advantage: leave_one_out, loss: policy_gradient, reduction: sequence_sum_mean}",
    "REINFORCE++": "algorithm: {advantage: reinforce_pp, gamma: 0.99, kl: {coefficient: 0.01, where: reward}}",
    "REINFORCE++ baseline": "algorithm: {advantage: reinforce_pp_baseline}",
    "OPO": "algorithm: {advantage: length_weighted}",
    "off-policy": "algorithm: {correction: {kind: sequence_mask, low: 0.5, cap: 2.0}, epochs: 2, mini_batches: 4}",
    "PPO": """program: ppo
algorithm: {lam: 0.95, mini_batches: 4, kl: {coefficient: 0.05, where: reward, target: 0.02}}
critic: {lr: 1.0e-5, warmup_steps: 5}""",
    "distillation": """program: on_policy_distill
teachers: [{path: models/large, weight: 2}, {path: owner/other}]""",
    "expert iteration": """program: expert_iteration
algorithm: {keep_per_prompt: 2}""",
    "tools": """environment: {tools: ["tools.py:calculate"], max_turns: 4, runners: 2}
rollout: {prompts_per_step: 16, samples_per_prompt: 8, max_new_tokens: 128}""",
    "vLLM": """rollout: {engine: vllm, prompts_per_step: 64, samples_per_prompt: 8, max_new_tokens: 512}
placement: {layout: split, devices: 8, rollout_devices: 4}""",
    "mixed rewards": """reward:
  - {function: "rewards.py:correct", weight: 1.0}
  - {verifier: regex, options: {pattern: "<answer>.*</answer>"}, weight: 0.1, name: format}
  - {model: models/judge, weight: 0.5}
grading: {workers: 4, timeout_s: 10, on_error: zero}""",
}
BASE = """
program: grpo
model: {path: models/base}
data:
  train: [{path: data/train.jsonl}]
  heldout: [{path: data/heldout.jsonl}]
reward: [{function: "rewards.py:correct"}]
rollout: {prompts_per_step: 32, samples_per_prompt: 8, max_new_tokens: 256}
optimizer: {lr: 1.0e-6}
steps: 200
evaluation: {every: 20, at_start: true, generation: {prompts: 100, samples: 4}}
checkpoint: {every: 20, keep_best: true}
"""


@pytest.mark.parametrize("name", PRESETS)
def test_a_method_is_a_few_lines_on_top_of_a_recipe(name: str) -> None:
    recipe = parse_recipe(yaml.safe_load(BASE) | yaml.safe_load(PRESETS[name]))

    assert parse_recipe(recipe.model_dump(mode="json")) == recipe


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/*.yaml")), ids=lambda file: f"{file.parent.name}/{file.name}")
def test_the_recipes_of_the_examples_are_valid(file: Path) -> None:
    load_any_recipe(file)


# --- what a resumed run may change ---

KL, TOOLS = "algorithm.kl={coefficient: 0.1}", "environment={tools: ['a.py:f']}"


@pytest.mark.parametrize(
    ("before", "override"),
    [
        ((), "grading.workers=9"),
        ((), "grading.timeout_s=9"),
        ((), "grading.memory_gib=9"),
        ((), "grading.max_failed_share=0.9"),
        ((), "rollout.memory_gib=3"),
        ((), "rollout.max_running=3"),
        ((), "rollout.prefill_tokens=64"),
        ((), "rollout.block_size=16"),
        ((), "rollout.reuse_prefixes=false"),
        ((), "rollout.decode=eager"),
        ((), "rollout.offload_optimizer=true"),
        ((), "placement.devices=2"),
        ((), "placement={layout: split, devices: 2}"),
        ((), "micro_batch_tokens=100"),
        ((), "checkpoint.every=3"),
        ((), HELDOUT),
        ((), "run.log_every=5"),
        ((), "algorithm.max_kl_behavior=0.1"),
        ((), "steps=200"),
        ((TOOLS,), "environment.runners=4"),
        ((TOOLS,), "environment.concurrency=4"),
        ((TOOLS,), "environment.memory_gib=4"),
    ],
)
def test_sizes_and_places_leave_a_run_what_it_is(before: tuple[str, ...], override: str) -> None:
    found = changes(on_policy_recipe(*before), on_policy_recipe(*before, override))

    assert found
    assert [str(change) for change in found if change.breaks is not None] == []


@pytest.mark.parametrize(
    ("before", "override"),
    [
        ((), "rollout.temperature=0.7"),
        ((), "rollout.samples_per_prompt=8"),
        ((), "rollout.prompts_per_step=8"),
        ((), "rollout.max_new_tokens=9"),
        ((), "rollout.stop=[END]"),
        ((), "rollout.max_length=40"),
        ((SPLIT,), "rollout.staleness=1"),
        ((SPLIT, "rollout.staleness=1"), "rollout.on_new_weights=finish"),
        (("placement={layout: split, devices: 2}",), "rollout.engine=vllm"),
        ((), "reward.0.weight=2"),
        ((), "reward=[{verifier: exact_match}, {model: m}]"),
        ((), "grading.on_error=zero"),
        ((EXPERT,), "grading.solved_at=0.5"),
        ((), "algorithm.clip_high=0.28"),
        ((), KL),
        ((KL,), "algorithm.kl.coefficient=0.2"),
        ((PPO,), "critic.lr=1"),
        (DISTILL, "teachers.0.weight=2"),
        ((), TOOLS),
        ((TOOLS,), "environment.max_turns=2"),
        ((), "run.seed=4"),
    ],
)
def test_what_is_generated_graded_or_learned_breaks_exactness(before: tuple[str, ...], override: str) -> None:
    found = changes(on_policy_recipe(*before), on_policy_recipe(*before, override))

    assert [change for change in found if change.breaks is not None]


def test_a_change_is_named_by_its_key() -> None:
    (change,) = changes(on_policy_recipe(), on_policy_recipe("rollout.temperature=0.7"))

    assert str(change) == "rollout.temperature: 1.0 -> 0.7"
    assert change.breaks is not None


def test_what_generates_is_harmless_where_only_evaluation_does() -> None:
    (change,) = changes(make_recipe(), make_recipe("rollout.max_length=40"))

    assert change.breaks is None


# --- paths ---


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with models and a plug-in file in it."""
    for folder in ("models/base", "judge", "large", "critic", "ref"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_path_and_plugin_becomes_absolute(here: Path) -> None:
    recipe = resolved(
        on_policy_recipe(
            "reward=[{function: 'mine.py:f'}, {model: judge}, {verifier: exact_match}]", "run.loggers=['mine.py:log']",
            "algorithm={advantage: 'mine.py:own', loss: 'mine.py:loss', kl: {coefficient: 1, reference: ref}}",
            "environment={tools: ['mine.py:a', 'mine.py:b']}",
        ),
        {},
    )  # fmt: skip

    assert recipe.model.path == f"{here}/models/base"
    assert recipe.reward[0].function == f"{here}/mine.py:f"
    assert recipe.reward[1].model == f"{here}/judge"
    assert (recipe.algorithm.advantage, recipe.algorithm.loss) == (f"{here}/mine.py:own", f"{here}/mine.py:loss")
    assert recipe.algorithm.kl is not None
    assert recipe.algorithm.kl.reference == f"{here}/ref"
    assert recipe.environment is not None
    assert recipe.environment.tools == (f"{here}/mine.py:a", f"{here}/mine.py:b")
    assert recipe.run.loggers == (f"{here}/mine.py:log",)


def test_a_critic_becomes_absolute(here: Path) -> None:
    recipe = resolved(on_policy_recipe("program=ppo", "critic.path=critic"), {})

    assert isinstance(recipe, PpoRecipe)
    assert recipe.critic.path == f"{here}/critic"


def test_teachers_and_environments_become_absolute(here: Path) -> None:
    recipe = resolved(
        on_policy_recipe(
            "program=on_policy_distill", "teachers=[{path: large}, {path: owner/other}]",
            "environment={environment: 'mine.py:Game'}",
        ),
        {},
    )  # fmt: skip

    assert [teacher.path for teacher in recipe.teachers] == [f"{here}/large", "owner/other"]
    assert recipe.environment is not None
    assert recipe.environment.environment == f"{here}/mine.py:Game"


def test_names_of_podiums_own_pieces_and_modules_stay(here: Path) -> None:
    recipe = resolved(
        on_policy_recipe(
            "algorithm={advantage: leave_one_out, loss: clipped}", "reward=[{function: 'package.module:f'}]"
        ),
        {},
    )

    assert (recipe.algorithm.advantage, recipe.algorithm.loss) == ("leave_one_out", "clipped")
    assert recipe.reward[0].function == "package.module:f"


def test_resolving_again_from_elsewhere_changes_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = resolved(on_policy_recipe("reward=[{function: 'mine.py:f'}]", "data.max_length=null"), {})
    monkeypatch.chdir(here / "models")

    assert resolved(once, {}) == once


@pytest.mark.parametrize(
    ("override", "config", "longest"),
    [
        ("data.max_length=null", {"max_position_embeddings": 512}, 512),
        # Not what fits a step of fixed data.
        ("data.max_length=null", {"max_position_embeddings": 100_000}, 100_000),
        ("data.max_length=null", {}, 16_384),
        ("data.max_length=40", {"max_position_embeddings": 512}, 40),
    ],
)
def test_an_episode_may_be_as_long_as_the_models_context(override: str, config: dict[str, int], longest: int) -> None:
    assert resolved(on_policy_recipe(override), config).data.max_length == longest


def test_a_context_without_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"data\.max_length: 8 .*rollout\.max_new_tokens"):
        resolved(on_policy_recipe("data.max_length=null"), {"max_position_embeddings": 8})


# --- limits of user code ---


@pytest.mark.parametrize("key", ["grading.memory_gib", "environment.memory_gib"])
@pytest.mark.parametrize(
    ("value", "why"),
    [("0", "greater than 0"), ("-2", "greater than 0"), ("lots", "number"), ("true", "number"), (".inf", "finite")],
)
def test_a_limit_of_memory_is_a_number_above_0(key: str, value: str, why: str) -> None:
    with pytest.raises(RecipeError, match=rf"(?s){re.escape(key)}: [^\n]*{why}"):
        on_policy_recipe(TOOLS, f"{key}={value}")


@pytest.mark.parametrize("key", ["grading.memory_gib", "environment.memory_gib"])
def test_a_limit_of_memory_may_be_a_fraction_or_absent(key: str) -> None:
    section, name = key.split(".")

    assert getattr(getattr(on_policy_recipe(TOOLS, f"{key}=0.5"), section), name) == 0.5
    assert getattr(getattr(on_policy_recipe(TOOLS), section), name) is None
