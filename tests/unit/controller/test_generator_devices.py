# SPDX-License-Identifier: Apache-2.0
"""placement.generator: what a recipe may ask for, what `podium check` says of the model, and where generators are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.made_batches import on_policy_recipe
from podium.checks import problems_of
from podium.cluster.layout import Layout, Resources
from podium.cluster.placement import Fits, NodeState, TooLarge, bundles_of, message, preflight
from podium.controller.layout import RoleNames, layout_of, trial_layout
from podium.errors import RecipeError
from podium.planning.devices import device_named
from podium.planning.memory import memory_of
from podium.planning.plans import plan_recipe
from podium.recipe.generator_mesh import nearest_divisor
from podium.runs.folder import RunFolder

CONFIG = {
    "model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 48,
    "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 512, "head_dim": 8,
    "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True,
}  # fmt: skip


def split(*others: str, devices: int = 8, rollout: int | None = 4) -> tuple[str, ...]:
    apart = "" if rollout is None else f", rollout_devices: {rollout}"
    return f"placement={{layout: split, devices: {devices}{apart}}}", *others


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (split("placement.generator={tensor: 3}"), r"3 does not divide the 4 devices .*rollout_devices\). Use 4, or"),
        (split("placement.generator={tensor: 3}"), r"set placement\.rollout_devices to 3\."),
        (split("placement.generator={tensor: 8}"), r"Use 4, or set placement\.rollout_devices to 8\."),
        (
            split("placement.generator={tensor: 4}", "placement.max_rollout_devices=6"),
            r"4 does not divide the 6 devices .*max_rollout_devices\). Use 2, or set .* to 8\.",
        ),
        (("placement.generator={tensor: 2}",), r"2 does not divide the 1 devices .*placement\.devices\)\. Use 1, or"),
        (("placement.devices=6", "placement.generator={tensor: 4}"), r"4 does not divide the 6 devices .* Use 3, or"),
        (
            ("placement={devices: 12, policy: {tensor: 3}}", "placement.generator={tensor: 2}", "model.pad_vocab_to=6"),
            r"2 and placement\.policy\.tensor 3 divide the same devices .* neither divides the other\. Use 3\.",
        ),
        (
            ("placement={layout: elastic, devices: 5, rollout_devices: 2}", "placement.generator={tensor: 2}"),
            r"2 does not divide the 3 learner's devices that are lent \(placement\.devices 5 - "
            r"placement\.rollout_devices 2\)\. Use 1, or set placement\.devices to 6\.",
        ),
        (
            ("placement={layout: elastic, devices: 9, rollout_devices: 6}", "placement.generator={tensor: 2}"),
            r"2 does not divide the 3 learner's devices .* Use 3, or set placement\.devices to 10\.",
        ),
        (
            ("placement={layout: elastic, devices: 7, rollout_devices: 3}", "placement.generator={tensor: 2}"),
            r"2 does not divide the 3 devices that generate \(placement\.rollout_devices\)\. Use 1, or set .* to 4\.",
        ),
        (
            (
                "placement={layout: elastic, devices: 12, rollout_devices: 6, policy: {tensor: 3}}",
                "placement.generator={tensor: 2}", "model.pad_vocab_to=6",
            ),
            r"2 and placement\.policy\.tensor 3 divide the same devices .* neither divides the other\. Use 3\.",
        ),
        (split("placement.generator={tensor: 4}", "model.pad_vocab_to=2"), r"pad_vocab_to: 2 is no multiple.*Use 4\."),
        (split("placement.generator={tensor: 0}"), r"tensor"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_work_are_refused_with_what_does(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        on_policy_recipe(*overrides)


def test_elastic_lends_whole_groups() -> None:
    elastic = "placement={layout: elastic, devices: 12, rollout_devices: 4, policy: {tensor: 2}}"
    placement = on_policy_recipe(elastic, "placement.generator={tensor: 4}").placement
    assert (placement.generator_tensor, placement.learners_tensor) == (4, 4)
    assert on_policy_recipe(*split("placement.generator={tensor: 4}")).placement.learners_tensor == 1


def test_half_of_the_devices_generate_unless_the_recipe_says_otherwise() -> None:
    assert on_policy_recipe(*split("placement.generator={tensor: 4}", rollout=None)).placement.generator_tensor == 4
    with pytest.raises(RecipeError, match="8 does not divide the 4 devices"):
        on_policy_recipe(*split("placement.generator={tensor: 8}", rollout=None))


def test_without_it_a_generator_has_one_device() -> None:
    assert on_policy_recipe().placement.generator_tensor == 1
    on_policy_recipe("placement.generator={tensor: 1}")  # in every layout


def test_the_nearest_divisor_differs_by_the_smallest_factor() -> None:
    assert [nearest_divisor(asked, 12) for asked in (1, 5, 7, 8, 40)] == [1, 6, 6, 6, 12]
    assert nearest_divisor(4, 4, 6) == 2


# --- the model ---


def problems(folder: Path, *overrides: str, **config: Any) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    recipe = on_policy_recipe(f"model.path={folder}", *split(*overrides))
    return [str(each) for each in problems_of(recipe) if "placement.generator" in str(each)]


def test_heads_that_do_not_divide_are_refused_with_the_nearest_size(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path / "model", "placement.generator={tensor: 4}")
    assert "placement.generator.tensor: 4 does not divide num_key_value_heads 2 of model.path" in problem
    assert problem.endswith("Use 2.")
    assert not problems(tmp_path / "model", "placement.generator={tensor: 2}")
    elastic = "placement={layout: elastic, devices: 12, rollout_devices: 8, generator: {tensor: 4}}"
    (problem,) = problems(tmp_path / "model", elastic)
    assert problem.endswith("Use 2.")  # divides 8 devices, the 4 that are lent, and the heads


def test_vllm_copies_key_value_heads_and_divides_more_architectures(tmp_path: Path) -> None:
    vllm = ("rollout.engine=vllm", "placement.generator={tensor: 4}")
    assert not problems(tmp_path / "model", *vllm)
    assert not problems(tmp_path / "model", *vllm, model_type="qwen3_moe")
    (problem,) = problems(tmp_path / "model", *vllm, num_attention_heads=6)
    assert problem.endswith("Use 2.")


def test_the_native_engine_refuses_architectures_that_it_does_not_divide(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path / "model", "placement.generator={tensor: 2}", model_type="phimoe")
    assert "phimoe is not among the architectures" in problem
    assert "rollout.engine vllm" in problem


def test_memory_counts_a_part_of_weights_and_cache_on_each_device(tmp_path: Path) -> None:
    problems(tmp_path / "model", "placement.generator={tensor: 2}")
    sizes = []
    for tensor in (1, 2):
        recipe = on_policy_recipe(
            f"model.path={tmp_path / 'model'}", "data.max_length=64", "rollout.max_new_tokens=8",
            *split(f"placement.generator={{tensor: {tensor}}}"),
        )  # fmt: skip
        (phase,) = [each for each in memory_of(recipe, device_named("H100")).phases if each.place == "generator"]
        sizes.append({term.name: term.num_bytes for term in phase.terms})
    assert sizes[0]["weights"] == 2 * sizes[1]["weights"]
    assert sizes[0]["KV cache"] == 2 * sizes[1]["KV cache"]
    with pytest.raises(RecipeError, match=r"placement\.generator\.tensor: plans know generators of one device only"):
        plan_recipe(recipe, device_named("H100"))


@pytest.mark.parametrize("place", ["generator", "learner"])
def test_memory_counts_parts_on_devices_that_are_lent_too(tmp_path: Path, place: str) -> None:
    problems(tmp_path / "model")
    sizes = []
    for tensor in (1, 2):
        recipe = on_policy_recipe(
            f"model.path={tmp_path / 'model'}", "data.max_length=64", "rollout.max_new_tokens=8",
            f"placement={{layout: elastic, devices: 8, rollout_devices: 4, generator: {{tensor: {tensor}}}}}",
        )  # fmt: skip
        phases = memory_of(recipe, device_named("H100")).phases
        (phase,) = [each for each in phases if each.phase == "rollout" and each.place == place]
        sizes.append({term.name: term.num_bytes for term in phase.terms})
    weights = "weights" if place == "generator" else "weight copies"
    assert sizes[0][weights] == 2 * sizes[1][weights]
    assert sizes[0]["KV cache"] == 2 * sizes[1]["KV cache"]


# --- where they are ---


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models/base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def layout(*overrides: str, device: str = "cuda") -> Layout:
    recipe = on_policy_recipe(*overrides)
    return layout_of(recipe, RunFolder(path=Path("runs/bandit")), device=device, resume_step=None)


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_a_generator_of_several_devices_is_one_worker_with_all_of_them(here: Path, engine: str) -> None:
    found = layout(
        *split("placement.generator={tensor: 2}", "placement.max_rollout_devices=8", f"rollout.engine={engine}")
    )
    pool = found.pool("rollout")
    assert (pool.slots, pool.num_first, pool.each) == (4, 2, Resources(cpus=1.8, gpus=2.0))
    assert (found.pool("train").slots, found.pool("train").each) == (4, Resources(cpus=0.9, gpus=1.0))
    generator = next(role for role in found.roles if role.name == "generator")
    assert (generator.mesh.world, generator.arguments[0].tensor) == (4, 2)
    assert layout(*split("placement.generator={tensor: 2}"), device="cpu").pool("rollout").each == Resources(cpus=1.8)


def test_a_trial_has_one_generator_of_that_size(here: Path) -> None:
    found = trial_layout(on_policy_recipe(*split("placement.generator={tensor: 4}")), device="cuda")
    assert found.pool("rollout").each == Resources(cpus=3.6, gpus=4.0)


def node(name: str, gpus: float) -> NodeState:
    amounts = {"CPU": 64.0, "GPU": gpus}
    return NodeState(id=name, name=name, total=amounts, free=amounts)


def test_the_devices_of_a_generator_are_never_on_two_nodes(here: Path) -> None:
    bundles = bundles_of(layout(*split("placement.generator={tensor: 2}")).pool("rollout"))
    assert [dict(bundle.needs) for bundle in bundles] == [{"CPU": 1.8, "GPU": 2.0}] * 2
    outcome = preflight(bundles, [node("a", 3.0), node("b", 3.0)])
    assert isinstance(outcome, Fits)
    assert [each.id for each in outcome.nodes] == ["a", "b"]  # 6 devices, and the odd one of each is left
    outcome = preflight(bundles, [node("a", 3.0), node("b", 1.0)])
    assert isinstance(outcome, TooLarge)
    assert "2 GPU" in message(outcome)


def test_learners_devices_hold_generators_together_on_one_node(tmp_path: Path) -> None:
    """The shape of 64 devices that docs/scaling.md has."""
    mixture = {"model_type": "qwen3_moe", "num_experts": 128, "num_key_value_heads": 4, "moe_intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **mixture, "mlp_only_layers": []}))
    recipe = on_policy_recipe(
        f"model.path={tmp_path}", "placement.devices=64", "placement.experts=8", "placement.generator={tensor: 4}",
        "placement.policy={replicate: 2, shard: 8, tensor: 2, context: 2}",
    )  # fmt: skip
    assert not [str(each) for each in problems_of(recipe) if "placement" in str(each)]
    found = layout_of(recipe, RunFolder(path=tmp_path / "run"), device="cuda", resume_step=None)

    assert (found.pool("train").slots, found.pool("train").together) == (64, 4)
    roles = {role.name: role for role in found.roles}
    assert [role for role in roles if role.startswith("generator")] == ["generator-parts", "generator"]  # built so
    assert found.mesh(roles["generator-parts"]).slots == tuple(range(64))
    assert found.mesh(roles["generator"]).slots == tuple(range(0, 64, 4))
    (spec,) = roles["generator"].arguments
    assert (spec.tensor, spec.parts, spec.learner) == (4, "generator-parts", "policy")


def test_elastic_has_engines_of_several_learners_beside_those_of_its_own(here: Path) -> None:
    elastic = "placement={layout: elastic, devices: 12, rollout_devices: 8, generator: {tensor: 2}}"
    found = layout(elastic, "placement.max_rollout_devices=16")
    assert (found.pool("train").slots, found.pool("train").together) == (4, 2)
    assert (found.pool("rollout").slots, found.pool("rollout").num_first) == (8, 4)
    roles = {role.name: role for role in found.roles}
    assert found.mesh(roles["generator-parts"]).slots == (0, 1, 2, 3)
    assert found.mesh(roles["lent-generator"]).slots == (0, 2)
    (own,), (lent,) = roles["generator"].arguments, roles["lent-generator"].arguments
    assert (own.tensor, own.parts, own.learner) == (2, None, None)
    assert (lent.tensor, lent.parts, lent.learner) == (2, "generator-parts", "policy")
    # An evaluation lends nothing.
    recipe, names = on_policy_recipe(elastic), RoleNames(critic=None, reference=None, teachers=(), reward_models=())
    plain = layout_of(recipe, RunFolder(path=Path("runs/bandit")), device="cuda", resume_step=None, names=names)
    assert not {"generator-parts", "lent-generator"} & {role.name for role in plain.roles}


def test_lent_groups_have_one_node_each(here: Path) -> None:
    elastic = "placement={layout: elastic, devices: 6, rollout_devices: 2, generator: {tensor: 2}}"
    bundles = [each for name in ("train", "rollout") for each in bundles_of(layout(elastic).pool(name))]
    assert isinstance(preflight(bundles, [node("a", 2.0), node("b", 2.0), node("c", 2.0)]), Fits)
    assert isinstance(preflight(bundles, [node("a", 3.0), node("b", 3.0)]), TooLarge)  # 6 devices, in halves


def test_without_it_each_learners_device_has_an_engine(here: Path) -> None:
    roles = {role.name: role for role in layout("placement.devices=2").roles}
    assert "generator-parts" not in roles
    assert layout("placement.devices=2").mesh(roles["generator"]).slots == (0, 1)
    assert roles["generator"].arguments[0].parts is None
