# SPDX-License-Identifier: Apache-2.0
"""Whether the models of a recipe can be divided as its placement says: over the axes of learners or ranks, and over the
devices of a generator. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from podium.errors import RecipeError
from podium.models import context_plan, expert_plan, tensor_plan
from podium.models.folder import read_config
from podium.recipe import OnPolicyRecipe, Recipe
from podium.recipe.generator_mesh import KEY as GENERATOR_KEY
from podium.recipe.policy_mesh import PolicyMeshSection, nearest


def check_mesh(recipe: Recipe, models: Mapping[str, str]) -> None:
    """That all models can be divided over the axes of placement.policy, and by placement.experts. `models`: path of
    each, by its key."""
    policy = recipe.placement.policy
    if recipe.placement.experts > 1:
        for key, path, config in _text_configs(models):
            _check_experts(recipe, key, path, config)
    if not isinstance(policy, PolicyMeshSection):
        return
    for key, path, config in _text_configs(models):
        if policy.tensor > 1:
            _check_tensor_axis(policy, recipe.placement.training_devices, key, path, config)
        if policy.context > 1:
            reason = context_plan.unsupported_type(str(config.get("model_type")))
            if reason is not None:
                raise RecipeError(f"{context_plan.KEY}: {key}: {reason}")


def check_machines(recipe: Recipe, models: Mapping[str, str], per_machine: int) -> None:
    """That devices which compute every layer together fit one machine of so many devices."""
    policy = recipe.placement.policy
    if isinstance(policy, PolicyMeshSection) and policy.tensor > per_machine:
        sizes = frozenset(range(1, per_machine + 1))
        for _, _, config in _text_configs(models):
            sizes &= tensor_plan.possible_sizes(config, per_machine)
        raise RecipeError(
            f"{tensor_plan.KEY}: {_too_wide(policy.tensor, per_machine)} Use placement.policy "
            f"{nearest(policy, recipe.placement.training_devices, sizes)}."
        )
    if isinstance(recipe, OnPolicyRecipe) and recipe.placement.generator_tensor > per_machine:
        asked = recipe.placement.generator_tensor
        widest = max(size for size in range(1, per_machine + 1) if asked % size == 0)
        raise RecipeError(f"{GENERATOR_KEY}: {_too_wide(asked, per_machine)} Use {widest}.")


def _too_wide(size: int, per_machine: int) -> str:
    return (
        f"{size} devices compute every layer together, so they share a machine, and a machine has {per_machine} "
        "devices here."
    )


def check_generator_mesh(recipe: OnPolicyRecipe) -> None:
    """That so many devices can hold a generator together."""
    size = recipe.placement.generator_tensor
    found = next(_text_configs({"model.path": recipe.model.path}), None)
    if size == 1 or found is None:
        return
    _, path, config = found
    if recipe.rollout.engine == "vllm":  # it copies key-value heads to ranks that would have none
        config = {"num_attention_heads": config.get("num_attention_heads")}
    elif config.get("model_type") not in tensor_plan.MODEL_TYPES:
        raise RecipeError(
            f"{GENERATOR_KEY}: {config.get('model_type')} is not among the architectures that the native engine "
            f"divides ({', '.join(tensor_plan.MODEL_TYPES)}). Remove it, or use rollout.engine vllm."
        )
    left = tensor_plan.undivided(config, size)
    if left:
        placement = recipe.placement
        apart = placement.rollout_devices or placement.devices // (1 if placement.layout == "colocated" else 2)
        if placement.layout == "elastic":
            apart = math.gcd(apart, placement.training_devices)
        fits = [each for each in tensor_plan.possible_sizes(config, apart) if apart % each == 0]
        best = min(fits, key=lambda each: (abs(math.log(each / size)), each))
        raise RecipeError(
            f"{GENERATOR_KEY}: {size} does not divide {' and '.join(left)} of model.path ({path}). Use {best}."
        )


def _check_tensor_axis(policy: PolicyMeshSection, devices: int, key: str, path: str, config: Mapping[str, Any]) -> None:
    reason = tensor_plan.unsupported_type(str(config.get("model_type")))
    if reason is not None:
        raise RecipeError(f"{tensor_plan.KEY}: {key}: {reason}")
    left = tensor_plan.undivided(config, policy.tensor)
    if left:
        fits = nearest(policy, devices, tensor_plan.possible_sizes(config, devices))
        raise RecipeError(
            f"{tensor_plan.KEY}: {policy.tensor} does not divide {' and '.join(left)} of {key} ({path}). Use "
            f"placement.policy {fits}."
        )


def _check_experts(recipe: Recipe, key: str, path: str, config: Mapping[str, Any]) -> None:
    """A dense model beside the trained one is placed as without `experts`."""
    asked, count = recipe.placement.experts, expert_plan.num_experts(config)
    if not count and key == "model.path":
        raise RecipeError(f"{expert_plan.KEY}: {asked} is for mixtures, and {path} has no experts. Remove it.")
    reason = expert_plan.unsupported_type(str(config.get("model_type"))) if count else None
    if reason is not None:
        raise RecipeError(f"{expert_plan.KEY}: {key}: {reason}")
    sizes = recipe.placement.mesh_sizes
    if count % sizes.tensor:  # what refuses the axes names another one
        return
    each = count // sizes.tensor
    if each % asked:
        whose = f"the {count} experts" if sizes.tensor == 1 else f"the {each} experts of a tensor part"
        fits = expert_plan.nearest(asked, each, sizes.sharding)
        raise RecipeError(f"{expert_plan.KEY}: {asked} does not divide {whose} of {key} ({path}). Use {fits}.")


def _text_configs(models: Mapping[str, str]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Key, path and config of each model. A folder without a config is another check's; that of a hub id is read by the
    run, before its first step."""
    for key, path in models.items():
        if (Path(path) / "config.json").is_file():
            config = read_config(Path(path), key)
            yield key, path, config.get("text_config") or config
