# SPDX-License-Identifier: Apache-2.0
"""Faults of simulated runs: random ones from a seed, and the shortest part of them with which a run still fails.
Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from random import Random
from typing import TypeVar, assert_never

from podium.cluster.simulated_faults import (
    NodeFault,
    SimulatedDeath,
    SimulatedDelay,
    SimulatedDrain,
    SimulatedJoin,
    SimulatedLoss,
    SimulatedNodeLoss,
    SimulatedNotice,
    SimulatedSilence,
    WorkerFault,
)
from podium.controller.layout import GRADERS, ROLLOUT, RUNNERS, TRAIN, num_learners
from podium.controller.simulation.costs import SimulatedSlowness
from podium.recipe import OnPolicyRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStop:
    """The user asks the run to stop, as with Ctrl-C: it saves and ends with the step that runs at this time."""

    at_s: float


SimulatedFault = WorkerFault | NodeFault | SimulatedSlowness | SimulatedStop
"""What can happen in a simulated run."""
Fault = TypeVar("Fault")

_KINDS: tuple[type[SimulatedFault], ...] = (
    SimulatedDeath, SimulatedSilence, SimulatedDelay, SimulatedLoss, SimulatedSlowness, SimulatedStop,
)  # fmt: skip
# Longer than the heartbeat timeout, and half the deadline of a start, after which a run ends.
SILENT_AT_START_S = 60.0
# Of a start: before it nothing has been asked for.
_FIRST_S = 0.01


def random_faults(
    recipe: OnPolicyRecipe, *, begin_s: float = 0.0, end_s: float, most: int, seed: int, slots_per_node: int = 1,
    most_deaths: int | None = None,
) -> tuple[SimulatedFault, ...]:  # fmt: skip
    """Up to `most` faults of all kinds between these times of a run, for generators, graders, episode runners and
    learners, with which critics, scorers and reward models share their workers, and for the nodes of generators that
    are apart. Half of the silences are shorter than the heartbeat timeout. Some faults follow
    the one before them closely, so that they come during its recovery. `most_deaths`: of one worker, and of all
    learners together; faults that could make it more are left out."""
    rng = Random(seed)
    slots = _slots(recipe)
    pools = sorted({pool for pool, _ in slots})
    num_nodes = ceil(sum(pool == ROLLOUT for pool, _ in slots) / slots_per_node)
    faults: list[SimulatedFault] = []
    at_s = 0.0
    for _ in range(rng.randint(1, most)):
        follows = bool(faults) and rng.random() < 0.3
        at_s = at_s + rng.uniform(0.0, 5.0) if follows else rng.uniform(begin_s, end_s)
        if num_nodes and rng.random() < 0.3:
            faults.append(_random_change(rng, at_s, rng.randrange(num_nodes)))
            continue
        pool = rng.choice(pools)
        _, slot = rng.choice([each for each in slots if each[0] == pool])
        faults.append(_random_fault(rng, recipe, at_s, pool, slot))
    faults.sort(key=lambda each: each.at_s)
    return tuple(faults if most_deaths is None else with_few_deaths(faults, most_deaths))


def random_start_faults(
    recipe: OnPolicyRecipe, *, end_s: float, most: int, seed: str, slots_per_node: int = 1
) -> tuple[SimulatedFault, ...]:
    """Up to `most` faults in the first seconds of a run, or of a part that is resumed: while its workers start, reach
    each other and get their first weights. Their node is back, and a silent one goes on, before the deadline of a start
    has passed."""
    rng, slots = Random(seed), _slots(recipe)
    pools = sorted({pool for pool, _ in slots})
    num_nodes = ceil(sum(pool == ROLLOUT for pool, _ in slots) / slots_per_node)
    faults: list[SimulatedFault] = []
    for _ in range(rng.randint(1, most)):
        at_s = rng.uniform(_FIRST_S, end_s)
        pool = rng.choice(pools)
        _, slot = rng.choice([each for each in slots if each[0] == pool])
        if num_nodes and rng.random() < 0.2:
            seconds = rng.choice((0.0, 5.0, 20.0))
            faults.append(SimulatedNodeLoss(at_s=at_s, node=rng.randrange(num_nodes), seconds=seconds))
            continue
        fault = _random_fault(rng, recipe, at_s, pool, slot)
        if isinstance(fault, SimulatedSilence):
            fault = replace(fault, seconds=min(fault.seconds, SILENT_AT_START_S))
        faults.append(fault)
    return tuple(sorted(faults, key=lambda each: each.at_s))


def with_few_deaths(faults: Sequence[SimulatedFault], most: int) -> Iterator[SimulatedFault]:
    """Those that leave it at so many deaths of one worker. A generator that has moved is on another node, so that the
    fault of a node may be the death of any of them."""
    deaths, of_nodes = Counter[tuple[str, int]](), 0
    for fault in faults:
        match fault:
            case SimulatedNodeLoss() | SimulatedDrain():
                if max((count for (pool, _), count in deaths.items() if pool == ROLLOUT), default=0) + of_nodes < most:
                    of_nodes += 1
                    yield fault
            case SimulatedDeath() | SimulatedSilence() | SimulatedDelay() | SimulatedLoss() | SimulatedNotice():
                # Replies that are late for long may be the death of a worker, and of the one after it.
                place = fault.pool, 0 if fault.pool == TRAIN else fault.slot
                count = 2 if isinstance(fault, SimulatedDelay) else 1
                if deaths[place] + count + (of_nodes if fault.pool == ROLLOUT else 0) <= most:
                    deaths[place] += count
                    yield fault
            case SimulatedJoin() | SimulatedSlowness() | SimulatedStop():
                yield fault
            case other:
                assert_never(other)


def _slots(recipe: OnPolicyRecipe) -> list[tuple[str, int]]:
    learners = num_learners(recipe)
    generators = (recipe.placement.devices - learners) // recipe.placement.generator_tensor
    return [
        *((TRAIN, slot) for slot in range(learners)),
        *((ROLLOUT, slot) for slot in range(generators)),
        *((GRADERS, slot) for slot in range(recipe.grading.workers)),
        *((RUNNERS, slot) for slot in range(0 if recipe.environment is None else recipe.environment.runners)),
    ]


def _random_fault(rng: Random, recipe: OnPolicyRecipe, at_s: float, pool: str, slot: int) -> SimulatedFault:
    kind = rng.choices(_KINDS, weights=(4, 2, 2, 2, 2, 1))[0]
    if kind is SimulatedSilence:
        timeout_s = recipe.placement.heartbeat_timeout_s
        silent_s = rng.uniform(0.0, timeout_s) if rng.random() < 0.5 else 10.0 * timeout_s
        return SimulatedSilence(at_s=at_s, pool=pool, slot=slot, seconds=silent_s)
    if kind is SimulatedDelay:
        late_s = rng.choice((0.01, 0.5, 3.0, 20.0))
        return SimulatedDelay(at_s=at_s, pool=pool, slot=slot, seconds=rng.uniform(0.0, 20.0), late_s=late_s)
    if kind is SimulatedLoss:
        return SimulatedLoss(at_s=at_s, pool=pool, slot=slot)
    if kind is SimulatedSlowness:
        factor = rng.choice((2.0, 5.0, 20.0))
        return SimulatedSlowness(at_s=at_s, pool=pool, slot=slot, seconds=rng.uniform(1.0, 30.0), factor=factor)
    if kind is SimulatedStop:
        return SimulatedStop(at_s=at_s)
    return SimulatedDeath(at_s=at_s, pool=pool, slot=slot)


def _random_change(rng: Random, at_s: float, number: int) -> SimulatedFault:
    """A generator leaves, or a node with one is drained or dies or joins."""
    grace_s, seconds = rng.choice((0.1, 2.0, 30.0)), rng.choice((0.0, 5.0, 30.0, 200.0))
    match rng.randrange(4):
        case 0:
            return SimulatedNotice(at_s=at_s, pool=ROLLOUT, slot=number, grace_s=grace_s)
        case 1:
            return SimulatedNodeLoss(at_s=at_s, node=number, seconds=seconds)
        case 2:
            return SimulatedDrain(at_s=at_s, node=number, grace_s=grace_s, seconds=seconds)
        case _:
            return SimulatedJoin(at_s=at_s)


def shortest(faults: Sequence[Fault], fails: Callable[[Sequence[Fault]], bool]) -> tuple[Fault, ...]:
    """A part of these faults with which a run still fails, and without any of which it does not."""
    left = list(faults)
    position = 0
    while position < len(left):
        fewer = left[:position] + left[position + 1 :]
        if fails(fewer):
            left = fewer
        else:
            position += 1
    return tuple(left)
