# SPDX-License-Identifier: Apache-2.0
"""Options of a recipe that save memory for time, and the first of them with which a run fits. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from podium.planning.devices import Device
from podium.planning.memory import gib, memory_of
from podium.recipe import Recipe
from podium.recipe.schema import ActivationCheckpointing

_STRONGER: tuple[ActivationCheckpointing, ...] = ("none", "selective", "all_but_attention", "layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOption:
    """Keys of the recipe that save memory."""

    checkpointing: ActivationCheckpointing
    offload_activations: bool = False
    offload_optimizer: bool = False

    def applied(self, recipe: Recipe) -> Recipe:
        """The recipe with these keys."""
        model = recipe.model.model_copy(
            update={"activation_checkpointing": self.checkpointing, "offload_activations": self.offload_activations}
        )
        optimizer = recipe.optimizer.model_copy(update={"offload": self.offload_optimizer})
        return recipe.model_copy(update={"model": model, "optimizer": optimizer})

    def keys(self, recipe: Recipe) -> list[str]:
        """The keys whose values differ from the recipe's, as they are written."""
        model, optimizer = recipe.model, recipe.optimizer
        keys = []
        if self.checkpointing != model.activation_checkpointing:
            keys.append(f"model.activation_checkpointing: {self.checkpointing}")
        if self.offload_activations != model.offload_activations:
            keys.append("model.offload_activations: true")
        if self.offload_optimizer != optimizer.offload:
            keys.append("optimizer.offload: true")
        return keys


def fitting_option(recipe: Recipe, device: Device) -> str | None:
    """The option that costs least time of those with which the run fits, with the memory it then takes; None: none."""
    for option in _options(recipe, device):
        plan = memory_of(option.applied(recipe), device)
        if plan.share <= 1.0:
            return f"{' and '.join(option.keys(recipe))} (about {gib(plan.peak.num_bytes)})"
    return None


def _options(recipe: Recipe, device: Device) -> Iterator[MemoryOption]:
    """From the fastest to the slowest. What the recipe has already stays."""
    model, offloads = recipe.model, recipe.optimizer.offload
    begin = _STRONGER.index(model.activation_checkpointing)
    stages = [(each, model.offload_activations) for each in _STRONGER[begin:]]
    if device.kind == "cuda":
        stages.append(("layers", True))
    states = [offloads] if offloads or device.kind != "cuda" else [False, True]
    for offload in states:
        for checkpointing, offload_activations in stages:
            option = MemoryOption(
                checkpointing=checkpointing, offload_activations=offload_activations, offload_optimizer=offload
            )
            if option.keys(recipe):
                yield option
