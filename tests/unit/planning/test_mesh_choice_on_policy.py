# SPDX-License-Identifier: Apache-2.0
"""placement.policy: auto of on-policy programs: check, plan and a run choose the same axes, and a resumed run keeps
those that it has."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.model_shapes import LLAMA_70B, config_folder
from helpers.tiny import save_tiny_folder, write_chats
from helpers.trials import write_prompts
from podium import api, memory_checks
from podium.errors import RecipeError
from podium.execution import prepare
from podium.planning import devices, mesh_choice
from podium.planning.devices import GIB, Device, device_named
from podium.planning.memory import TOLERANCE, MemoryPlan, memory_of
from podium.planning.mesh_choice import MeshChoice, choose_mesh, with_chosen_mesh, with_sizes
from podium.planning.plans import plan_recipe
from podium.programs.pipeline import Verbs, run_pipeline
from podium.recipe import OnPolicyRecipe, Recipe, parse_recipe
from podium.recipe.pipeline_loading import parse_pipeline
from podium.recipe.policy_mesh import MeshSizes, PolicyMeshSection, section_of
from podium.runs.folder import RunFolder
from podium.runs.lineage import Prepared
from podium.runs.pipeline_folder import PipelineFolder

H200 = device_named("H200")
QWEN_8B: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "hidden_size": 4096,
    "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40_960, "tie_word_embeddings": False,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"reward": [{"verifier": "numeric"}]},
    "ppo": {"reward": [{"verifier": "numeric"}]},
    "on_policy_distill": {"teachers": [{"path": "MODEL"}]},
}


def recipe_of(
    model: Path, method: str = "grpo", *, task: Path = Path("tasks.jsonl"), **placement: Any
) -> OnPolicyRecipe:
    values = {
        "program": method, "model": {"path": str(model)}, "data": {"train": str(task)},
        "rollout": {"prompts_per_step": 64, "samples_per_prompt": 8, "max_new_tokens": 128},
        "optimizer": {"lr": 1e-6}, "steps": 4, "run": {"name": "a", "folder": str(task.parent / "runs")},
        "placement": {"policy": "auto", "devices": 8, **placement}, **METHODS[method],
    }  # fmt: skip
    if "teachers" in values:
        values["teachers"] = [{"path": str(model)}]
    recipe = parse_recipe(values)
    assert isinstance(recipe, OnPolicyRecipe)
    return recipe


def memory_with(recipe: Recipe, sizes: MeshSizes, device: Device = H200) -> MemoryPlan:
    return memory_of(with_sizes(recipe, sizes), device)


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has an H200, as far as the planner looks."""
    for place in (devices, mesh_choice):
        monkeypatch.setattr(place, "found_device", lambda kind: H200)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("on_h200")
def test_check_plan_and_a_run_choose_the_same(method: str, tmp_path: Path) -> None:
    """The run's recipe has a length that the others look up, so that both see the same memory."""
    model, task = save_tiny_folder(tmp_path / "model"), write_prompts(tmp_path / "tasks.jsonl", 4)
    for placement in ({}, {"layout": "split", "rollout_devices": 2}, {"layout": "elastic"}):
        recipe = recipe_of(model, method, task=task, **placement)
        prepared = prepare(recipe)
        policy, ranks = prepared.recipe.placement.policy, recipe.placement.training_devices

        assert isinstance(policy, PolicyMeshSection)
        assert policy.sizes(ranks).devices == ranks
        assert prepared.mesh_reason is not None
        assert prepared.mesh_reason.startswith(f"placement.policy: auto is {policy.sizes(ranks)}: ")
        assert prepared.mesh_reason in api.check(recipe)
        assert prepared.mesh_reason in plan_recipe(recipe, H200).facts


def test_the_smallest_tensor_axis_with_which_an_update_fits(tmp_path: Path) -> None:
    """An update of 16,384 tokens of an 8B keeps some 80 GiB of activations, and one device has 16 bytes a parameter of
    state beside them: two devices hold it only with a tensor axis."""
    recipe = recipe_of(config_folder(tmp_path / "8b", QWEN_8B), devices=2)
    choice = choose_mesh(recipe, H200)

    assert choice.sizes == MeshSizes(tensor=2)
    assert "With a tensor axis below 2 nothing fits." in choice.text
    for sizes in (MeshSizes(shard=2), MeshSizes(replicate=2)):
        assert memory_with(recipe, sizes).of_learner.num_bytes > (1 - TOLERANCE) * H200.memory_bytes
    assert choose_mesh(recipe_of(tmp_path / "8b", devices=8), H200).sizes == MeshSizes(shard=8)


def test_only_devices_that_train_are_divided(tmp_path: Path) -> None:
    recipe = recipe_of(config_folder(tmp_path / "8b", QWEN_8B), devices=12, layout="split", rollout_devices=4)
    assert choose_mesh(recipe, H200).sizes.devices == 8


def test_of_shapes_that_fit_those_whose_cache_holds_more_come_first(tmp_path: Path) -> None:
    """Replicated state leaves an L40S less for keys and values than state over eight devices."""
    small, tiny = device_named("L40S"), {**QWEN_8B, "hidden_size": 2048, "num_hidden_layers": 16}
    recipe = recipe_of(config_folder(tmp_path / "m", tiny)).model_copy(update={"micro_batch_tokens": 2048})
    choice = choose_mesh(recipe, small)
    blocks = {}
    for replicate in (1, 2, 4, 8):
        engine = memory_with(recipe, MeshSizes(replicate=replicate, shard=8 // replicate), small).engine
        blocks[8 // replicate] = 0 if engine is None else engine.num_blocks

    assert choice.sizes.tensor == 1
    assert blocks[choice.sizes.shard] == max(blocks.values()) > blocks[1]


def test_a_generator_over_learners_devices_bounds_the_tensor_axis(tmp_path: Path) -> None:
    """Twelve key-value heads allow 1, 2, 3, 4, 6 and 12. Beside generators of four devices 3 and 6 neither divide nor
    are divided, and a machine has 8."""
    heads = {**QWEN_8B, "num_attention_heads": 24, "num_key_value_heads": 12}
    model = config_folder(tmp_path / "m", heads)
    none = replace(H200, memory_bytes=GIB)
    counts = []
    for generator in (None, {"tensor": 4}):
        recipe = recipe_of(model, devices=12, generator=generator)
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"pad_vocab_to": 192})})
        counts.append(choose_mesh(recipe, none).misfits)
    # replicate x shard over 12 / tensor ranks: 6, 4, 3, 2 and 2 shapes with a tensor axis of 1, 2, 3, 4 and 6
    assert counts == [6 + 4 + 3 + 2 + 2, 6 + 4 + 2]


@pytest.mark.usefixtures("on_h200")
def test_nothing_fits_is_refused_with_a_sum_of_the_largest_terms(tmp_path: Path) -> None:
    model = save_tiny_folder(tmp_path / "model")
    config_folder(model, {**LLAMA_70B})
    recipe = recipe_of(model, task=write_prompts(tmp_path / "tasks.jsonl", 4))
    for refused in (
        lambda: api.check(recipe), lambda: memory_checks.refuse_what_cannot_fit(recipe), lambda: api.train(recipe)
    ):  # fmt: skip
        with pytest.raises(RecipeError, match=r"placement\.policy: auto: none of the 10 shapes of 8 devices") as error:
            refused()
        text = str(error.value)
        takes = re.search(r"\{replicate: 1, shard: 1, tensor: 8\} takes ([\d.]+) GiB in its update", text)
        added = re.search(r"the least: (.*?)\. ", text)
        assert takes is not None
        assert added is not None
        sizes = [float(size) for size in re.findall(r"([\d.]+) GiB", added[1])]
        assert sum(sizes) == pytest.approx(float(takes[1]), abs=0.05 * len(sizes) + 0.05)
        assert added[1].startswith("activations ")
    assert not (tmp_path / "runs").exists()


def test_a_running_cluster_has_this_machines_devices_or_unknown_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(config_folder(tmp_path / "8b", QWEN_8B), devices=2)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found: list[Device | None] = [H200]
    monkeypatch.setattr(mesh_choice, "found_device", lambda kind: found[0])

    chosen, choice = with_chosen_mesh(recipe)
    assert chosen.placement.policy == section_of(MeshSizes(tensor=2))
    assert choice.text.endswith("Nodes of the Ray cluster are taken to be like this machine.")
    for found[0] in (None, device_named("CPU")):
        chosen, choice = with_chosen_mesh(recipe)
        assert chosen.placement.policy == section_of(MeshSizes(shard=2))
        assert "not known here" in choice.text
    assert with_chosen_mesh(recipe, device=H200)[1].sizes == MeshSizes(tensor=2)  # named with --device


def test_the_run_folder_keeps_the_reason_as_long_as_the_axes(tmp_path: Path) -> None:
    auto = recipe_of(save_tiny_folder(tmp_path / "model"), task=tmp_path / "tasks.jsonl")
    reason = "placement.policy: auto is {replicate: 1, shard: 8, tensor: 1}: " + "because of this and that, " * 12
    recipe = with_sizes(auto, MeshSizes(shard=8))
    run = RunFolder.create(recipe, mesh_reason=reason)

    def comment() -> str:
        lines = run.recipe_file.read_text(encoding="utf-8").splitlines()
        return " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))

    assert comment() == reason.strip()
    assert run.recipe() == recipe
    run.write_recipe(recipe.model_copy(update={"steps": 9}))  # as a resume does
    assert comment() == reason.strip()
    assert run.recipe().steps == 9
    run.write_recipe(with_sizes(recipe, MeshSizes(replicate=8)))
    assert comment() == ""


def test_a_stage_goes_on_with_the_axes_that_it_began_with(tmp_path: Path) -> None:
    """The planner would choose others now."""
    stage = {
        "program": "sft", "data": {"train": str(write_chats(tmp_path / "rows.jsonl", count=4)), "max_length": 64},
        "model": str(save_tiny_folder(tmp_path / "model")), "optimizer": {"lr": 1}, "steps": 2, "tokens_per_step": 64,
        "placement": {"devices": 4, "policy": "auto"},
    }  # fmt: skip
    recipe = parse_pipeline(
        {"program": "pipeline", "stages": {"only": stage}, "run": {"name": "p", "folder": str(tmp_path / "runs")}}
    )
    now, trained = [MeshSizes(shard=4)], list[MeshSizes]()

    def prepared(each: Recipe) -> Prepared:
        return Prepared(recipe=with_sizes(each, now[0]), model=tmp_path / "model", mesh_reason="the planner says so")

    def began(each: Prepared) -> Any:
        run = RunFolder.create(each.recipe, lineage=each.lineage(), mesh_reason=each.mesh_reason)
        (run.checkpoints / "step-00000001").mkdir()
        raise KeyboardInterrupt

    def resumed(each: Prepared, run: RunFolder) -> Any:
        trained.append(each.recipe.placement.mesh_sizes)
        raise KeyboardInterrupt

    verbs = Verbs(prepare=prepared, train=began, resume=resumed, export=lambda run, out: 0)
    for now[0] in (MeshSizes(shard=4), MeshSizes(replicate=4)):
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(recipe, PipelineFolder.at(recipe), verbs)
    assert trained == [MeshSizes(shard=4)]


@pytest.mark.slow
def test_a_resumed_run_does_not_ask_the_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, task = save_tiny_folder(tmp_path / "model"), write_prompts(tmp_path / "tasks.jsonl", 4)
    recipe = recipe_of(model, task=task, devices=1, device="cpu", launcher="inline", threads=1, onednn=False)
    few = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4}
    recipe = recipe.model_copy(update={"steps": 1, "rollout": recipe.rollout.model_copy(update=few)})
    folder = api.train(recipe).folder
    before = RunFolder.open(folder).recipe().placement.policy
    assert before == section_of(MeshSizes())
    assert (folder / "recipe.yaml").read_text(encoding="utf-8").startswith("# placement.policy: auto is {")

    def other(*_: object) -> MeshChoice:
        raise AssertionError("the run has its axes")

    monkeypatch.setattr(mesh_choice, "choose_mesh", other)
    assert api.resume(folder, overrides=["steps=2"]).step == 2
    assert RunFolder.open(folder).recipe().placement.policy == before
    assert (folder / "recipe.yaml").read_text(encoding="utf-8").startswith("# placement.policy: auto is {")
