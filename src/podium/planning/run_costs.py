# SPDX-License-Identifier: Apache-2.0
"""Estimates what generation, grading, updates and new weights cost from the records of a run, and how well the
simulation with these costs reproduces the run. Torch-free.

Regressions are by medians (Theil and Sen), and scaled to the mean without the extremes: a step in which the machine did
something else does not move them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from podium.controller.simulation.costs import CostModel, GenerationCost, LogNormal, UpdateCost
from podium.controller.simulation.report import SimulationReport
from podium.errors import RunFolderError
from podium.planning.grading_times import grades_one_by_one, own_lengths_s, working_s
from podium.planning.prediction import (
    WHOLE,
    Configuration,
    LayoutName,
    Part,
    RecordedCosts,
    Workload,
    simulated_report,
)  # fmt: skip
from podium.planning.run_records import RunRecords, decode_points

# Candidates for what a lane costs, as a part of what the weights cost.
_LANE_RATIOS = (0.0, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_REFINEMENTS = 6
# Where the records say nothing of it.
_USUAL_RATIO = 0.01
# Steps and episodes that a fit simulates, at most: it has to take a second, not a minute.
_FIT_STEPS, _FIT_EPISODES = 24, 1_500
# Regressions with an intercept need so many points, and so much spread of what they regress on.
_FEWEST_POINTS, _LEAST_SPREAD = 5, 0.03
# Summaries of engines that are compared, at most, and how many times as many lanes the largest has to have.
_MOST_POINTS, _LANES_APART = 200, 2.0
# Of so many points one is left out at either end where a line is scaled.
_TRIMMED = 10
# The most of a phase that a constant may explain.
_MOST_CONSTANT = 0.5
# And the most of a generation that is there before its first token.
_MOST_LATENCY = 0.1
# How far a simulation may be from the run so that it can say what another configuration would do.
_REPRODUCED = 0.15

Quality = Literal["measured", "assumed"]
LANE_COST = "generation, a lane"
"""The name of an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One cost: how it was found, and the median relative error over the steps that it was found from."""

    name: str
    value: float
    unit: str
    how: str
    quality: Quality = "measured"
    error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """The costs of a run with its own configuration, and a simulation of exactly that."""

    costs: CostModel
    by_layout: Mapping[LayoutName, CostModel]  # of all runs that were given
    workload: Workload
    configuration: Configuration
    estimates: tuple[Estimate, ...]
    measured_step_s: float
    repeated_s: float  # measured mean of the steps that the simulation repeats
    simulated_step_s: float  # of these
    num_steps: int
    decoded_lanes: tuple[float, float] | None = None  # fewest and most lanes of decoding steps that were measured
    micro_batches: float = 0.0  # of an optimizer step of a learner, at most; 0: the metrics do not tell
    part: Part = WHOLE  # of a step, that simulations of this run have
    has_turns: bool = False  # episodes wait for tools or environments, which counts as generation

    @property
    def knows_lanes(self) -> bool:
        """Whether the run tells what a lane costs. Where episodes wait for tools it does not: a lane waits, too."""
        return not self.has_turns and any(
            each.name == LANE_COST and each.quality == "measured" for each in self.estimates
        )

    def costs_of(self, configuration: Configuration) -> CostModel:
        """Those of a run of that layout, or of one whose learners also have devices of their own, or of this run."""
        layout = configuration.layout
        alike: dict[LayoutName, LayoutName] = {"split": "elastic", "elastic": "split"}
        found = self.by_layout.get(layout) or self.by_layout.get(alike.get(layout, layout))
        return found or self.costs

    @property
    def error(self) -> float:
        """Of the simulated step time, relative to the measured one."""
        return self.simulated_step_s / self.repeated_s - 1.0

    @property
    def is_reproduced(self) -> bool:
        """Whether the simulation is near enough to the run to say what a change would do."""
        return abs(self.error) <= _REPRODUCED


@dataclass(frozen=True, slots=True)
class Fit:
    """y = constant + slope * x, and the median relative error of that."""

    constant: float
    slope: float
    error: float


def fit_line(x: Sequence[float], y: Sequence[float], *, most_constant: float = _MOST_CONSTANT) -> Fit:
    """The median of all slopes between two points, and the median of what is left. Both are at least 0, and the
    constant is at most this part of the median. Few points, or points of nearly one x, go through the origin."""
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if a > 0]
    if not pairs:
        return Fit(statistics.median(y) if y else 0.0, 0.0, 0.0)
    through_origin = statistics.median(b / a for a, b in pairs)
    mean = statistics.fmean(a for a, _ in pairs)
    if len(pairs) < _FEWEST_POINTS or statistics.pstdev(a for a, _ in pairs) < _LEAST_SPREAD * mean:
        return _line(0.0, through_origin, pairs)
    slopes = [(d - b) / (c - a) for (a, b), (c, d) in itertools.combinations(pairs, 2) if a != c]
    slope = max(0.0, statistics.median(slopes))
    constant = statistics.median(b - slope * a for a, b in pairs)
    if constant <= 0.0:
        return _line(0.0, through_origin, pairs)
    most = most_constant * statistics.median(b for _, b in pairs)
    if constant > most:
        slope = statistics.median(max(0.0, b - most) / a for a, b in pairs)
    return _line(min(constant, most), slope, pairs)


def _line(constant: float, slope: float, pairs: Sequence[tuple[float, float]]) -> Fit:
    """Scaled, so that it is right on average: times have a long tail, and medians are below their mean."""
    ratios = sorted(b / (constant + slope * a) for a, b in pairs if constant + slope * a > 0)
    cut = -(-len(ratios) // _TRIMMED) if len(ratios) >= _FEWEST_POINTS else 0
    if ratios:
        factor = statistics.fmean(ratios[cut : len(ratios) - cut])
        constant, slope = factor * constant, factor * slope
    errors = [abs(constant + slope * a - b) / b for a, b in pairs if b > 0]
    return Fit(constant, slope, statistics.median(errors) if errors else 0.0)


def estimate_costs(records: RunRecords, *, others: Sequence[RunRecords] = (), part: Part = WHOLE) -> RunCosts:
    """The costs of a run. `others`: runs of the same recipe in another layout, for what this one cannot say: what new
    weights cost with devices of their own, what changing sides costs, and the costs of their own layouts. `part`: of a
    step, that is simulated to find them."""
    costs, estimates = _estimated(records, others, part)
    by_layout: dict[LayoutName, CostModel] = {}
    for each in others:
        layout = each.configuration().layout
        if layout not in by_layout:
            rest = [other for other in (records, *others) if other is not each]
            by_layout[layout] = replace(_estimated(each, rest, part)[0], groups=costs.groups)
    configuration, workload = records.configuration(), records.workload()
    by_layout[configuration.layout] = costs
    repeated = min(len(records.steps), num_repeated(workload, part))
    return RunCosts(
        costs=costs,
        by_layout=by_layout,
        workload=workload,
        configuration=configuration,
        estimates=tuple(estimates),
        measured_step_s=records.step_s,
        repeated_s=statistics.fmean(records.values("step_s")[:repeated]),
        simulated_step_s=_report(costs, workload, configuration, repeated, records.num_before, part).step_s,
        num_steps=len(records.steps),
        decoded_lanes=_decoded_lanes(records),
        micro_batches=max(records.values("micro_steps")) / records.recipe.full_algorithm.mini_batches,
        part=part,
        has_turns=records.recipe.environment is not None,
    )


def _estimated(records: RunRecords, others: Sequence[RunRecords], part: Part) -> tuple[RecordedCosts, list[Estimate]]:
    if not records.groups:
        raise RunFolderError(f"{records.path} has no ledger of episodes (episodes.sqlite), so their lengths are lost.")
    configuration, workload = records.configuration(), records.workload()
    update, of_update = _update(records)
    grading, graders, of_grading = _grading(records)
    transfers, of_transfers = _transfers(records, others)
    costs = RecordedCosts(
        generation=GenerationCost(weights_s=1.0),
        answer_tokens=_lengths(records.groups),
        update=update,
        grading_s=grading,
        publish_s=transfers.publish_s,
        switch_s=transfers.switch_s,
        start_s=records.start_s,
        uniform_share=statistics.fmean(records.values("groups/uniform")),
        graders=graders,
        groups=records.groups,
    )
    fit = _synchronous_generation if records.is_synchronous else _overlapped_generation
    generation, latency_s, of_generation = fit(records, costs, workload, configuration, part)
    # What a generation takes before its first token is a pause of its devices.
    costs = replace(
        costs, generation=generation, publish_s=costs.publish_s + latency_s, switch_s=costs.switch_s + latency_s / 2
    )
    return costs, [*of_generation, *of_update, *of_grading, *of_transfers]


def num_repeated(workload: Workload, part: Part = WHOLE) -> int:
    """Steps of a run that a simulation repeats, at most."""
    return max(3, min(_FIT_STEPS, part.groups * _FIT_EPISODES // workload.episodes))


def _report(
    costs: CostModel, workload: Workload, configuration: Configuration, steps: int, warm_up: int, part: Part
) -> SimulationReport:
    """The run itself, with its own episodes in their order."""
    cool_down = configuration.staleness + 1
    return simulated_report(
        costs, workload, configuration, seed=0, steps=steps, warm_up=warm_up, cool_down=cool_down, part=part
    )


# --- the learner ---


def _update(records: RunRecords) -> tuple[UpdateCost, list[Estimate]]:
    """Scores of other models count as part of the update, and with devices of its own what the controller does itself:
    the learner waits. With staleness it also waits until its weights are stored."""
    names = ["update", "score"]
    names += ["other"] if records.recipe.placement.layout != "colocated" else []
    names += [] if records.is_synchronous else ["publish"]
    seconds = [sum(values.get(f"time/{name}_s", 0.0) for name in names) for values in records.steps]
    learners = records.configuration().num_learners
    line = fit_line([tokens / learners for tokens in records.values("trained_tokens")], seconds)
    how = "time/update_s over trained_tokens of a learner"
    return UpdateCost(token_s=line.slope, constant_s=line.constant), [
        Estimate(name="update, a token", value=line.slope, unit="s", how=how, error=line.error),
        Estimate(name="update, constant", value=line.constant, unit="s", how=how, error=line.error),
    ]


# --- graders ---


def _grading(records: RunRecords) -> tuple[LogNormal, int | None, list[Estimate]]:
    begin_s, end_s = records.window
    measured = [span for each in records.gradings.values() for span in each if begin_s <= span.begin_s < end_s]
    if not measured:
        seconds = statistics.median(records.values("time/grade_s"))
        how = "time/grade_s: no grader has a timeline"
        estimate = Estimate(name="grading, an episode", value=seconds, unit="s", how=how, quality="assumed")
        return LogNormal(median=seconds), None, [estimate]
    if grades_one_by_one(records.gradings):
        busy_s = sum(working_s(each, records.window) for each in records.gradings.values())
        mean_s = busy_s / (records.num_episodes * len(records.steps))
        sigma, _ = _spread([each for spans in records.gradings.values() for each in own_lengths_s(spans)])
        how = "time of graders at work over episodes: each grades one at a time"
        found = LogNormal(median=mean_s / math.exp(sigma**2 / 2), sigma=sigma)
        seconds = mean_s
        graders: int | None = records.configuration().graders
    else:
        lengths = [span.end_s - span.begin_s for span in measured]
        sigma, seconds = _spread(lengths)
        how, graders = "length of graders' calls: a grader works on many at a time", None
        found = LogNormal(median=seconds, sigma=sigma, cap=max(lengths))
    return found, graders, [Estimate(name="grading, an episode", value=seconds, unit="s", how=how)]


def _spread(lengths_s: Sequence[float]) -> tuple[float, float]:
    """Sigma of the log-normal distribution with as much between the 16th and the 84th percentile, and the median."""
    ordered = sorted(lengths_s)
    low, high = (ordered[min(len(ordered) - 1, int(len(ordered) * part))] for part in (0.16, 0.84))
    return math.log(high / low) / 2 if low > 0 else 0.0, statistics.median(ordered)


# --- weights and devices ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfers:
    publish_s: float
    switch_s: float


def _transfers(records: RunRecords, others: Sequence[RunRecords]) -> tuple[_Transfers, list[Estimate]]:
    found = {name: _measured(name, [records, *others]) for name in ("publish", "switch")}
    known = [value for value, _ in found.values() if value is not None]
    estimates, values = [], {}
    for name, (value, how) in found.items():
        values[name] = value if value is not None else (known[0] if known else 0.0)
        kind: Quality = "measured" if value is not None else "assumed"
        text = how if value is not None else "as long as the other: no run that was given has such a layout"
        estimates.append(Estimate(name=name, value=values[name], unit="s", how=text, quality=kind))
    return _Transfers(publish_s=values["publish"], switch_s=values["switch"]), estimates


def _measured(name: str, runs: Sequence[RunRecords]) -> tuple[float | None, str]:
    for records in runs:
        layout = records.recipe.placement.layout
        if name == "switch" and layout == "colocated":
            names = ("residency", "publish", "other")
            both = [sum(values.get(f"time/{name}_s", 0.0) for name in names) for values in records.steps]
            return statistics.median(both) / 2, "half of time/residency_s, time/publish_s and time/other_s"
        if name == "switch" and layout == "elastic":
            lent = [
                values["lending/switch_s"] / max(1.0, values.get("lending/times", 1.0))
                for values in records.steps
                if values.get("lending/switch_s")
            ]
            if lent:
                return statistics.median(lent) / 2, "half of lending/switch_s each time"
        if name == "publish" and layout != "colocated":
            if records.is_synchronous:
                return statistics.median(records.values("time/publish_s")), "time/publish_s"
            return statistics.fmean(records.values("rollout/install_s")), "rollout/install_s"
    return None, ""


# --- generation ---


def _synchronous_generation(
    records: RunRecords, costs: RecordedCosts, workload: Workload, configuration: Configuration, part: Part
) -> tuple[GenerationCost, float, list[Estimate]]:
    """A step's generation is simulated with its own episodes and every ratio of both costs; the ratio counts whose
    times are nearest to time/rollout_s, up to a factor and a latency."""
    steps = min(len(records.steps), num_repeated(workload, part))
    per_step = workload.groups_per_step
    if len(records.groups) < per_step * len(records.steps):  # groups were dropped or replaced: they fit no step
        steps = min(steps, len(records.groups) // per_step)
    measured = records.values("time/rollout_s")[:steps]
    alone = replace(
        costs, update=UpdateCost(token_s=0.0), grading_s=LogNormal(median=0.0), graders=None, publish_s=0.0,
        switch_s=0.0, uniform_share=0.0,
    )  # fmt: skip
    # Lent devices would help, and they do not where steps are synchronous.
    shape = replace(configuration, layout="split" if configuration.rollout_devices else "colocated", staleness=0)

    def times(ratio: float) -> list[float]:
        cost = replace(alone, generation=GenerationCost(weights_s=1.0, lane_s=ratio))
        report = simulated_report(cost, workload, shape, seed=0, steps=steps, warm_up=0, cool_down=0, part=part)
        return [end - begin for begin, end in itertools.pairwise((0.0, *report.committed_s))]

    def misfit(ratio: float) -> float:
        expected = times(ratio)
        line = fit_line(expected, measured, most_constant=_MOST_LATENCY)
        return statistics.fmean(
            abs(line.constant + line.slope * a - b) for a, b in zip(expected, measured, strict=True)
        )

    ratio = _measured_ratio(records)
    if ratio is None:
        ratio = _best_ratio(misfit) if steps >= _FEWEST_POINTS else _USUAL_RATIO
    line = fit_line(times(ratio), measured, most_constant=_MOST_LATENCY)
    how = "time/rollout_s of steps, simulated with their own lengths"
    quality: Quality = "measured" if steps >= _FEWEST_POINTS else "assumed"
    estimates = [
        Estimate(name="generation, weights", value=line.slope, unit="s", how=how, error=line.error),
        Estimate(name=LANE_COST, value=line.slope * ratio, unit="s", how=how, error=line.error, quality=quality),
        Estimate(name="generation, latency", value=line.constant, unit="s", how=how, error=line.error),
    ]
    return GenerationCost(weights_s=line.slope, lane_s=line.slope * ratio), line.constant, estimates


def _overlapped_generation(
    records: RunRecords, costs: RecordedCosts, workload: Workload, configuration: Configuration, part: Part
) -> tuple[GenerationCost, float, list[Estimate]]:
    """Generators were at work for as long as they were not idle and installed no weights. For every ratio the costs
    are scaled until simulated generators are at work as long; the ratio counts whose step time is nearest."""
    steps = min(len(records.steps), num_repeated(workload, part))
    repeated = records.steps[:steps]
    measured_s = statistics.fmean(
        max(0.0, values["step_s"] - values.get("rollout/idle_s", 0.0) - values.get("rollout/install_s", 0.0))
        for values in repeated
    )
    measured_step_s = statistics.fmean(values["step_s"] for values in repeated)
    tokens = statistics.fmean(records.values("trained_tokens")) / (configuration.rollout_devices or 1)

    def scaled(ratio: float) -> tuple[GenerationCost, float]:
        """Costs, and the step time with them."""
        lanes = min(configuration.lanes, workload.episodes / (configuration.rollout_devices or 1))
        weights_s, step_s = measured_s * lanes / (tokens * (1 + ratio * lanes)), 0.0
        for _ in range(4):
            cost = replace(costs, generation=GenerationCost(weights_s=weights_s, lane_s=ratio * weights_s))
            report = _report(cost, workload, configuration, steps, records.num_before, part)
            step_s = report.step_s
            work_s = step_s * (1 - report.generator_idle_share)
            if not work_s or abs(measured_s / work_s - 1) < 0.005:
                break
            weights_s *= measured_s / work_s
        return GenerationCost(weights_s=weights_s, lane_s=ratio * weights_s), step_s

    measured = _measured_ratio(records)
    found = {ratio: scaled(ratio) for ratio in (_LANE_RATIOS[2:7] if measured is None else (measured,))}
    errors = {ratio: abs(step_s / measured_step_s - 1) for ratio, (_, step_s) in found.items()}
    nearest = min(errors.values())
    # Several may be as near: then the usual one is as good a guess as any.
    alike = [ratio for ratio, error in errors.items() if error <= nearest + 0.01]
    ratio = min(alike, key=lambda each: abs(math.log(each / _USUAL_RATIO)))
    generation = found[ratio][0]
    how = "rollout/idle_s and rollout/install_s, simulated with the run's own lengths"
    kind: Quality = "assumed" if len(alike) > 1 else "measured"
    return generation, 0.0, [
        Estimate(name="generation, weights", value=generation.weights_s, unit="s", how=how, error=errors[ratio]),
        Estimate(name=LANE_COST, value=generation.lane_s, unit="s", how=how, quality=kind),
    ]  # fmt: skip


def _measured_ratio(records: RunRecords) -> float | None:
    """What a lane costs, as a part of what the weights cost, by the engines' own summaries of their steps; None where
    there are too few, or all of them have nearly as many lanes."""
    points = sorted(decode_points(records), key=lambda each: each.lanes)
    few = points[:: max(1, len(points) // _MOST_POINTS)]
    if len(few) < _FEWEST_POINTS or few[-1].lanes < _LANES_APART * few[0].lanes:
        return None
    line = fit_line([each.lanes for each in few], [each.step_s for each in few], most_constant=1.0)
    return line.slope / line.constant if line.constant > 0 else None


def _decoded_lanes(records: RunRecords) -> tuple[float, float] | None:
    """Between the 5% of decoding steps with the fewest lanes and the 5% with the most: lines are fitted between."""
    lanes = sorted(each.lanes for each in decode_points(records))
    return (lanes[len(lanes) // 20], lanes[-1 - len(lanes) // 20]) if lanes else None


def _best_ratio(misfit: Callable[[float], float]) -> float:
    """The candidate with the smallest misfit, refined by halving the steps between it and its neighbours."""
    found = {ratio: misfit(ratio) for ratio in _LANE_RATIOS}
    best = min(found, key=found.__getitem__)
    step = 3.0**0.5 if best else 1.0
    for _ in range(_REFINEMENTS if best else 0):
        for near in (best / step, best * step):
            if near not in found:
                found[near] = misfit(near)
        best, step = min(found, key=found.__getitem__), step**0.5
    return best


def _lengths(groups: Sequence[Sequence[float]]) -> LogNormal:
    """The log-normal distribution of the same median and the same spread around it."""
    logs = [math.log(max(1.0, length)) for group in groups for length in group]
    longest = math.exp(max(logs))
    return LogNormal(median=math.exp(statistics.median(logs)), sigma=statistics.pstdev(logs), cap=longest)
