# SPDX-License-Identifier: Apache-2.0
"""The last part of a start: lets the workers of a run, which have all started, reach each other. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from podium.cluster import Workers
from podium.controller.layout import LINK, ROLLOUT, RUNNER, RoleNames
from podium.controller.phases import GENERATOR
from podium.errors import StartTimeoutError, WorkerDiedError
from podium.recipe import OnPolicyRecipe
from podium.roles.interfaces import POLICY

# As often as a pool is started.
_STARTS = 3
# Those that live may still wait for a dead one in the link that failed.
_LINK_S, _LINK_AGAIN_S = 60.0, 150.0


async def connect_workers(
    recipe: OnPolicyRecipe, names: RoleNames, workers: Workers, tell: Callable[[str], object] = lambda what: None
) -> None:
    """Opens the channels and the link of a run. Pools start beside each other, and one that stood first may have lost a
    worker while another one loaded its model: those that died are replaced."""
    most = _STARTS * len(workers.pools)
    for attempt in range(1, most + 1):
        try:
            await _replace_dead(workers)
            await _open_channels(recipe, names, workers)
            if recipe.placement.layout != "colocated":
                deadline_s = _LINK_S if attempt == 1 else _LINK_AGAIN_S
                await workers.connect(LINK, [POLICY, GENERATOR], deadline_s=deadline_s)
            return
        except WorkerDiedError as error:
            if attempt == most or isinstance(error, StartTimeoutError):
                raise
            tell(f"{str(error).splitlines()[0]} It is started again.")


async def _replace_dead(workers: Workers) -> None:
    """Starts workers in place of dead ones. Where other generators live the run begins with these, and fills the slots
    of the dead ones later, as it does after a death in one of its steps."""
    if ROLLOUT in workers.pools:
        generators = workers.worker_pool(ROLLOUT)
        if len(generators.dead) < len(generators.present):
            workers.vacate(ROLLOUT, generators.dead)
    for pool in workers.pools:
        await workers.recover(pool, renews_links=False)


async def _open_channels(recipe: OnPolicyRecipe, names: RoleNames, workers: Workers) -> None:
    """Lets episode runners ask generators."""
    if recipe.environment is not None:
        await workers.open_channel(GENERATOR, to=RUNNER)
        if names.lent is not None:
            await workers.open_channel(names.lent, to=RUNNER)
