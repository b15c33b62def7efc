# SPDX-License-Identifier: Apache-2.0
"""What stands out in a run, in sentences: signs in its metrics, a generator that is slower than the others, what
workers wait for, and one change that would be faster. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from podium.observe.causes import CAUSES, Cause, is_idle
from podium.observe.timeline import TimelineSpan, TimelineWorker
from podium.planning.alarms import Metrics, alarms_of
from podium.planning.generator_speeds import slow_generators
from podium.planning.run_records import heldout_lines, newest_spans, opened, program_of, step_lines
from podium.planning.suggestion import ALARM, SUGGESTION, suggestion_lines
from podium.recipe import OnPolicyRecipe, Recipe
from podium.runs.accounting import WorkerTime, worker_times

# Waits below this share of the time after start-up are no finding, nor is a worker that is less busy than this.
_WAIT, _BUSY = 0.15, 0.6
# Versions from which on the age of trained answers is said.
_AGE = 1.5
_LEARNERS, _GENERATORS, _GRADERS, _RUNNERS = "train", "rollout", "graders", "runners"
_NAMES = {_LEARNERS: "learners", _GENERATORS: "generators", "ranks": "ranks"}
# Time before the first step, which a longer run has once.
_START: tuple[Cause, ...] = ("start-up", "waiting for start-up")
# What may help, by the cause of a wait.
_REMEDIES: Mapping[Cause, str] = {
    "waiting for prompts": "generators are faster than the learner; rollout.staleness lets them run ahead",
    "waiting for the tail of generation": "a few answers take much longer than the others; rollout.staleness fills "
    "the wait, a lower rollout.max_new_tokens shortens it",
    "waiting for grading": "the reward is slow; more grading.workers, or a faster reward",
    "waiting for tools": "tools or environments are slow",
    "waiting for weights": "publishing weights takes long",
    "waiting for other ranks": "ranks have unequal work, or one is slow",
    "waiting for data": "the loader is slow; more data.workers, or data that is prepared before",
    "waiting for the controller": "steps are so short that messages and records count; larger steps help",
    "waiting for recovery": "workers died: see the events",
    "waiting for save": "checkpoints are large or frequent (checkpoint.every)",
    "waiting for evaluation": "evaluations are long or frequent (evaluation.every)",
    "residency": "learner and generator share devices and move in turns",
}

_OTHER_ROLE = {
    "learners": "generation takes long; more placement.rollout_devices, or rollout.staleness to overlap the two",
    "generators": "the update takes long; fewer placement.rollout_devices, or rollout.staleness to overlap the two",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sentence, and where to look: `learning` in the curves, `time` in the timeline."""

    kind: Literal["alarm", "note", "suggestion"]
    about: Literal["learning", "time"]
    text: str


def findings_of(run: Path, spans: Sequence[TimelineSpan] | None = None) -> list[Finding]:
    """All that stands out, the most important first, without suggestions. `spans`: those of the newest part of its
    timeline, where somebody has read them already."""
    folder = opened(run)
    recipe = program_of(folder)
    steps = step_lines(folder)
    alarms = list(alarms_of(recipe, steps, heldout_lines(folder)))
    spans = newest_spans(run) if spans is None else spans
    found = [Finding(kind="alarm", about="learning", text=text) for text in alarms]
    found += [Finding(kind="note", about="learning", text=text) for text in age_texts(recipe, steps)]
    found += [Finding(kind="alarm", about="time", text=text) for text in slow_generators(spans)]
    found += [Finding(kind="note", about="time", text=text) for text in wait_texts(worker_times(spans))]
    return found


def suggestions_of(run: Path, spans: Sequence[TimelineSpan] | None = None) -> list[Finding]:
    """What would be faster, where the metrics have no alarm: runs are simulated, which takes a second or more."""
    lines = [line for line in suggestion_lines(run, spans) if not line.startswith(ALARM)]
    return [Finding(kind="suggestion", about="time", text=line.removeprefix(SUGGESTION)) for line in lines]


def age_texts(recipe: Recipe, steps: Sequence[tuple[int, Metrics]]) -> Iterator[str]:
    """That trained answers are old, and what is done about it."""
    ages = [values["staleness/mean"] for _, values in steps[-10:] if "staleness/mean" in values]
    if not isinstance(recipe, OnPolicyRecipe) or not ages or statistics.median(ages) < _AGE:
        return
    correction = recipe.full_algorithm.correction
    how = "nothing but the loss corrects for it (algorithm.correction: none)"
    if correction is not None:
        how = f"algorithm.correction is {correction.kind}"
    yield (
        f"trained answers are {statistics.median(ages):.1f} versions old on average (staleness/mean; rollout.staleness "
        f"is {recipe.rollout.staleness}), and {how}"
    )


def wait_texts(times: Sequence[WorkerTime]) -> Iterator[str]:
    """What learners and generators wait for most, and which helpers are busy all the time."""
    by_kind: dict[str, dict[Cause, float]] = {}
    for each in times:
        sums = by_kind.setdefault(TimelineWorker.of(each.worker).kind, {})
        for cause, spent in each.seconds.items():
            if cause not in _START:
                sums[cause] = sums.get(cause, 0.0) + spent
    for kind, what in ((_GRADERS, "grading"), (_RUNNERS, "tools and environments")):
        busy = _busy_share(by_kind.get(kind, {}))
        if busy >= _BUSY:
            yield f"{kind} are busy {busy:.0%} of the time after start-up: {what} may be what limits the run"
    waits: dict[Cause, list[tuple[str, float]]] = {}
    for kind, name in _NAMES.items():
        seconds = by_kind.get(kind, {})
        idle: dict[Cause, float] = {
            cause: spent for cause, spent in seconds.items() if is_idle(cause) and cause != "unknown"
        }
        if not idle:
            continue
        cause = max(idle, key=lambda each: idle[each])
        share = idle[cause] / sum(seconds.values())
        if share >= _WAIT:
            waits.setdefault(cause, []).append((name, share))
    for cause, shares in waits.items():
        yield _wait_text(cause, shares)


def _wait_text(cause: Cause, shares: Sequence[tuple[str, float]]) -> str:
    (name, share), *more = shares
    remedy = _REMEDIES.get(cause, CAUSES[cause].description)
    if cause == "waiting for the other role" and not more:
        remedy = _OTHER_ROLE.get(name, remedy)
    who = " and ".join(each for each, _ in shares)
    shown = f"{share:.0%}" + "".join(f" and {other:.0%}" for _, other in more)
    verb = "move between host and device" if cause == "residency" else f"wait {cause.removeprefix('waiting ')}"
    return f"{who} {verb} {shown} of the time after start-up: {remedy}"


def _busy_share(seconds: Mapping[Cause, float]) -> float:
    total = sum(seconds.values())
    return sum(spent for cause, spent in seconds.items() if not is_idle(cause)) / total if total else 0.0
