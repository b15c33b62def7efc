# SPDX-License-Identifier: Apache-2.0
"""Replaces a generator that died on a device of its own, while the others generate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import assert_never

from podium.cluster.deadlines import now_s
from podium.controller.layout import ROLLOUT, TRAIN
from podium.controller.parts import OnPolicyParts
from podium.controller.recovery import Abort, Death, Respawn, Rewind
from podium.errors import WorkerDiedError
from podium.recipe import OnPolicyRecipe
from podium.roles.episode_stream import EpisodeStream, Lost
from podium.runs.events import append_recovery
from podium.weights.weight_transfers import ByStore

# The new process waits for a place, imports and loads the model.
_REPLACE_S = 600.0


def is_replaceable(parts: OnPolicyParts[OnPolicyRecipe]) -> bool:
    """Whether a generator of this run can be replaced while the others generate: it has a device of its own, and its
    sequences are episodes. Requests of episode runners are not: the run goes back to its last committed step."""
    return ROLLOUT in parts.workers.pools and parts.roles.runner is None


async def replace_generator(
    parts: OnPolicyParts[OnPolicyRecipe], stream: EpisodeStream, lost: Lost, weights: Callable[[], Awaitable[ByStore]],
    *, step: int,
) -> int:  # fmt: skip
    """Starts another generator, gives it weights and opens its stream. Returns their version. Raises the error if that
    is not to be, if it dies too often, or if a learner died, which is no death of a generator."""
    error, began_s, console = lost.error, now_s(), parts.log.console
    while True:
        death = Death(part="generator", cause=str(error).splitlines()[0], others_go_on=True)
        match parts.recovery.decide(death):
            case Respawn():
                console.warning(f"{death.cause} It is replaced, and its episodes are run again.")
            case Rewind() | Abort():
                raise error
            case other:
                assert_never(other)
        try:
            # Links would be formed by workers that are busy with their streams.
            await parts.workers.recover(ROLLOUT, renews_links=False, deadline_s=_REPLACE_S)
            transfer = await weights()
            if parts.recipe.model.lora is not None:
                await parts.roles.generator.check_base_on(lost.rank, await parts.roles.policy.describe_base())
            await parts.roles.generator.install_in_flight(lost.rank, transfer, "recompute")
        except WorkerDiedError as again:
            if parts.workers.is_damaged(TRAIN):  # without a learner there are no weights to give
                raise
            error = again
            continue
        stream.begin([lost.rank])
        seconds = now_s() - began_s
        append_recovery(
            parts.folder.path, part="generator", cause=death.cause, remedy="respawn", step=step, seconds=seconds
        )
        console.note(f"the generator is back after {seconds:.1f} s")
        return transfer.version.number
