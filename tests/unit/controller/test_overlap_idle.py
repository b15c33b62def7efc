# SPDX-License-Identifier: Apache-2.0
"""What generators and learners wait for while generation overlaps updates: seconds that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.simulated_runs import COSTS, metrics_by_step, simulated, simulated_recipe
from podium.controller.layout import ROLLOUT
from podium.controller.overlap_meter import apportioned
from podium.controller.simulation.controlled import simulate_run
from podium.controller.simulation.costs import CostModel, GenerationCost, LogNormal, SimulatedSlowness, UpdateCost
from podium.controller.step_log import step_view
from podium.programs.grpo import grpo
from podium.runs.folder import RunFolder

# One token a second in every lane, answers of 10 tokens.
PLAIN = CostModel(
    generation=GenerationCost(weights_s=1.0), answer_tokens=LogNormal(median=10.0), update=UpdateCost(token_s=0.1)
)
CAUSES = ("prompts", "tail", "grading", "weights", "other_role", "drain", "controller")


def idle(values: dict[str, float]) -> dict[str, float]:
    """The causes that a step has seconds of, and that no other is named."""
    found = {name.removeprefix("rollout/idle_s/"): value for name, value in values.items() if "rollout/idle_s/" in name}
    assert set(found) == set(CAUSES)
    assert sum(found.values()) == pytest.approx(values["rollout/idle_s"])
    return {cause: seconds for cause, seconds in found.items() if seconds > 1e-9}


def test_a_generator_that_is_faster_waits_for_the_learner(tmp_path: Path) -> None:
    """A group takes 10 s, an update of its 20 tokens 20 s. When a step is committed, the next one begins with the group
    that is there, and the generator has one more to do: it is idle for the other 10 s."""
    rollout = {"prompts_per_step": 1, "samples_per_prompt": 2, "max_running": 2, "staleness": 1}
    recipe = simulated_recipe(tmp_path, rollout=rollout, placement={"layout": "split", "devices": 2}, steps=6)

    run = simulated(recipe, replace(PLAIN, update=UpdateCost(token_s=1.0)))

    metrics = metrics_by_step(run.result.folder)
    for step in (3, 4, 5):
        assert metrics[step]["step_s"] == pytest.approx(20.0)
        assert idle(metrics[step]) == pytest.approx({"other_role": 10.0})
        assert metrics[step]["learner/idle_s"] == pytest.approx(0.0)


def test_a_learner_that_is_faster_waits_for_generation_and_rewards(tmp_path: Path) -> None:
    """Of 10 s of a step, 2 s are the update and the last 3 s grade its only group. The generator has always one more
    to do."""
    rollout = {"prompts_per_step": 1, "samples_per_prompt": 2, "max_running": 2, "staleness": 1}
    recipe = simulated_recipe(tmp_path, rollout=rollout, placement={"layout": "split", "devices": 2}, steps=8)

    run = simulated(recipe, replace(PLAIN, grading_s=LogNormal(median=3.0)))

    metrics = metrics_by_step(run.result.folder)
    for step in (4, 5, 6):
        assert idle(metrics[step]) == {}
        assert metrics[step]["learner/idle_s"] == pytest.approx(8.0)
        assert metrics[step]["learner/idle_s/other_role"] == pytest.approx(5.0)
        assert metrics[step]["learner/idle_s/grading"] == pytest.approx(3.0)
        assert metrics[step]["learner/idle_s/tail"] == pytest.approx(0.0)


def test_the_faster_of_two_generators_waits_for_the_learner_and_then_for_the_tail(tmp_path: Path) -> None:
    """Generator 1 takes 30 s for a group, generator 0 takes 10 s. An update of two groups takes 2 s, and four may be
    under way.

    0 s: 0 has groups 0 and 2, 1 has groups 1 and 3. 20 s: step 1 begins with 0 and 2, and 0 has nothing to do. 22 s:
    it is committed, and 0 gets groups 4 and 5, until 42 s. 60 s: group 3 ends, and step 2 begins with 1 and 3. So from
    20 s to 60 s generator 0 waits for the learner for 2 s, and for the tail for 18 s; the learner waits for 20 s while
    both have episodes, and for 18 s for the tail."""
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_running": 2, "staleness": 1}
    placement = {"layout": "split", "devices": 3, "rollout_devices": 2}
    recipe = simulated_recipe(tmp_path, rollout=rollout, placement=placement, steps=3)
    slow = SimulatedSlowness(at_s=0.0, pool=ROLLOUT, slot=1, seconds=1e6, factor=3.0)

    costs = replace(PLAIN, update=UpdateCost(token_s=0.05))
    run = simulate_run(grpo, recipe, RunFolder.create(recipe), costs, faults=[slow])

    metrics = metrics_by_step(run.result.folder)
    assert run.committed_s[:2] == pytest.approx([22.0, 62.0])
    assert idle(metrics[2]) == pytest.approx({"other_role": 1.0, "tail": 9.0})  # means over two generators
    assert metrics[2]["learner/idle_s/other_role"] == pytest.approx(20.0)
    assert metrics[2]["learner/idle_s/tail"] == pytest.approx(18.0)
    assert metrics[2]["learner/idle_s"] == pytest.approx(38.0)


def test_a_wait_for_an_episode_that_is_due_is_none_for_rewards(tmp_path: Path) -> None:
    """As before, with 3 s of grading: step 1 is committed at 25 s, and step 2 cannot start without group 3, which ends
    at 60 s. Groups 4 and 5 of generator 0 end at 35 s and 45 s. From then on the episodes of two groups have ended and
    a reward is missing for 3 s each, but it is group 3 that the learner waits for."""
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_running": 2, "staleness": 1}
    placement = {"layout": "split", "devices": 3, "rollout_devices": 2}
    recipe = simulated_recipe(tmp_path, rollout=rollout, placement=placement, steps=3)
    slow = SimulatedSlowness(at_s=0.0, pool=ROLLOUT, slot=1, seconds=1e6, factor=3.0)

    costs = replace(PLAIN, update=UpdateCost(token_s=0.05), grading_s=LogNormal(median=3.0))
    run = simulate_run(grpo, recipe, RunFolder.create(recipe), costs, faults=[slow])

    metrics = metrics_by_step(run.result.folder)
    assert run.committed_s[:2] == pytest.approx([25.0, 65.0])
    assert metrics[1]["time/grade_s"] == pytest.approx(3.0)
    assert metrics[2]["time/grade_s"] == pytest.approx(3.0)
    assert metrics[2]["time/wait_s"] == pytest.approx(35.0)
    assert metrics[2]["learner/idle_s/grading"] == pytest.approx(3.0)
    assert metrics[2]["learner/idle_s/other_role"] == pytest.approx(20.0)
    assert metrics[2]["learner/idle_s/tail"] == pytest.approx(15.0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["split", "elastic"])
@pytest.mark.parametrize("staleness", [1, 2])
def test_causes_add_up_where_nothing_is_even(tmp_path: Path, layout: str, staleness: int) -> None:
    placement = {"layout": layout, "devices": 4, "rollout_devices": 2}
    recipe = simulated_recipe(tmp_path, rollout={"staleness": staleness}, placement=placement, steps=8)

    metrics = metrics_by_step(simulated(recipe, COSTS).result.folder)

    for values in metrics.values():
        known = idle(values)
        assert known.get("controller", 0.0) == pytest.approx(0.0, abs=1e-6)  # messages take no time here
        of_learner = [values[f"learner/idle_s/{cause}"] for cause in ("tail", "other_role", "grading")]
        assert sum(of_learner) == pytest.approx(values["learner/idle_s"])
        assert values["learner/idle_s"] <= values["time/wait_s"] + values.get("time/grade_s", 0.0) + 1e-6


def test_the_step_line_shows_what_overlaps(tmp_path: Path) -> None:
    """Of a step of 10 s the learner waits for 8 s, and the generator never."""
    rollout = {"prompts_per_step": 1, "samples_per_prompt": 2, "max_running": 2, "staleness": 1}
    recipe = simulated_recipe(tmp_path, rollout=rollout, placement={"layout": "split", "devices": 2}, steps=8)
    values = metrics_by_step(simulated(recipe, replace(PLAIN, grading_s=LogNormal(median=3.0))).result.folder)[5]

    view = step_view(5, recipe, values)
    assert [fact for fact in view.own if fact[0] in ("age", "wait", "idle", "lent")] == [
        ("age", "1.0"), ("wait", "80%"), ("idle", "0%"),
    ]  # fmt: skip
    elastic = recipe.model_copy(update={"placement": recipe.placement.model_copy(update={"layout": "elastic"})})
    lent = dict(step_view(5, elastic, {**values, "lending/lent_s": 2.5, "rollout/idle_s": 1.0}).own)
    assert (lent["idle"], lent["lent"]) == ("10%", "25%")
    narrow = [label for label, _ in replace(view, eta_s=100.0, loss=0.0, grad_norm=1.0).fitting_facts(70)]
    assert {"age", "wait", "length"} <= set(narrow)
    assert "grad" not in narrow


@pytest.mark.parametrize("on_new_weights", ["keep", "finish"])
def test_new_weights_stop_a_generator_for_as_long_as_it_installs_them(tmp_path: Path, on_new_weights: str) -> None:
    """A group takes 10 s, of which an update takes 2 s, and the generator has always one more to do. Once in a step it
    installs weights for 0.5 s: with keep in the middle of a group, with finish between two. It is not idle then."""
    rollout = {"prompts_per_step": 1, "samples_per_prompt": 2, "max_running": 2, "staleness": 1}
    rollout |= {"on_new_weights": on_new_weights}
    recipe = simulated_recipe(tmp_path, rollout=rollout, placement={"layout": "split", "devices": 2}, steps=6)

    run = simulated(recipe, replace(PLAIN, publish_s=0.5))

    metrics = metrics_by_step(run.result.folder)
    for step in (3, 4, 5, 6):
        assert metrics[step]["step_s"] == pytest.approx(10.5)
        assert metrics[step]["rollout/install_s"] == pytest.approx(0.5)
        assert idle(metrics[step]) == {}
        assert metrics[step]["learner/idle_s/other_role"] == pytest.approx(metrics[step]["learner/idle_s"])
        assert metrics[step]["learner/idle_s"] == pytest.approx(8.5)


def test_lent_devices_generate_half_of_a_step_and_cost_two_switches(tmp_path: Path) -> None:
    """Four episodes of 10 s, one lane each on the generator and on the learner's device, which changes sides in 1 s;
    an update of 40 tokens takes 4 s.

    From a commit on: the generator has two episodes until 20 s. The learner's device is lent from 1 s on and has two
    until 21 s: the generator waits 1 s for this tail. Until 22 s the device is recalled, and until 26 s it learns: the
    generator waits for it, for a device that changes sides first and for the other role then."""
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_running": 1}
    placement = {"layout": "elastic", "devices": 2, "rollout_devices": 1}
    recipe = simulated_recipe(tmp_path, rollout=rollout, placement=placement, steps=5)

    run = simulated(recipe, replace(PLAIN, switch_s=1.0))

    metrics = metrics_by_step(run.result.folder)
    assert [later - earlier for earlier, later in pairwise(run.committed_s)] == pytest.approx([26.0] * 4)
    for step in (3, 4, 5):
        values = metrics[step]
        assert idle(values) == pytest.approx({"tail": 1.0, "prompts": 1.0, "other_role": 4.0})
        assert values["learner/idle_s"] == pytest.approx(0.0)
        assert values["lending/lent_s"] == pytest.approx(20.0)
        assert values["lending/switch_s"] == pytest.approx(2.0)
        assert values["lending/times"] == 1.0
        assert values["lending/tokens"] == 20.0
        assert values["lending/gain"] == pytest.approx(1.0)
        assert values["rollout/generated_tokens"] == 40.0
        assert (values["time/wait_s"], values["time/lend_s"]) == pytest.approx((21.0, 1.0))
        shown = dict(step_view(step, recipe, values).own)
        assert (shown["lent"], shown["idle"]) == ("77%", "23%")  # 20 s and 6 s of 26 s


def test_a_synchronous_run_has_none_of_them(tmp_path: Path) -> None:
    metrics = metrics_by_step(simulated(simulated_recipe(tmp_path, steps=2)).result.folder)
    assert not [name for name in metrics[2] if name.startswith(("rollout/idle_s", "learner/"))]


def test_what_the_controller_does_not_know_of_is_named_apart() -> None:
    known = {"tail": 2.0, "other_role": 1.0}
    assert apportioned(known, 5.0, "controller") == pytest.approx({
        "tail": 2.0, "other_role": 1.0, "controller": 2.0, "prompts": 0.0, "grading": 0.0, "weights": 0.0, "drain": 0.0,
        "tools": 0.0,
    })  # fmt: skip
    less = apportioned(known, 1.5, "tools")  # messages took half of what it believes
    assert (less["tail"], less["other_role"], less["tools"]) == pytest.approx((1.0, 0.5, 0.0))
    assert sum(apportioned({}, 4.0, "tools").values()) == 4.0
