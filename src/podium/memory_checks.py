# SPDX-License-Identifier: Apache-2.0
"""Compares what a run needs of memory with what its device has: for `podium check`, and before `podium train`.
Torch-free."""

from __future__ import annotations

import os

from podium.recipe import OnPolicyRecipe, Recipe


def devices_per_machine(recipe: Recipe, device: str | None = None) -> int | None:
    """Number of devices that one machine of the run has. `device`: its name; default: what this machine has. None:
    nothing is known of it, or it has cores, whose number differs."""
    from podium.planning.devices import device_named, found_device

    found = found_device(recipe.placement.device) if device is None else device_named(device)
    return None if found is None or found.kind == "cpu" else found.per_machine


def memory_report(recipe: Recipe, device: str | None = None) -> list[str]:
    """The axes that the planner chooses for placement.policy: auto, and what the run takes of its device's memory.
    Raises an error if it cannot fit. `device`: its name; default: what this machine has. Nothing is known of a GPU that
    is asked for and not here."""
    from podium.planning.devices import device_named, found_device
    from podium.planning.memory import memory_lines

    found = found_device(recipe.placement.device) if device is None else device_named(device)
    lines, choice = list[str](), None
    if recipe.placement.policy == "auto":
        from podium.planning.mesh_choice import with_chosen_mesh

        recipe, choice = with_chosen_mesh(recipe, device=None if device is None else found)
        lines.append(choice.text)
    return lines if found is None else [*lines, *memory_lines(recipe, found, choice)]


def refuse_what_cannot_fit(recipe: Recipe) -> None:
    """Raises an error if a run on this machine cannot fit its memory, as `podium check` does. Says nothing where the
    model or the device is not known, or where the run has devices of a Ray cluster or of torchrun."""
    from podium.planning.devices import found_device
    from podium.planning.memory import BEGIN_ANYHOW, memory_of, refusal

    if runs_elsewhere(recipe):
        return
    device = found_device(recipe.placement.device)
    if device is None:
        return
    if device.kind == "cpu" and recipe.placement.devices > (os.cpu_count() or 1):
        return  # refused for that, which is the better reason
    try:
        choice = None
        if recipe.placement.policy == "auto":
            from podium.planning.mesh_choice import with_chosen_mesh

            recipe, choice = with_chosen_mesh(recipe)
        problem = refusal(memory_of(recipe, device), recipe, BEGIN_ANYHOW, choice)
    except Exception:  # an unknown architecture, or a config that the planner cannot read: the run says what it needs
        return
    if problem is not None:
        raise problem


def runs_elsewhere(recipe: Recipe) -> bool:
    """Whether other machines than this one may take part."""
    from podium.spmd.launch import place_under_torchrun

    if place_under_torchrun() is not None:
        return True
    launcher = recipe.placement.launcher  # type: ignore[attr-defined]
    if launcher != "ray" and not (launcher == "auto" and isinstance(recipe, OnPolicyRecipe)):
        return False
    from podium.cluster import RayCluster

    return RayCluster().running_address is not None
