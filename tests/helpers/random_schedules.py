# SPDX-License-Identifier: Apache-2.0
"""Schedules from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from helpers.resumed_schedules import ResumedWorld
from helpers.schedules import Costs
from podium.controller.schedule_audit import ScheduleAudit
from podium.controller.scheduler import GroupScheduler
from podium.controller.scheduling import ScheduleSettings


def random_world(seed: int, *, lends: bool = False, most_cost: int | None = None, resumes: bool = True) -> ResumedWorld:
    """A small schedule: every size, cost and mishap is random, and so are saves, stops and kills. `lends`: the
    learner's devices generate too. `most_cost`: of a decision; default: enough for all there is to do. `resumes`:
    whether any run is killed or resumed."""
    rng = random.Random(seed)
    settings = ScheduleSettings(
        steps=rng.randint(1, 6),
        groups_per_step=rng.randint(1, 5),
        samples=rng.randint(1, 3),
        staleness=rng.choice([0, 0, 1, 2, 4]),
        on_new_weights=rng.choice(["keep", "recompute"] if lends else ["finish", "keep", "recompute"]),
        replaces_uniform=rng.random() < 0.4,
        max_replaced=rng.randint(0, 12),
        lends=lends,
    )
    costs = Costs(
        rng,
        length_s=rng.choice([0.1, 1.0, 3.0]),
        spread=rng.choice([0.0, 0.5, 1.5]),
        grade_s=rng.choice([0.0, 0.3, 2.0]),
        update_s=rng.choice([0.1, 1.0, 4.0]),
        publish_s=rng.choice([0.0, 0.1, 1.0]),
        uniform_share=rng.choice([0.0, 0.3, 0.7]),
        skipped_share=rng.choice([0.0, 0.2]),
        loss_every_s=rng.choice([0.0, 0.0, 3.0]),
    )
    lanes = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 4)))
    stop_after = rng.choice([None, None, rng.randint(1, settings.steps)])
    costs.switch_s = rng.choice([0.0, 0.1, 2.0]) if lends else 0.0
    learner_lanes = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3))) if lends else ()
    costs.leave_every_s, costs.grace_s = rng.choice([0.0, 0.0, 3.0]), rng.choice([0.0, 0.5, 5.0])
    make: Callable[..., GroupScheduler] = GroupScheduler
    if most_cost is not None:
        make = partial(GroupScheduler, most_cost=most_cost)
    chance = random.Random(f"saves {seed}")  # apart from the other choices
    return ResumedWorld(
        settings, costs, lanes, make(settings), ScheduleAudit(settings), stop_after=stop_after,
        learner_lanes=learner_lanes, make=make, chance=chance, resumes=resumes and chance.random() < 0.5,
        save_share=chance.choice([0.3, 1.0]),
        kills_s=tuple(10 ** chance.uniform(0, 2) for _ in range(chance.choice([0, 0, 1, 2]))) if resumes else (),
    )  # fmt: skip
