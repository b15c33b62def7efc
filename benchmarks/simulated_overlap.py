# SPDX-License-Identifier: Apache-2.0
"""Simulated: trained tokens per second with a staleness bound, over synchronous colocated training, for many devices.

    .venv/bin/python benchmarks/simulated_overlap.py                          64, 256 and 1,024 devices
    .venv/bin/python benchmarks/simulated_overlap.py --devices 64 --vary      other batch sizes and policies, 64 devices
    .venv/bin/python benchmarks/simulated_overlap.py --layouts elastic --share 3/8       some rows, with a given share
    .venv/bin/python benchmarks/simulated_overlap.py --switch-s 20 --uniform-share 0.3   other costs, dynamic sampling

The real scheduler decides and its audit checks; the costs are a model (COSTS, below). Groups per step are proportional
to the devices. For every staleness the best share of the devices for generation is shown, of 1/4, 3/8, ... 7/8. The
steps that fill the pipeline are not measured."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from podium.controller.scheduling import OnNewWeights, ScheduleSettings
from podium.controller.simulation.costs import CostModel, DeviceLayout, GenerationCost, LogNormal, UpdateCost
from podium.controller.simulation.report import SimulationReport
from podium.controller.simulation.run import simulate

# A model of about 7 billion parameters in bfloat16 that fits one device with some 4 TB/s, and reasoning answers.
COSTS = CostModel(
    generation=GenerationCost(weights_s=0.006, lane_s=0.0001, prefill_tokens_s=25_000),
    answer_tokens=LogNormal(median=4_000, sigma=1.0, cap=32_000),
    update=UpdateCost(token_s=0.00015, constant_s=5.0),
    grading_s=LogNormal(median=1.0, sigma=1.0, cap=30.0),
    publish_s=2.0,
    switch_s=5.0,
)
LANES, SAMPLES = 64, 16
SHARES = tuple(Fraction(eighths, 8) for eighths in (2, 3, 4, 5, 6, 7))
MOST_REFILLS = 10  # groups that dynamic sampling replaces, per group of a step
SHARE_STEP = Fraction(1, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One batch size on some devices."""

    devices: int
    episodes_per_device: int
    steps: int  # measured
    seed: int
    share: Fraction | None = None  # of the devices for generation; None: the best one is searched
    costs: CostModel = COSTS

    def run(
        self, staleness: int, share: Fraction | None, on_new_weights: OnNewWeights = "keep", *, lends: bool = False
    ) -> SimulationReport:  # fmt: skip
        """Simulates one schedule. `share`: of the devices for generation; None: colocated. `lends`: layout elastic."""
        warm_up, cool_down = staleness + 2, staleness + 1
        schedule = ScheduleSettings(
            steps=warm_up + self.steps + cool_down,
            groups_per_step=self.devices * self.episodes_per_device // SAMPLES,
            samples=SAMPLES,
            staleness=staleness,
            on_new_weights=on_new_weights,
            lends=lends,
            replaces_uniform=self.costs.uniform_share > 0,
            max_replaced=MOST_REFILLS * self.devices * self.episodes_per_device // SAMPLES,
        )
        layout = DeviceLayout(
            devices=self.devices, rollout_devices=None if share is None else int(self.devices * share), lanes=LANES
        )
        return simulate(schedule, self.costs, layout, seed=self.seed, warm_up=warm_up, cool_down=cool_down)

    def best(
        self, staleness: int, on_new_weights: OnNewWeights = "keep", *, lends: bool = False
    ) -> SimulationReport:  # fmt: skip
        """With the share of the devices for generation that trains most tokens per second. It goes up and down from one
        half while that helps: the speed has one peak."""
        if self.share is not None:
            return self.run(staleness, self.share, on_new_weights, lends=lends)
        reports = {share: self.run(staleness, share, on_new_weights, lends=lends) for share in SHARES[:3]}
        while True:
            share = max(reports, key=lambda each: reports[each].tokens_s)
            beyond = {share - SHARE_STEP, share + SHARE_STEP} & set(SHARES) - reports.keys()
            if not beyond:
                return reports[share]
            reports |= {each: self.run(staleness, each, on_new_weights, lends=lends) for each in beyond}


HEADER = (
    "| devices | schedule | rollout devices | s a step | trained tokens/s a device | speed-up | generators idle "
    "| learners idle | lanes in use | staleness mean, max | in flight, queued |\n|" + "---|" * 11
)


def row(name: str, report: SimulationReport, base: SimulationReport) -> str:
    """One line of the table."""
    layout = report.layout
    cause = max(report.generator_idle_s, key=report.generator_idle_s.__getitem__)
    generators = f"{report.generator_idle_share:.0%}, most: {cause}" if report.generator_idle_share > 0.005 else "0%"
    return (
        f"| {layout.devices:,} | {name} | {layout.num_generators:,} | {report.step_s:.0f} "
        f"| {report.tokens_s / layout.devices:,.0f} | {report.tokens_s / base.tokens_s:.2f} | {generators} "
        f"| {'' if layout.is_colocated else f'{report.learner_idle_share:.0%}'} | {report.lanes_in_use:.0f} "
        f"| {report.staleness_mean:.2f}, {report.staleness_max} | {report.in_flight_s:.0f} s, {report.queue_s:.0f} s |"
    )


def scales(workloads: list[Workload], stalenesses: list[int], layouts: list[str]) -> Iterator[str]:
    """Synchronous colocated against other layouts, for every number of devices."""
    yield HEADER
    for workload in workloads:
        began = time.perf_counter()
        base = workload.run(0, None)
        simulating_s = (time.perf_counter() - began) / len(base.trained_groups)
        print(f"{workload.devices} devices: {simulating_s:.2f} s to simulate a step, with audit", file=sys.stderr)
        yield row("colocated, synchronous", base, base)
        for staleness in stalenesses:
            for layout in layouts:
                yield row(f"{layout}, staleness {staleness}", workload.best(staleness, lends=layout == "elastic"), base)


def variants(workload: Workload) -> Iterator[str]:
    """What new weights cost, and what the batch size changes."""
    yield HEADER
    base = workload.run(0, None)
    policies: tuple[OnNewWeights, ...] = ("keep", "recompute", "finish")
    for staleness in (1, 4):
        for policy in policies:
            yield row(f"split, staleness {staleness}, {policy}", workload.best(staleness, policy), base)
    for staleness in (1, 2, 4):
        partial = workload.run(staleness, None, "recompute")
        yield row(f"colocated, staleness {staleness}, recompute", partial, base)
    yield "\n| episodes a device | colocated, s a step | lanes in use | speed-up with staleness 0 | 1 | 2 | 4 |\n" + (
        "|" + "---|" * 7
    )
    for episodes in (16, 32, 64, 128):
        other = replace(workload, episodes_per_device=episodes)
        base = other.run(0, None)
        gains = [f"{other.best(staleness).tokens_s / base.tokens_s:.2f}" for staleness in (0, 1, 2, 4)]
        yield f"| {episodes} | {base.step_s:.0f} | {base.lanes_in_use:.0f} | {' | '.join(gains)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--episodes-per-device", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6, help="that are measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", nargs="+", choices=["split", "elastic"], default=["split", "elastic"])
    parser.add_argument("--share", type=Fraction, help="of the devices for generation; default: the best one")
    parser.add_argument("--switch-s", type=float, default=COSTS.switch_s, help="to change sides, each way")
    parser.add_argument("--uniform-share", type=float, default=0.0, help="of the groups, which are replaced")
    parser.add_argument("--vary", action="store_true", help="other policies and batch sizes on the first devices")
    args = parser.parse_args()
    workloads = [
        Workload(
            devices=devices,
            episodes_per_device=args.episodes_per_device,
            steps=args.steps,
            seed=args.seed,
            share=args.share,
            costs=replace(COSTS, switch_s=args.switch_s, uniform_share=args.uniform_share),
        )
        for devices in args.devices
    ]
    for line in variants(workloads[0]) if args.vary else scales(workloads, args.staleness, args.layouts):
        print(line, flush=True)


if __name__ == "__main__":
    main()
