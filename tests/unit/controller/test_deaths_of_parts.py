# SPDX-License-Identifier: Apache-2.0
"""Which part of a run an error is charged to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from podium.controller.recovery import Death
from podium.controller.rewinding import death_of
from podium.errors import WorkerDiedError


class Pools:
    """Workers by pool: slots of the dead, and of those whose replacement has failed half-way."""

    def __init__(self, **damaged: tuple[tuple[int, ...], set[int]]) -> None:
        self.pools = ("train", "rollout", "runners", "graders")
        self._damaged = damaged

    def worker_pool(self, pool: str) -> Any:
        dead, unfinished = self._damaged.get(pool, ((), set()))
        return SimpleNamespace(dead=dead, unfinished=unfinished)

    def is_damaged(self, pool: str) -> bool:
        return pool in self._damaged


@pytest.mark.parametrize(
    ("damaged", "part", "slots"),
    [
        ({"graders": ((1,), set())}, "grader", (1,)),
        ({"graders": ((), {2, 0})}, "grader", (0, 2)),
        ({"runners": ((0,), {0})}, "runner", (0,)),
        ({"rollout": ((3, 5), set()), "graders": ((0,), set())}, "generator", (3, 5)),
        ({"train": ((1,), set()), "rollout": ((0,), set())}, "learner", ()),
        ({}, "learner", ()),
    ],
)
def test_a_death_is_that_of_the_part_whose_workers_are_gone(
    damaged: dict[str, Any], part: Any, slots: tuple[int, ...]
) -> None:
    workers: Any = Pools(**damaged)

    found = death_of(WorkerDiedError("it is gone.\nwhere it was"), workers)

    assert found == Death(part=part, cause="it is gone.", slots=slots)
