# SPDX-License-Identifier: Apache-2.0
"""Lanes, micro-batches and sharding: what fits a device, what it costs, and that every suggestion is a recipe."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from podium.cli import app
from podium.controller.simulation.costs import LogNormal
from podium.errors import RecipeError
from podium.planning.choices import RecipeChoices, recipe_changes, recipe_with
from podium.planning.devices import GIB, Device, device_named
from podium.planning.plans import device_numbers, plan_recipe
from podium.planning.prediction import Configuration
from podium.planning.run_records import configuration_of, workload_of
from podium.planning.search import search
from podium.planning.shape_costs import Episodes, gathering_s
from podium.recipe import GrpoRecipe, parse_recipe
from podium.recipe.loading import apply_overrides

QWEN = {
    "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True, "max_position_embeddings": 40_960, "architectures": ["Qwen3ForCausalLM"],
}  # fmt: skip
H100 = device_named("H100")
EPISODES = Episodes(prompt_tokens=256, answer_tokens=LogNormal(median=768), samples_per_prompt=8)


def recipe_in(folder: Path, **changes: Any) -> GrpoRecipe:
    """GRPO of a 1.7B model: 1024 episodes of at most 4096 tokens; a change replaces keys of its section."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(QWEN))
    values: dict[str, Any] = {
        "program": "grpo",
        "model": {"path": str(folder / "model"), "init": "random"},
        "data": {"train": [{"path": str(folder / "train.jsonl")}], "max_length": 4096},
        "rollout": {"prompts_per_step": 128, "samples_per_prompt": 8, "max_new_tokens": 2048},
        "reward": [{"verifier": "exact_match"}],
        "optimizer": {"lr": 1e-6},
        "steps": 100,
        "placement": {"devices": 2},
        "run": {"name": "planned"},
    }
    for key, change in changes.items():
        values[key] = {**values.get(key, {}), **change} if isinstance(change, dict) else change
    recipe = parse_recipe(values)
    assert isinstance(recipe, GrpoRecipe)
    return recipe


def choices_of(recipe: GrpoRecipe, device: Device = H100) -> tuple[RecipeChoices, Configuration]:
    base = configuration_of(recipe, kind=device.kind)
    return RecipeChoices(recipe, device, EPISODES, base, workload_of(recipe)), base


def test_micro_batches_are_counted_by_the_tokens_of_a_learner(tmp_path: Path) -> None:
    """1024 episodes of 1024 tokens on two learners: 524,288 tokens in 32 micro-batches of 16,384."""
    choices, base = choices_of(recipe_in(tmp_path))

    assert choices.update_shape(base).passes == 32
    assert choices.update_shape(replace(base, micro_batch=32_768)).passes == 16
    assert choices.update_shape(replace(base, devices=64)).passes == 1
    mini = recipe_in(tmp_path, algorithm={"mini_batches": 4, "epochs": 2})
    shape = choices_of(mini)[0].update_shape(base)
    assert (shape.passes, shape.optimizer_steps, shape.epochs, shape.episodes) == (8, 4, 2, 128.0)


def test_a_tensor_group_goes_through_the_tokens_of_all_its_learners(tmp_path: Path) -> None:
    choices, base = choices_of(recipe_in(tmp_path, placement={"devices": 4, "policy": {"tensor": 2}}))

    assert choices.update_shape(base).passes == 32
    assert choices.update_shape(replace(base, devices=8)).passes == 16
    assert choices.variants(base)
    assert not choices.variants(replace(base, devices=5))  # 2 does not divide 5


def test_references_and_corrections_are_scored(tmp_path: Path) -> None:
    assert choices_of(recipe_in(tmp_path))[0].update_shape(Configuration(layout="colocated", devices=2)).scores == 0
    recipe = recipe_in(tmp_path, algorithm={"kl": {"coefficient": 0.01}, "epochs": 2})
    choices, base = choices_of(recipe)
    assert choices.update_shape(base).scores == 1
    stale = base.placed("split", rollout_devices=1)
    assert choices.update_shape(replace(stale, staleness=1)).scores == 2  # two epochs need a correction then


def test_a_larger_micro_batch_is_one_of_the_variants_while_it_fits(tmp_path: Path) -> None:
    """16,384 tokens take 53 of 79 GiB, and each further 16,384 some 32 GiB of activations."""
    choices, base = choices_of(recipe_in(tmp_path))

    assert {each.micro_batch for each in choices.variants(base)} == {None}
    roomy, _ = choices_of(recipe_in(tmp_path), device_named("H200"))
    assert {each.micro_batch for each in roomy.variants(base)} == {None, 32_768}
    for each in roomy.variants(base):
        assert roomy.memory(each).of("update", "learner").num_bytes <= 0.95 * 139.8 * GIB
    # One micro-batch is the fewest.
    assert {each.micro_batch for each in roomy.variants(replace(base, devices=64))} == {None}


def test_a_micro_batch_that_does_not_fit_is_replaced_by_the_largest_that_does(tmp_path: Path) -> None:
    small = replace(H100, memory_bytes=40 * GIB)
    choices, base = choices_of(recipe_in(tmp_path), small)

    assert not choices.fits(base)
    assert {each.micro_batch for each in choices.variants(base)} == {8192}
    assert not choices.fits(replace(base, micro_batch=16_384))
    (reason,) = choices.reasons(replace(base, micro_batch=8192))
    assert reason.startswith(
        "micro_batch_tokens 8192: with 16384 the update (learner) takes about 53.5 GiB of 40.0 GiB"
    )
    tiny, _ = choices_of(recipe_in(tmp_path), replace(H100, memory_bytes=20 * GIB))
    assert tiny.variants(base) == []  # an episode of 4096 tokens is never cut


def test_lanes_are_doubled_until_all_answers_run_and_as_many_run_as_the_cache_holds(tmp_path: Path) -> None:
    """Two engines for 1024 answers: 512 lanes are enough. A lane has room for 1280 tokens, 20 blocks of 64."""
    choices, base = choices_of(recipe_in(tmp_path))
    assert sorted({each.lanes for each in choices.variants(base)}) == [256, 512]
    engine = choices.memory(replace(base, lanes=512)).engine
    assert engine is not None
    held = engine.num_blocks // 20
    assert 256 < held < 512
    assert choices.running(base).lanes == 256
    assert choices.running(replace(base, lanes=512)).lanes == held
    stale = replace(base.placed("split", rollout_devices=1), staleness=1)
    assert max(each.lanes for each in choices.variants(stale)) == 2048


def test_memory_and_collectives_follow_the_number_of_learners(tmp_path: Path) -> None:
    """Moments are divided by the learners; beyond one machine they are joined by a network."""
    choices, base = choices_of(recipe_in(tmp_path))
    eight, sixteen = (replace(base, devices=number) for number in (8, 16))

    moments = [choices.memory(each).of("update", "learner").of("optimizer moments") for each in (eight, sixteen)]
    assert moments[0] / moments[1] == pytest.approx(2.0, rel=0.01)
    shape = choices.update_shape(sixteen)
    assert shape.passes == 4
    slow, fast = (
        gathering_s(choices.shape, device, world=16, passes=4) for device in (H100, replace(H100, network=None))
    )
    assert slow / fast == pytest.approx(450 / (8 * 50))


def test_a_device_that_is_shared_hands_over_what_each_side_needs(tmp_path: Path) -> None:
    choices, base = choices_of(recipe_in(tmp_path))
    plan, shape = choices.memory(base), choices.update_shape(base)
    update = plan.of("update", "learner")

    names = ("weights", "optimizer moments", "CUDA context", "cuBLAS workspaces")
    held = sum(update.of(name) for name in names)
    assert shape.update_bytes == update.num_bytes - held  # 32 micro-batches that are full
    # 524,288 tokens are 21 micro-batches of 24,966: their activations count, not those of 25,000.
    loose = replace(base, micro_batch=25_000)
    passes = choices.update_shape(loose).passes
    assert passes == 21
    left = 1 - 524_288 / 21 / 25_000
    activations = choices.memory(loose).of("update", "learner").of("activations")
    held_loose = choices.memory(loose).of("update", "learner").num_bytes - held
    assert choices.update_shape(loose).update_bytes == pytest.approx(held_loose - left * activations, abs=2)
    rollout = plan.of("rollout", "learner")
    assert shape.cache_bytes == rollout.of("KV cache") + rollout.of("weight copies") > 0
    apart = choices.update_shape(base.placed("split", rollout_devices=1))
    assert (apart.update_bytes, apart.cache_bytes) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"placement": {"devices": 8, "layout": "split", "rollout_devices": 6, "max_rollout_devices": 7}},
        {"placement": {"devices": 4, "layout": "elastic"}, "rollout": {"staleness": 2, "on_new_weights": "recompute"}},
        {"placement": {"devices": 4, "layout": "split"}, "rollout": {"staleness": 1, "on_new_weights": "finish"}},
        {"placement": {"devices": 1, "launcher": "inline"}},
        {"steps": 2, "rollout": {"max_running": 32}, "micro_batch_tokens": 8192},
    ],
    ids=["plain", "joining", "elastic", "finish", "inline", "short"],
)
def test_whatever_is_found_is_a_recipe_that_is_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The keys of every prediction, applied as `--set` does, give a recipe of just that configuration."""
    recipe = recipe_in(tmp_path, **changes)
    base, workload = configuration_of(recipe, kind="cuda"), replace(workload_of(recipe), groups_per_step=4)
    choices = RecipeChoices(recipe, H100, EPISODES, base, workload)
    found = search(choices, workload, base, devices=(base.devices, 16))
    predictions = [each for choice in found.choices for each in choice.predictions]

    assert predictions
    for each in predictions:
        keys = recipe_changes(recipe, base, each.configuration)
        accepted = with_overrides(recipe.stored_values(), [f"{key}={value}" for key, value in keys.items()])
        assert configuration_of(accepted, kind="cuda") == each.configuration
        assert recipe_with(recipe, each.configuration).rollout.max_running == each.configuration.lanes


def with_overrides(values: dict[str, Any], overrides: list[str]) -> GrpoRecipe:
    recipe = parse_recipe(apply_overrides(values, overrides))
    assert isinstance(recipe, GrpoRecipe)
    return recipe


def test_a_recipe_that_does_not_fit_is_planned_with_what_does(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, rollout={"prompts_per_step": 8})
    plan = plan_recipe(recipe, replace(H100, memory_bytes=40 * GIB), stalenesses=(0,))

    assert plan.base is None
    assert plan.changes["micro_batch_tokens"] == "8192"
    text = "\n".join(plan.lines())
    assert "as it is, it cannot run. placement.devices: the run cannot fit one H100 SXM of 40.0 GiB" in text
    assert "The recipe as it is does not fit." in text
    assert plan.as_json()["set"] == plan.changes
    with pytest.raises(RecipeError, match="the run cannot fit one H100 SXM of 20"):
        plan_recipe(recipe, replace(H100, memory_bytes=20 * GIB))


def test_numbers_of_devices_that_cannot_hold_it_are_named(tmp_path: Path) -> None:
    """22.4 GiB of weights and moments, and activations of at least 4096 tokens, are too much for one of 24 GiB."""
    recipe = recipe_in(tmp_path, rollout={"prompts_per_step": 8})
    plan = plan_recipe(recipe, replace(H100, memory_bytes=24 * GIB), devices=(1, 2, 8), stalenesses=(0,))

    assert plan.found is not None
    assert 1 in plan.found.impossible
    assert [choice.devices for choice in plan.found.choices][-1] == 8
    assert any("no layout is possible, or none fits the memory" in line for line in plan.lines())


@pytest.mark.slow
def test_1_to_1024_devices_are_searched_in_under_a_minute(tmp_path: Path) -> None:
    """By the processor's time: other work on the machine does not count."""
    recipe = recipe_in(tmp_path)
    choices, base = choices_of(recipe)
    found = search(
        choices, workload_of(recipe), base, devices=device_numbers("1-1024"), budget_s=60.0, clock=time.process_time
    )

    assert found.seconds < 60.0
    assert found.is_complete
    assert [choice.devices for choice in found.choices] == [2**power for power in range(11)]
    assert len({each.configuration.lanes for choice in found.choices for each in choice.predictions}) > 1


def test_the_command_says_why(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, rollout={"prompts_per_step": 16, "max_running": 4}, placement={"devices": 1})
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe.stored_values()))
    shown = CliRunner().invoke(app, ["plan", str(file), "--device", "H100", "--staleness", "0"])

    assert shown.exit_code == 0, shown.output
    assert "  set rollout.max_running: " in shown.output
    assert "a decoding step reads the weights once for all of them" in shown.output
