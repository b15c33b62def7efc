# SPDX-License-Identifier: Apache-2.0
"""The first part of a controlled run's start-up: starts a local Ray in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from podium.cluster import RayCluster
from podium.cluster.local_ray import LocalRay, is_connected
from podium.observe import Console, StartUpLog
from podium.recipe import OnPolicyRecipe
from podium.roles.interfaces import IMPLEMENTATIONS, Generator, Learner

# Modules of the roles that every run has. Modules of other roles add little import time.
_PRELOAD = tuple(IMPLEMENTATIONS[role].partition(":")[0] for role in (Learner, Generator))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """The run's console, where start-up is reported, and the Ray that is already starting."""

    console: Console
    tell: Callable[[str], object] = lambda what: None
    ray: LocalRay | None = None


def ray_settings(recipe: OnPolicyRecipe) -> RayCluster:
    """The Ray settings of a recipe."""
    placement = recipe.placement
    return RayCluster(
        heartbeat_timeout_s=placement.heartbeat_timeout_s, preload=_PRELOAD if placement.fork_workers else ()
    )


@contextmanager
def early_start(recipe: OnPolicyRecipe, console: Console) -> Iterator[StartUp]:
    """Starts a local Ray in the background if the run needs one. Stops it if the run does not use it."""
    if recipe.placement.launcher == "inline":
        yield StartUp(console=console)
        return
    tell, settings = StartUpLog(console), ray_settings(recipe)
    if settings.running_address is not None or is_connected():
        tell("reading the files of the recipe")
        yield StartUp(console=console, tell=tell)
        return
    tell("starting Ray")
    local = LocalRay(settings)
    try:
        yield StartUp(console=console, tell=tell, ray=local)
    finally:
        local.stop()
