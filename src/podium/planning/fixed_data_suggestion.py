# SPDX-License-Identifier: Apache-2.0
"""One change of the recipe that would have made a run on fixed data faster, by what its ranks waited for. Torch-free.

What more devices or another micro-batch would do is not in these records: `podium plan` predicts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from podium.observe.causes import Cause
from podium.observe.timeline import TimelineSpan, TimelineWorker, rank_name
from podium.recipe import SpmdRecipe
from podium.runs.accounting import STEP_OF_RANK, WorkerTime, times_by_kind

# A smaller gain is none, nor is one that was found in so few steps or seconds.
_LEAST_GAIN, _FEWEST_STEPS, _LEAST_S = 0.05, 10, 10.0
# What is done every so many steps counts where the steps have so many of them.
_FEWEST_TIMES = 2
# What is no part of a step.
_BESIDE_STEPS: tuple[Cause, ...] = ("start-up", "waiting for start-up", "waiting for recovery")
_RANKS = TimelineWorker.of(rank_name(0)).kind


@dataclass(frozen=True, slots=True)
class _Gain:
    """What a change saves of a step, and how it reads."""

    saved_s: float
    text: str


def suggest_for_ranks(recipe: SpmdRecipe, spans: Sequence[TimelineSpan], times: Sequence[WorkerTime]) -> str | None:
    """One sentence; None where no change saves 5%, or where the timeline has too little. `times`: by these spans."""
    ranks = times_by_kind(times).get(_RANKS)
    steps = sum(span.name == STEP_OF_RANK and span.worker == rank_name(0) for span in spans)
    if ranks is None or steps < _FEWEST_STEPS:
        return None
    seconds = {cause: spent for cause, spent in ranks.seconds.items() if cause not in _BESIDE_STEPS}
    count = sum(TimelineWorker.of(each.worker).kind == _RANKS for each in times)
    total_s = sum(seconds.values()) / count
    if total_s < _LEAST_S:
        return None
    each_s = {cause: spent / count / steps for cause, spent in seconds.items()}
    best = max(_gains(recipe, each_s, steps, total_s / steps), key=lambda gain: gain.saved_s, default=None)
    if best is None or best.saved_s < _LEAST_GAIN * total_s / steps:
        return None
    return f"{best.text} saves about {best.saved_s:.2g} s of {total_s / steps:.2g} s a step"


def _gains(recipe: SpmdRecipe, each_s: Mapping[Cause, float], steps: int, step_s: float) -> Iterator[_Gain]:
    """Of each cause that a key decides. `each_s`: seconds of a step, with what is between steps."""
    wait_s = each_s.get("waiting for data", 0.0)
    workers = recipe.data.workers
    more = 2 * workers or 2
    # A loader that ranks wait for works all the time: with twice as many, a batch is there in half of it.
    yield _Gain(min(wait_s, step_s / 2), f"ranks wait {wait_s / step_s:.0%} for data: data.workers {workers} → {more}")
    save_s = each_s.get("save", 0.0) + each_s.get("waiting for save", 0.0)
    every = recipe.checkpoint.every
    if every is not None and steps >= _FEWEST_TIMES * every:
        yield _Gain(save_s / 2, f"saves take {save_s / step_s:.0%}: checkpoint.every {every} → {2 * every}")
    evaluation_s = each_s.get("evaluation", 0.0) + each_s.get("waiting for evaluation", 0.0)
    every = recipe.evaluation.every
    if every is not None and steps >= _FEWEST_TIMES * every:
        share = evaluation_s / step_s
        yield _Gain(evaluation_s / 2, f"evaluations take {share:.0%}: evaluation.every {every} → {2 * every}")
