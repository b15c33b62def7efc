# SPDX-License-Identifier: Apache-2.0
"""Two runs compared by their metrics."""

from __future__ import annotations

import math
from pathlib import Path

from podium.observe import StepMetrics
from podium.replaying import FreshResult, MetricDifference, first_difference


def line(step: int, **values: float) -> StepMetrics:
    return StepMetrics(step=step, time_s=0.0, values={name.replace("__", "/"): each for name, each in values.items()})


def fresh(original: list[StepMetrics], other: list[StepMetrics], steps: int) -> list[list[str]]:
    result = FreshResult(
        run=Path("run"), folder=Path("fresh"), staleness=2, steps=steps, original=original, fresh=other
    )
    return [row.split() for row in result.lines()[1:-2]]


def test_the_first_update_that_differs_is_found() -> None:
    original = [line(step, step_s=1.0, loss=0.5, grad_norm=1.0) for step in (1, 2, 3)]
    other = [original[0], line(2, step_s=2.0, loss=0.5, grad_norm=1.25), line(3, step_s=1.0, loss=9.0, grad_norm=1.0)]

    assert first_difference(original, original, last=3) is None
    assert first_difference(original, other, last=1) is None
    assert first_difference(original, other, last=3) == MetricDifference(
        step=2, metric="grad_norm", original=1.0, replayed=1.25
    )


def test_a_loss_that_is_not_finite_equals_itself_and_a_missing_one_differs() -> None:
    nan = [line(1, step_s=1.0, loss=math.nan)]

    assert first_difference(nan, nan, last=1) is None
    assert first_difference(nan, [line(1, step_s=1.0)], last=1) is not None
    assert first_difference([line(1, step_s=1.0)], [line(1, step_s=1.0)], last=1) is None


def test_all_steps_of_a_short_run_are_shown_with_scores_where_it_evaluated() -> None:
    original = [line(0, heldout__score=0.1), line(1, reward__mean=0.2), line(2, reward__mean=0.4)]
    other = [*original[:2], line(2, reward__mean=0.5), line(2, heldout__score=0.25)]

    assert fresh(original, other, 2) == [
        ["0", "-", "-", "0.1000", "0.1000"],
        ["1", "0.2000", "0.2000", "-", "-"],
        ["2", "0.4000", "0.5000", "-", "0.2500"],
    ]


def test_a_long_run_has_few_rows_with_means_of_the_steps_between() -> None:
    lines = [line(step, reward__mean=float(step)) for step in range(1, 101)]

    rows = fresh(lines, lines, 100)
    assert [int(row[0]) for row in rows] == list(range(5, 101, 5))
    assert rows[0][1:] == ["3.0000", "3.0000"]  # of 1 to 5


def test_a_long_run_is_shown_at_its_evaluations() -> None:
    lines = [line(step, reward__mean=1.0) for step in range(1, 101)]
    lines += [line(step, heldout__score=0.5) for step in (0, 40, 80)]

    assert [row[0] for row in fresh(lines, lines, 100)] == ["0", "40", "80", "100"]
