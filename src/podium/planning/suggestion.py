# SPDX-License-Identifier: Apache-2.0
"""One change of the recipe that would have made a run faster, with what it saves: the run is simulated with its own
episodes as it was, and with each change. Of a run on fixed data the accounting of its ranks says it. While the metrics
have an alarm, that is said instead. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from podium.observe.timeline import TimelineSpan
from podium.planning.alarms import alarm_of
from podium.planning.fixed_data_suggestion import suggest_for_ranks
from podium.planning.generator_speeds import slow_generators
from podium.planning.prediction import WHOLE, Configuration, Part, Prediction, Workload, part_of, predict
from podium.planning.run_costs import RunCosts, estimate_costs, num_repeated
from podium.planning.run_records import heldout_lines, newest_spans, opened, program_of, read_records, step_lines
from podium.planning.search import WAITS
from podium.recipe import OnPolicyRecipe, SpmdRecipe
from podium.runs.accounting import worker_times
from podium.runs.pipeline_folder import PipelineFolder

ALARM, SUGGESTION = "look at this first: ", "suggestion: "
"""How the lines begin."""
# A smaller gain is within what the simulation does not know.
_LEAST_GAIN = 0.05
# Seconds for all of it, and the episodes of a step that can be simulated in them: it is said at the end of a run.
_BUDGET_S, _MOST_EPISODES = 1.5, 320
_STAGES_S = 3.0  # for the stages of a pipeline
# Of the timeline, what is looked at for a slow generator.
_TIMELINE_BYTES = 1 << 18
# A change that makes no token older is better than one that gains less than twice as much.
_FRESH = 2.0
# An idle share that is not less than that has not been the reason.
_IDLE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change, and the seconds of a step that it saves."""

    change: Configuration
    base: Configuration
    saved_s: float
    step_s: float  # measured
    reason: str  # who waits for what, or empty
    part: Part = WHOLE  # of a step, that was simulated
    has_turns: bool = False  # waits for tools and environments counted as generation

    @property
    def text(self) -> str:
        """One sentence."""
        changes = ", ".join(f"{key} {old} → {new}" for key, (old, new) in self.base.changes_to(self.change).items())
        reason = f"{self.reason}: " if self.reason else ""
        older = self.change.staleness > self.base.staleness
        age = f" (tokens may be {self.change.staleness} versions old: less on-policy)" if older else ""
        part = f" (from a simulation of 1/{self.part.groups} of each batch)" if self.part != WHOLE else ""
        turns = " (waits for tools or the environment are taken as generation)" if self.has_turns else ""
        saved = f"saves about {_seconds(self.saved_s)} of {_seconds(self.step_s)} a step"
        return f"{reason}{changes} {saved}{age}{part}{turns}"


def suggestion_lines(run: Path, spans: Sequence[TimelineSpan] | None = None) -> list[str]:
    """What to look at after a run: an alarm, a suggestion, or nothing. Never raises, and takes a second or two.
    `spans`: those of its timeline, where somebody has read them already."""
    try:
        return _lines(run, spans)
    except Exception:  # records that are damaged or incomplete: a run that has ended well must not end in this
        return []


def stage_lines(pipeline: Path, *, budget_s: float = _STAGES_S) -> list[str]:
    """The same for the stages of a pipeline, while there is time. Never raises."""
    began_s, lines = time.monotonic(), list[str]()
    try:
        folder = PipelineFolder.open(pipeline)
        stages = [name for name in folder.state()["order"] if folder.run(name).recipe_file.is_file()]
    except Exception:  # as above
        return []
    for name in stages:
        if time.monotonic() - began_s > budget_s:
            break
        lines += [f"stage {name}: {line}" for line in suggestion_lines(folder.run(name).path)]
    return lines


def _lines(run: Path, known: Sequence[TimelineSpan] | None) -> list[str]:
    folder = opened(run)
    recipe = program_of(folder)
    alarm = alarm_of(recipe, step_lines(folder), heldout_lines(folder))
    if alarm is not None:
        return [f"{ALARM}{alarm}"]
    if isinstance(recipe, SpmdRecipe):
        spans = newest_spans(run, _TIMELINE_BYTES) if known is None else known
        text = suggest_for_ranks(recipe, spans, worker_times(spans))
        return [] if text is None else [f"{SUGGESTION}{text}"]
    if not isinstance(recipe, OnPolicyRecipe):
        return []
    slow = next(slow_generators(newest_spans(run, _TIMELINE_BYTES) if known is None else known), None)
    if slow is not None:  # the simulation has generators of one speed
        return [f"{ALARM}{slow}"]
    if recipe.placement.generator_tensor > 1:  # costs of generators are counted by device
        return []
    records = read_records(run, known)
    part = part_of(records.workload(), records.configuration(), _MOST_EPISODES)
    if part is None:  # its groups or its lanes cannot be divided
        return [f"what would be faster: podium plan --from {run}"]
    found = suggest(estimate_costs(records, part=part))
    return [] if found is None else [f"{SUGGESTION}{found.text}"]


def suggest(
    run: RunCosts, *, budget_s: float = _BUDGET_S, clock: Callable[[], float] = time.monotonic
) -> Suggestion | None:
    """The change of one key that saves most; None if none saves 5%, or if the simulation does not reproduce the run."""
    if not run.is_reproduced:
        return None
    began_s = clock()
    base = _repeated(run, run.configuration)
    found: list[tuple[float, Prediction]] = []
    for candidate in candidates(
        run.configuration, run.workload, has_graders=run.costs.graders is not None, knows_lanes=run.knows_lanes
    ):
        if not run.part.can_have(candidate):
            continue
        if found and clock() - began_s > budget_s:  # the first one is looked at on a busy machine too
            break
        after = _repeated(run, candidate)
        found.append((1 - after.step_s / base.step_s, after))
    found = [each for each in found if each[0] >= _LEAST_GAIN]
    if not found:
        return None
    gain, after = max(found, key=lambda each: each[0] / _age_penalty(each[1].configuration, run.configuration))
    return Suggestion(
        change=after.configuration,
        base=run.configuration,
        saved_s=gain * run.measured_step_s,
        step_s=run.measured_step_s,
        reason=_reason(run, base, after),
        part=run.part,
        has_turns=run.has_turns and after.configuration.graders == run.configuration.graders,
    )


def candidates(
    base: Configuration, workload: Workload, *, has_graders: bool, knows_lanes: bool
) -> Iterator[Configuration]:
    """Changes of one key that the recipe can have. `has_graders`: whether graders can be short. `knows_lanes`: whether
    the run tells what a lane costs; where that is assumed, so would be the gain of other lanes."""
    if has_graders:
        yield replace(base, graders=2 * base.graders)
    for layout in workload.layouts:
        if layout == base.layout or base.devices < 2 or (layout == "colocated" and base.staleness):
            continue
        share = None if layout == "colocated" else base.rollout_devices or base.devices // 2
        yield base.placed(layout, rollout_devices=share)
    if base.rollout_devices is not None:
        step = max(1, base.devices // 8)
        for share in (base.rollout_devices - step, base.rollout_devices + step):
            if 0 < share < base.devices:
                yield base.placed(base.layout, rollout_devices=share)
        if workload.allows(older := replace(base, staleness=base.staleness + 1)):
            yield older
    if not knows_lanes:
        return
    yield replace(base, lanes=2 * base.lanes)
    if base.lanes > 1:
        yield replace(base, lanes=base.lanes // 2)


def _repeated(run: RunCosts, configuration: Configuration) -> Prediction:
    """The run's own episodes in their order."""
    steps = max(3, min(run.num_steps, num_repeated(run.workload, run.part)))
    return predict(run.costs, run.workload, configuration, seeds=(0,), steps=steps, part=run.part)


def _age_penalty(configuration: Configuration, base: Configuration) -> float:
    return _FRESH if configuration.staleness > base.staleness else 1.0


def _reason(run: RunCosts, base: Prediction, after: Prediction) -> str:
    """Who waits for what, where the change takes most of it away. Of more graders, what they are short of: while
    generators are slowed down by the episodes that wait for grading, learners wait for both."""
    waits = [("generators", cause, share, after.generator_idle) for cause, share in base.generator_idle.items()]
    waits += [("learners", cause, share, after.learner_idle) for cause, share in base.learner_idle.items()]
    has_more_graders = after.configuration.graders > base.configuration.graders
    lost = [
        (share * base.step_s - later.get(cause, 0.0) * after.step_s, who, cause, share)
        for who, cause, share, later in waits
        if cause == "grading" or not has_more_graders
    ]
    saved_s, who, cause, share = max(lost, default=(0.0, "", "", 0.0))
    if saved_s > _IDLE * base.step_s:
        return f"{who} wait {share:.0%} for {WAITS[cause]}"
    return f"graders are at work {_grading_share(run, base):.0%} of the time" if has_more_graders else ""


def _grading_share(run: RunCosts, base: Prediction) -> float:
    """Of the time of the graders, where each takes one episode at a time."""
    graders_s = base.configuration.graders * run.measured_step_s
    return min(1.0, run.costs.grading_s.median * run.workload.episodes / graders_s)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
