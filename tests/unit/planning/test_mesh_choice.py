# SPDX-License-Identifier: Apache-2.0
"""placement.policy: auto. Memory decides first, then collectives and the optimizer; a run says and saves the choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from helpers.made_batches import on_policy_recipe
from helpers.model_shapes import LLAMA_70B, QWEN3_235B, TINY_LLAMA, config_folder, dry_recipe
from helpers.tiny import save_tiny_folder, write_chats
from podium.cli import app
from podium.errors import RecipeError
from podium.execution import prepare
from podium.planning import mesh_choice
from podium.planning.collectives import Collective, seconds_of, step_collectives
from podium.planning.devices import Device, device_named
from podium.planning.fixed_data_plans import fixed_data_step, plan_fixed_data
from podium.planning.memory import TOLERANCE, memory_of, refusal
from podium.planning.mesh_choice import choose_mesh, with_chosen_mesh
from podium.planning.model_shape import shape_of
from podium.recipe import SpmdRecipe, dump_recipe, parse_recipe
from podium.recipe.policy_mesh import MeshSizes, PolicyMeshSection, section_of

H100, H200 = device_named("H100"), device_named("H200")
LONG = {"data": {"train": "rows.jsonl", "max_length": 8192}, "micro_batch_tokens": 8192}


def llama(tmp_path: Path, devices: int, policy: object = "auto", tokens: int = 1 << 22) -> SpmdRecipe:
    folder = config_folder(tmp_path / "llama", LLAMA_70B)
    return dry_recipe(folder, devices, policy, tokens_per_step=tokens, **LONG)


def test_the_smallest_tensor_axis_that_fits(tmp_path: Path) -> None:
    """8,192 tokens of a 70B keep some 150 GiB of activations: two ranks that share them fit a B200, four an H200."""
    recipe = llama(tmp_path, 64)
    tensors = {}
    for device in (device_named("B200"), H200):
        choice = choose_mesh(recipe, device)
        tensors[device.name] = choice.sizes.tensor
        assert choice.sizes.devices == 64
        assert "With a tensor axis below" in choice.text
        for tensor in (size for size in (1, 2, 4) if size < choice.sizes.tensor):
            smaller = llama(tmp_path, 64, {"tensor": tensor})
            assert memory_of(smaller, device).share > 1 - TOLERANCE
        placed = llama(tmp_path, 64, {"replicate": choice.sizes.replicate, "tensor": choice.sizes.tensor})
        assert memory_of(placed, device).share <= 1 - TOLERANCE
    assert tensors == {"B200": 2, "H200": 4}


def test_among_shapes_that_fit_collectives_and_optimizer_decide(tmp_path: Path) -> None:
    recipe = llama(tmp_path, 64)
    chosen = choose_mesh(recipe, H200).sizes
    shapes = [MeshSizes(replicate=16 // shard, shard=shard, tensor=4) for shard in (1, 2, 4, 8, 16)]
    steps = [fixed_data_step(llama(tmp_path, 64, {"replicate": each.replicate, "tensor": 4}), H200) for each in shapes]
    fitting = [step for step in steps if step.memory.share <= 1 - TOLERANCE]

    best = min(fitting, key=lambda step: step.moved_s + step.parts["optimizer"])
    assert len(fitting) > 1
    assert chosen == best.sizes
    assert choose_mesh(recipe, H200) == choose_mesh(recipe, H200)


def test_experts_and_other_machines_bound_the_tensor_axis(tmp_path: Path) -> None:
    for num_experts, tensor in ((128, 4), (126, 2)):  # of the sizes that divide the 4 key-value heads
        folder = config_folder(tmp_path / f"{num_experts} experts", {**QWEN3_235B, "num_experts": num_experts})
        experts = dry_recipe(folder, 256, "auto", tokens_per_step=1 << 22, **LONG)
        assert choose_mesh(experts, H200).sizes.tensor == tensor
    pairs = replace(H200, per_machine=2)
    assert choose_mesh(llama(tmp_path, 64), pairs).sizes.tensor <= 2


def test_products_in_fp8_have_no_tensor_axis(tmp_path: Path) -> None:
    recipe = llama(tmp_path, 64)
    model = recipe.model.model_copy(update={"fp8": True})
    assert choose_mesh(recipe.model_copy(update={"model": model}), H200).sizes.tensor == 1


def test_what_fits_nowhere_is_refused_with_the_shape_that_takes_least(tmp_path: Path) -> None:
    recipe = llama(tmp_path, 8, tokens=1 << 17)
    small = device_named("H100:20")
    choice = choose_mesh(recipe, small)

    assert "takes the least" in choice.text
    assert (choice.sizes.replicate, choice.sizes.devices) == (1, 8)
    problem = refusal(memory_of(recipe, small), recipe)
    assert problem is not None
    assert "cannot fit" in str(problem)


def test_a_plan_says_what_it_chooses(tmp_path: Path) -> None:
    plan = plan_fixed_data(llama(tmp_path, 64), H200, (32, 128), 10)
    lines = plan.lines()

    assert "tensor: 4}" in lines[0]
    assert lines[1].startswith("  placement.policy: auto is {")
    assert [each["devices"] for each in plan.values["choices"]] == [32, 128]
    assert all(each["mesh"]["tensor"] >= 4 for each in plan.values["choices"])


def test_a_run_is_prepared_with_axes_in_place_of_auto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {
        "program": "sft", "model": str(save_tiny_folder(tmp_path / "model")),
        "data": {"train": str(write_chats(tmp_path / "chats.jsonl"))}, "tokens_per_step": 64,
        "optimizer": {"lr": 1e-5}, "steps": 3, "run": {"name": "a", "folder": str(tmp_path / "runs")},
        "placement": {"devices": 2, "policy": "auto", "device": "cpu"},
    }  # fmt: skip
    prepared = prepare(parse_recipe(values)).recipe

    assert isinstance(prepared, SpmdRecipe)
    assert isinstance(prepared.placement.policy, PolicyMeshSection)
    sizes = prepared.placement.policy.sizes(2)
    assert f"placement.policy: auto is {sizes}" in " ".join(capsys.readouterr().out.split())
    assert yaml.safe_load(dump_recipe(prepared))["placement"]["policy"] == section_of(sizes).model_dump()


def test_devices_that_are_not_known_here_all_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = dry_recipe(config_folder(tmp_path / "m", TINY_LLAMA), 8, "auto")
    found: list[Device | None] = [None]
    monkeypatch.setattr(mesh_choice, "found_device", lambda kind: found[0])

    chosen, choice = with_chosen_mesh(recipe)
    assert chosen.placement.policy == PolicyMeshSection(shard=8)
    assert "does not know this machine's GPU" in choice.text
    found[0] = H200
    chosen, _ = with_chosen_mesh(recipe, world=16)  # ranks of torchrun
    assert chosen.placement.devices == 16
    assert isinstance(chosen.placement.policy, PolicyMeshSection)
    assert chosen.placement.policy.sizes(16).devices == 16
    on_ray = recipe.model_copy(update={"placement": recipe.placement.model_copy(update={"launcher": "ray"})})
    assert "devices of other machines" in with_chosen_mesh(on_ray)[1].text


def test_time_of_collectives_by_the_link_of_their_group() -> None:
    """450 GB/s within a machine of 8, 50 GB/s of each device beyond; an all-reduce sends everything twice."""
    within = Collective(kind="all-gather", axis="shard", ranks=4, span=8, calls=1, num_bytes=900 * 10**9)
    beyond = replace(within, kind="all-reduce", axis="replicate", ranks=2, span=16, num_bytes=100 * 10**9)
    waited = replace(within, axis="tensor", ranks=2, span=2)
    pairs = replace(within, ranks=16, span=64)  # two ranks of the group on each of 8 machines
    tokens = replace(within, kind="all-to-all", axis="experts", ranks=16, span=16)  # half of it to the other machine

    assert within.seconds(H200) == pytest.approx(900 * 3 / 4 / 450)
    assert beyond.seconds(H200) == pytest.approx(2 * 100 / 2 / 50)
    assert pairs.seconds(H200) == pytest.approx(900 * 15 / 16 / (2 * 50))
    assert tokens.seconds(H200) == pytest.approx(900 / 2 / 50)
    assert seconds_of([within, beyond, waited], H200) == pytest.approx((1.0, 1.5 + 2.0))
    assert seconds_of([tokens, replace(within, axis="expert_shard")], H200) == pytest.approx((9.0, 1.5))


def test_more_shards_than_rows_gather_padding(tmp_path: Path) -> None:
    """128 experts over 256 ranks: each rank sends a whole expert or padding as large, twice what there is."""
    shape = shape_of(dry_recipe(config_folder(tmp_path / "experts", QWEN3_235B), 256, None).model)
    whole, padded = (
        next(
            each.num_bytes
            for each in step_collectives(shape, MeshSizes(shard=ranks), passes=1, tokens=1, itemsize=2)
            if each.kind == "reduce-scatter"
        )
        for ranks in (128, 256)
    )
    assert padded / whole > 1.9


def test_a_dry_run_is_of_a_recipe_on_fixed_data_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(dump_recipe(dry_recipe(config_folder(tmp_path / "m", TINY_LLAMA), 8, None)), encoding="utf-8")
    refused = CliRunner().invoke(app, ["plan", str(file), "--dry-run", "--devices", "16"])
    assert refused.exit_code == 2
    assert "leave out --devices" in " ".join(refused.output.replace("│", " ").split())
    file.write_text(dump_recipe(on_policy_recipe()), encoding="utf-8")
    with pytest.raises(RecipeError, match="a dry run is of programs on fixed data, and grpo generates"):
        CliRunner().invoke(app, ["plan", str(file), "--dry-run"], catch_exceptions=False)
