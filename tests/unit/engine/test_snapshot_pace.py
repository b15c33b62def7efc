# SPDX-License-Identifier: Apache-2.0
"""How often snapshots are taken: after every step where that costs little, and after more where it would not."""

from __future__ import annotations

import pytest

from podium.engine.snapshot_pace import SnapshotPace, steps_between


@pytest.mark.parametrize(
    ("cost_s", "step_s", "between"),
    [(0.0, 1.0, 1), (0.02, 1.0, 1), (0.021, 1.0, 2), (0.14, 1.1, 7), (1.0, 60.0, 1), (0.1, 0.0, 5_000_000)],
)
def test_their_cost_is_at_most_two_percent(cost_s: float, step_s: float, between: int) -> None:
    assert steps_between(cost_s, step_s) == between


def taken(copies_s: list[float], *, step_s: float = 1.0, steps: int = 16) -> list[int]:
    """Steps of snapshots, if copies take so long, one after the other, and the last one for all that follow."""
    pace, due = SnapshotPace(), []
    for step in range(steps):
        if pace.is_due(step):
            pace.begin(step, 100.0 + step_s * step)
            pace.copied(copies_s[min(len(due), len(copies_s) - 1)])
            due.append(step)
    return due


def test_short_copies_follow_every_step() -> None:
    assert taken([0.015]) == list(range(16))
    assert taken([0.009], step_s=0.05) == list(range(16))  # shorter than what surrounds them


def test_long_ones_follow_after_as_many_steps_as_they_need() -> None:
    assert taken([0.1]) == [0, 1, 2, 3, 8, 13]


def test_a_single_long_one_is_no_reason() -> None:
    assert taken([0.5, 0.5, 0.015]) == list(range(16))  # the first ones create their files
    assert taken([0.015, 0.015, 0.015, 0.4, 0.015]) == list(range(16))
