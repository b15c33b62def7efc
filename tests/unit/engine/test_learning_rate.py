# SPDX-License-Identifier: Apache-2.0
"""The schedule by hand-computed values."""

from __future__ import annotations

import pytest

from podium.engine.schedule import learning_rate
from podium.recipe import OptimizerSection


def rates(steps: int, **values: object) -> list[float]:
    section = OptimizerSection.model_validate({"lr": 8.0, **values})
    return [learning_rate(section, step, steps) for step in range(1, steps + 1)]


def test_a_constant_rate_stays() -> None:
    assert rates(3) == [8.0, 8.0, 8.0]


def test_warm_up_rises_in_equal_steps_to_the_full_rate() -> None:
    assert rates(6, warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_a_linear_schedule_falls_in_equal_steps_towards_zero() -> None:
    assert rates(6, schedule="linear", warmup_steps=2) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0]


def test_no_step_is_for_nothing() -> None:
    assert rates(1, schedule="cosine") == [8.0]
    assert rates(1, schedule="linear") == [8.0]


def test_a_linear_schedule_falls_towards_its_share() -> None:
    assert rates(4, schedule="linear", final_lr_ratio=0.5) == [8.0, 7.0, 6.0, 5.0]


def test_a_cosine_is_halfway_down_in_the_middle() -> None:
    # Steps 0..3 of the fall: 8 · (1 + cos(π·k/4)) / 2.
    wanted = [4.0, 8.0, 8.0, 6.828427124746190, 4.0, 1.171572875253810]
    assert rates(6, schedule="cosine", warmup_steps=2) == pytest.approx(wanted, abs=1e-12)


def test_a_cosine_falls_towards_its_share() -> None:
    assert rates(2, schedule="cosine", final_lr_ratio=0.25) == pytest.approx([8.0, 5.0])


def test_a_run_that_only_warms_up_ends_at_the_full_rate() -> None:
    assert rates(2, schedule="cosine", warmup_steps=2) == [4.0, 8.0]
