# SPDX-License-Identifier: Apache-2.0
"""`rollout.adapter: auto`: whether generators compute with the adapter merged into its base. Torch-free.

Merged weights take memory that the KV cache would have, so they must leave it most of its size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from podium.errors import PodiumError
from podium.planning.devices import Device, found_device
from podium.planning.memory import TOLERANCE, MemoryPlan, gib, memory_of
from podium.recipe import OnPolicyRecipe

KEY = "rollout.adapter: auto"
# Of its size with the adapter apart, the least that the KV cache may have.
_LEAST_CACHE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterChoice:
    """What generators compute with, and a sentence that says why."""

    adapter: Literal["merged", "apart"]
    text: str


def choose_adapter(recipe: OnPolicyRecipe, device: Device) -> AdapterChoice:
    """The choice for a recipe with an adapter on such devices. Raises UnsupportedModelError where the shape of a model
    is not known."""
    if device.kind != "cuda":
        return _apart("merged weights are for GPUs")
    if recipe.placement.generator_tensor > 1:
        return _apart("merged weights are whole on one device, and generators are divided over several")
    merged, apart = (_plan(recipe, device, adapter) for adapter in ("merged", "apart"))
    size = gib(max(phase.of("merged weights") for phase in merged.phases))
    for phase in merged.phases:
        # Generation may be closer: its KV cache takes a share of what the rest leaves.
        limit = 1.0 if phase.phase == "rollout" else 1.0 - TOLERANCE
        if phase.num_bytes > limit * device.memory_bytes:
            return _apart(
                f"with {size} of merged weights, the {phase.phase} takes {gib(phase.num_bytes)} of "
                f"{gib(device.memory_bytes)}"
            )
    cache, whole = _cache_tokens(merged), _cache_tokens(apart)
    if cache < _LEAST_CACHE * whole:
        return _apart(f"{size} of merged weights would leave a KV cache of {cache} tokens, of {whole} without them")
    return AdapterChoice(
        adapter="merged", text=f"{KEY} is merged: its weights take {size}, and the KV cache has {cache} tokens"
    )


def with_chosen_adapter(recipe: OnPolicyRecipe, *, is_here: bool) -> tuple[OnPolicyRecipe, str]:
    """The recipe with a choice in place of `auto`, and why. `is_here`: the run has devices of this machine only."""
    device = found_device(recipe.placement.device)
    if not is_here:
        choice = _apart("the run has devices of a Ray cluster, whose memory is not known here")
    elif device is None:
        choice = _apart("the planner does not know this machine's GPU")
    else:
        try:
            choice = choose_adapter(recipe, device)
        except PodiumError as error:  # an architecture that the planner does not know
            choice = _apart(str(error))
    return _with(recipe, choice.adapter), choice.text


def adapter_facts(recipe: OnPolicyRecipe, device: Device) -> list[str]:
    """What a plan says of the choice; nothing where the recipe has made it, or has no adapter."""
    if recipe.model.lora is None or recipe.rollout.adapter != "auto":
        return []
    return [choose_adapter(recipe, device).text]


def _plan(recipe: OnPolicyRecipe, device: Device, adapter: str) -> MemoryPlan:
    return memory_of(_with(recipe, adapter), device)


def _with(recipe: OnPolicyRecipe, adapter: str) -> OnPolicyRecipe:
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"adapter": adapter})})


def _cache_tokens(plan: MemoryPlan) -> int:
    return 0 if plan.engine is None else plan.engine.cache_tokens


def _apart(reason: str) -> AdapterChoice:
    return AdapterChoice(adapter="apart", text=f"{KEY} is apart: {reason}")
