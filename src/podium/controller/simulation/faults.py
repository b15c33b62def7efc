# SPDX-License-Identifier: Apache-2.0
"""Deaths of workers for simulated runs: random ones from a seed, and the shortest part of them that still shows a
fault. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from podium.controller.layout import GRADERS, ROLLOUT, TRAIN, num_learners
from podium.controller.simulation.controlled import SimulatedDeath
from podium.recipe import OnPolicyRecipe


def random_deaths(recipe: OnPolicyRecipe, *, seconds: float, most: int, seed: int) -> tuple[SimulatedDeath, ...]:
    """Up to `most` deaths of learners, generators and graders within the first `seconds` of a run."""
    rng, placement = Random(seed), recipe.placement
    learners = num_learners(recipe)
    slots = [(TRAIN, slot) for slot in range(learners)]
    slots += [(ROLLOUT, slot) for slot in range(placement.devices - learners)]
    slots += [(GRADERS, slot) for slot in range(recipe.grading.workers)]
    pools = sorted({pool for pool, _ in slots})
    deaths = []
    for _ in range(rng.randint(1, most)):
        pool = rng.choice(pools)
        _, slot = rng.choice([each for each in slots if each[0] == pool])
        deaths.append(SimulatedDeath(at_s=rng.uniform(0.0, seconds), pool=pool, slot=slot))
    return tuple(sorted(deaths, key=lambda each: each.at_s))


def shortest(
    deaths: Sequence[SimulatedDeath], fails: Callable[[Sequence[SimulatedDeath]], bool]
) -> tuple[SimulatedDeath, ...]:
    """A part of these deaths with which a run still fails, and without any of which it does not."""
    left = list(deaths)
    position = 0
    while position < len(left):
        fewer = left[:position] + left[position + 1 :]
        if fails(fewer):
            left = fewer
        else:
            position += 1
    return tuple(left)
