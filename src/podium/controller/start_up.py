# SPDX-License-Identifier: Apache-2.0
"""The first part of a controlled run's start-up: starts a local Ray in the background, or attaches to the one that
another controller of the same command has left."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from podium.cluster import RayCluster
from podium.cluster.local_ray import LocalRay, is_connected
from podium.observe import Console, StartUpLog
from podium.recipe import OnPolicyRecipe
from podium.roles.interfaces import IMPLEMENTATIONS, Generator, Learner
from podium.runs.supervised import SUPERVISION, KeptRay

# Modules of the roles that every run has. Modules of other roles add little import time.
_PRELOAD = tuple(IMPLEMENTATIONS[role].partition(":")[0] for role in (Learner, Generator))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """The run's console, where start-up is reported, and the Ray that is already starting."""

    console: Console
    tell: Callable[[str], object] = lambda what: None
    ray: LocalRay | None = None
    left: KeptRay | None = None  # what another controller has left: its Ray, with workers or with parts of them
    kept_as: str | None = None  # of a running Ray: namespace of workers that outlive this process

    @property
    def has_workers(self) -> bool:
        """Whether another controller has left all of its workers."""
        return self.left is not None and self.left.is_ready

    def built_with(self, resume_step: int | None) -> int | None:
        """The step with which the learners were built, or will be: `resume_step`, unless they are there already."""
        return self.left.resume_step if self.left is not None and self.left.is_ready else resume_step


def ray_settings(recipe: OnPolicyRecipe) -> RayCluster:
    """The Ray settings of a recipe."""
    placement = recipe.placement
    return RayCluster(
        heartbeat_timeout_s=placement.heartbeat_timeout_s, preload=_PRELOAD if placement.fork_workers else ()
    )


@contextmanager
def early_start(recipe: OnPolicyRecipe, console: Console, left: KeptRay | None = None) -> Iterator[StartUp]:
    """Starts a local Ray in the background if the run needs one, or attaches to the one that is `left`. Stops it if the
    run does not use it. Under a supervisor that starts the run again, its processes do not end with this one."""
    if recipe.placement.launcher == "inline":
        yield StartUp(console=console)
        return
    tell, settings = StartUpLog(console), ray_settings(recipe)
    supervision = SUPERVISION.get()
    is_kept = supervision is not None and supervision.has_begun
    if settings.running_address is not None or is_connected():
        tell("reading the files of the recipe")
        kept_as = None
        if is_kept and not is_connected():
            kept_as = f"podium-{secrets.token_hex(8)}" if left is None else left.namespace
        try:
            yield StartUp(console=console, tell=tell, left=left, kept_as=kept_as)
        finally:
            if supervision is not None:
                supervision.keeps(None)
        return
    tell("attaching to Ray" if left is not None else "starting Ray")
    local = LocalRay(settings, supervisor=os.getppid() if is_kept else None, attach_to=left)
    try:
        yield StartUp(console=console, tell=tell, ray=local, left=left)
    finally:
        if supervision is not None:
            supervision.keeps(None)
        local.stop()
