# SPDX-License-Identifier: Apache-2.0
"""A quick look at a configuration: the time that its slowest part needs, without a schedule. Good enough to tell which
configurations are worth a simulation. Torch-free."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from podium.controller.simulation.costs import CostModel
from podium.planning.prediction import Configuration, Workload

# Lengths are drawn from so many groups.
_DRAWN = 200
# The part of a generation in which answers end, so that grading them takes no time of its own.
_HIDDEN = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of the answers of a step."""

    total: float
    longest: float


def lengths_of(costs: CostModel, workload: Workload) -> Lengths:
    """Of a usual step."""
    drawn = sorted(
        tokens for number in range(_DRAWN) for tokens in costs.group(number, workload.samples, seed=1).tokens
    )
    rank = min(len(drawn) - 1, int(len(drawn) * (1 - 1 / (workload.episodes + 1))))
    return Lengths(total=statistics.fmean(drawn) * workload.episodes, longest=drawn[rank])


def quick_step_s(costs: CostModel, workload: Workload, one: Configuration, lengths: Lengths) -> float:
    """About the seconds of a step."""
    generation, episodes = costs.generation, workload.episodes
    generators = one.rollout_devices or one.devices
    helpers = one.num_learners if one.layout == "elastic" else 0
    update_s = costs.update.update_s(lengths.total, one.num_learners)
    grading_s = costs.grading_s.median * (1.0 if costs.graders is None else episodes / one.graders)
    if one.staleness == 0:
        all_of_them = generators + helpers
        each = episodes / all_of_them
        waves = max(0.0, each - one.lanes) / one.lanes * lengths.total / episodes
        decoding = generation.weights_s * (lengths.longest + waves)
        generating_s = decoding + generation.lane_s * lengths.total / all_of_them
        moves_s = 2 * costs.switch_s if not one.rollout_devices else costs.publish_s
        moves_s += 2 * costs.switch_s if helpers else 0.0
        left_s = grading_s if costs.graders is None else max(costs.grading_s.median, grading_s - _HIDDEN * generating_s)
        return generating_s + left_s + moves_s + update_s
    lanes = max(1.0, min(one.lanes, episodes * (1 + one.staleness) / (generators + helpers)))
    work_s = lengths.total * (generation.weights_s / lanes + generation.lane_s)
    generating_s = work_s / generators + costs.publish_s
    if helpers:
        shared_s = (work_s + helpers * (update_s + 2 * costs.switch_s)) / (generators + helpers) + costs.publish_s
        generating_s = min(generating_s, max(shared_s, update_s))
    latency_s = lengths.longest * generation.token_s(round(lanes)) + costs.grading_s.median + update_s
    queue_s = grading_s if costs.graders is not None else 0.0
    return max(generating_s, update_s, queue_s, latency_s / (1 + one.staleness))
