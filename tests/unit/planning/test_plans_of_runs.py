# SPDX-License-Identifier: Apache-2.0
"""`podium plan --from` with other lanes and learners: what it suggests is faster with the true costs of the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.simulated_runs import COSTS, simulated, simulated_recipe
from podium.controller.simulation.costs import CostModel, GenerationCost, UpdateCost
from podium.planning.plans import plan_runs
from podium.planning.prediction import Configuration, Workload
from podium.planning.run_records import read_records
from podium.planning.search import MeasuredChoices

# Reading the weights is what decoding costs: with a quarter of the lanes a rollout takes four times as long.
WEIGHTS = replace(
    COSTS, generation=GenerationCost(weights_s=0.01, lane_s=0.0001), update=UpdateCost(token_s=0.0002, constant_s=0.1)
)


def ran(folder: Path, costs: CostModel, **changes: Any) -> Path:
    return simulated(simulated_recipe(folder, **{"steps": 12, **changes}), costs).result.folder


@pytest.mark.slow
def test_too_few_lanes_are_found_and_more_of_them_are_faster(tmp_path: Path) -> None:
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_running": 4}
    run = ran(tmp_path / "before", WEIGHTS, rollout=rollout)
    plan = plan_runs([run], stalenesses=(0,))

    lanes = int(plan.changes["rollout.max_running"])
    assert lanes in (8, 16)
    assert any(note.startswith(f"rollout.max_running {lanes}: ") and "KV cache" in note for note in plan.notes)
    after = ran(tmp_path / "after", WEIGHTS, rollout={**rollout, "max_running": lanes})
    before_s, after_s = read_records(run).step_s, read_records(after).step_s
    assert after_s < 0.9 * before_s
    assert plan.found.fastest.step_s == pytest.approx(after_s, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("micro_steps", "mini_batches", "says"),
    [
        (1, 1, "every optimizer step of this run was one micro-batch, so that a larger one changes nothing"),
        (2, 2, "every optimizer step of this run was one micro-batch"),
        (6, 2, "a run whose updates of 3 micro-batches have one size does not tell"),
        (None, 1, "a run whose updates have one size does not tell what another takes"),
    ],
)
def test_why_micro_batches_are_not_searched(
    tmp_path: Path, micro_steps: int | None, mini_batches: int, says: str
) -> None:
    run = ran(tmp_path, WEIGHTS, algorithm={"mini_batches": mini_batches})
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) | {"micro_steps": micro_steps} for line in metrics.read_text().splitlines()]
    kept_lines = [{name: value for name, value in line.items() if value is not None} for line in lines]
    metrics.write_text("".join(json.dumps(each) + "\n" for each in kept_lines))
    (note,) = [each for each in plan_runs([run], stalenesses=(0,)).notes if each.startswith("other micro_batch_tokens")]
    assert says in note


@pytest.mark.slow
def test_lanes_that_suffice_are_left(tmp_path: Path) -> None:
    run = ran(tmp_path, WEIGHTS, rollout={"prompts_per_step": 4, "samples_per_prompt": 4, "max_running": 16})

    assert "rollout.max_running" not in plan_runs([run], stalenesses=(0,)).changes


@pytest.mark.slow
def test_other_learners_are_said_to_be_outside_of_what_was_measured(tmp_path: Path) -> None:
    """Updates take most of the time, and one of four devices learns."""
    slow = replace(WEIGHTS, update=UpdateCost(token_s=0.01, constant_s=0.1))
    placement = {"layout": "split", "devices": 4, "rollout_devices": 3}
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_running": 16}
    run = ran(tmp_path / "before", slow, placement=placement, rollout=rollout)
    plan = plan_runs([run], stalenesses=(0,))
    best = plan.found.fastest.configuration

    assert best.num_learners > 1
    assert any(note.startswith(f"{best.num_learners} learners: updates were measured with 1.") for note in plan.notes)
    assert any(note.startswith("other micro_batch_tokens were not looked at") for note in plan.notes)
    placed = {"layout": best.layout, "devices": 4}
    placed |= {} if best.rollout_devices is None else {"rollout_devices": best.rollout_devices}
    after = ran(tmp_path / "after", slow, placement=placed, rollout=rollout)
    assert read_records(after).step_s < read_records(run).step_s


def test_lanes_are_not_searched_where_a_run_does_not_tell_what_one_costs() -> None:
    one = Configuration(layout="colocated", devices=1, lanes=8)
    workload = Workload(groups_per_step=8, samples=8, steps=3)

    assert MeasuredChoices(lambda _: COSTS).variants(one) == (one,)
    lanes = [each.lanes for each in MeasuredChoices(lambda _: COSTS, workload).variants(one)]
    assert lanes == [8, 16, 32, 64, 4, 2]
