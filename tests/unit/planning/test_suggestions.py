# SPDX-License-Identifier: Apache-2.0
"""Suggestions for runs with a problem that was put into them, alarms that are more important, and the command."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from helpers.simulated_runs import COSTS, simulated, simulated_recipe
from podium.cli import app
from podium.controller.simulation.costs import CostModel, GenerationCost, LogNormal, UpdateCost
from podium.errors import RecipeError, RunFolderError
from podium.planning.alarms import alarm_of
from podium.planning.prediction import Part, part_of
from podium.planning.run_costs import estimate_costs
from podium.planning.run_records import configuration_of, read_records, workload_of
from podium.planning.suggestion import candidates, stage_lines, suggest, suggestion_lines
from podium.recipe import parse_recipe

SPLIT = {"layout": "split", "devices": 2}
ROLLOUT = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_running": 16}
QUICK = replace(COSTS, update=UpdateCost(token_s=0.0005, constant_s=0.1), switch_s=0.05, publish_s=0.05)


def ran(folder: Path, costs: CostModel, **changes: Any) -> Path:
    """The folder of a simulated run, with gradients that are not 0: simulated learners learn nothing."""
    recipe = simulated_recipe(folder, **{"rollout": ROLLOUT, "steps": 12, **changes})
    run = simulated(recipe, costs).result.folder
    rewrite(run, lambda step: {"grad_norm": 1.0, "loss": 0.1 * (-1) ** step})
    return run


def rewrite(run: Path, change: Callable[[int], dict[str, float]]) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    changed = [json.dumps({**line, **change(line["step"])}) + "\n" for line in lines]
    (run / "metrics.jsonl").write_text("".join(changed))


def keys(run: Path) -> dict[str, tuple[str, str]]:
    found = suggest(estimate_costs(read_records(run)), budget_s=60.0)
    return {} if found is None else found.base.changes_to(found.change)


@pytest.mark.slow
def test_slow_graders_are_too_few(tmp_path: Path) -> None:
    """16 gradings of 4 s on two graders take 32 s, beside seconds of everything else."""
    costs = replace(QUICK, grading_s=LogNormal(median=4.0), graders=2)
    run = ran(tmp_path, costs, grading={"workers": 2})

    assert keys(run) == {"grading.workers": ("2", "4")}
    (line,) = suggestion_lines(run)
    assert line.startswith("suggestion: generators wait ")
    assert "% for grading: grading.workers 2 → 4 saves about " in line


LAYOUTS = {
    "colocated": {"devices": 2},
    "split": {"layout": "split", "devices": 2},
    "elastic": {"layout": "elastic", "devices": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "staleness"), [("colocated", 0), ("split", 0), ("split", 1), ("elastic", 0), ("elastic", 1)]
)
@pytest.mark.parametrize(("grading_s", "sigma"), [(2.0, 0.0), pytest.param(2.0, 0.5, marks=pytest.mark.slow)])
def test_graders_that_limit_a_run_are_said_with_what_more_of_them_save(
    tmp_path: Path, layout: str, staleness: int, grading_s: float, sigma: float
) -> None:
    """16 gradings on two graders take longer than everything else of a step; with four they take half of that. A lane
    costs as much as is assumed of a run with staleness: simulated engines record no summaries of their steps."""
    generation, grading = GenerationCost(weights_s=0.02, lane_s=0.0002), LogNormal(median=grading_s, sigma=sigma)
    costs = replace(QUICK, generation=generation, grading_s=grading, graders=2)
    changes: dict[str, Any] = {
        "placement": LAYOUTS[layout],
        "rollout": {**ROLLOUT, "staleness": staleness},
        "steps": 22,
    }
    before = ran(tmp_path / "before", costs, grading={"workers": 2}, **changes)
    after = ran(tmp_path / "after", costs, grading={"workers": 4}, **changes)
    found = suggest(estimate_costs(read_records(before)), budget_s=60.0)

    assert found is not None
    assert found.base.changes_to(found.change) == {"grading.workers": ("2", "4")}
    assert "grading" in found.reason or "graders are at work" in found.reason
    saved_s = read_records(before).step_s - read_records(after).step_s
    assert found.saved_s == pytest.approx(saved_s, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "staleness"), [("colocated", 0), ("split", 0), ("split", 1), ("elastic", 0), ("elastic", 1)]
)
@pytest.mark.parametrize("graders", [2, None], ids=["one at a time", "all at a time"])
def test_graders_that_limit_nothing_are_not_suggested(
    tmp_path: Path, layout: str, staleness: int, graders: int | None
) -> None:
    """16 gradings of 0.1 s on two graders, 0.8 s beside some seconds of generation, and gradings that wait together."""
    seconds = 0.1 if graders else 1.0
    costs = replace(QUICK, grading_s=LogNormal(median=seconds, sigma=0.3), graders=graders)
    run = ran(
        tmp_path, costs, grading={"workers": 2}, placement=LAYOUTS[layout], rollout={**ROLLOUT, "staleness": staleness}
    )
    assert "grading.workers" not in keys(run)
    assert not any("grading.workers" in line for line in suggestion_lines(run))


def test_one_change_is_looked_at_however_busy_the_machine_is(tmp_path: Path) -> None:
    run = ran(tmp_path, replace(QUICK, grading_s=LogNormal(median=4.0), graders=2), grading={"workers": 2}, steps=6)
    found = suggest(estimate_costs(read_records(run)), budget_s=-1.0)
    assert found is not None
    assert found.base.changes_to(found.change) == {"grading.workers": ("2", "4")}


@pytest.mark.slow
def test_what_is_saved_is_what_the_change_saves(tmp_path: Path) -> None:
    costs = replace(QUICK, grading_s=LogNormal(median=4.0), graders=2)
    before = ran(tmp_path / "before", costs, grading={"workers": 2})
    after = ran(tmp_path / "after", costs, grading={"workers": 4})
    found = suggest(estimate_costs(read_records(before)), budget_s=60.0)

    assert found is not None
    saved_s = read_records(before).step_s - read_records(after).step_s
    assert found.saved_s == pytest.approx(saved_s, rel=0.12)


@pytest.mark.slow
def test_a_slow_generator_needs_devices_or_overlap(tmp_path: Path) -> None:
    """One of four devices generates, for ten times as long as the others learn."""
    costs = replace(QUICK, generation=GenerationCost(weights_s=0.001, lane_s=0.01), publish_s=0.1)
    placement = {"layout": "split", "devices": 4, "rollout_devices": 1}
    changed = keys(ran(tmp_path, costs, placement=placement))
    assert changed in (
        {"placement.rollout_devices": ("1", "2")},
        {"placement.layout": ("split", "elastic")},
        {"placement.layout": ("split", "colocated"), "placement.rollout_devices": ("1", "null")},
    )


def test_changes_leave_a_recipe_that_is_accepted(tmp_path: Path) -> None:
    """A colocated recipe has no key of rollout devices, and more generators than may join are none."""
    placement = {"layout": "split", "devices": 8, "rollout_devices": 2, "max_rollout_devices": 3}
    recipe = simulated_recipe(tmp_path, placement=placement)
    base = configuration_of(recipe, "cpu")
    found = list(candidates(base, workload_of(recipe), has_graders=True, knows_lanes=True))

    assert {(each.layout, each.rollout_devices) for each in found} >= {
        ("colocated", None), ("elastic", 2), ("split", 1), ("split", 3)
    }  # fmt: skip
    for each in found:
        values = recipe.stored_values()
        for key, (_, new) in base.changes_to(each).items():
            section, _, name = key.partition(".")
            values[section][name] = yaml.safe_load(new)
        assert configuration_of(parse_recipe(values), "cpu") == each
    four = base.placed("split", rollout_devices=4)
    assert base.changes_to(four)["placement.max_rollout_devices"] == ("3", "null")


def test_too_few_lanes(tmp_path: Path) -> None:
    """Answers of one length on two lanes of 16: a step of the engine costs the same for four."""
    costs = replace(QUICK, generation=GenerationCost(weights_s=0.05), answer_tokens=LogNormal(median=40.0, sigma=0.3))
    rollout = {**ROLLOUT, "max_running": 2}
    assert keys(ran(tmp_path, costs, rollout=rollout)) == {"rollout.max_running": ("2", "4")}


@pytest.mark.slow
def test_other_lanes_are_not_suggested_where_their_cost_is_assumed(tmp_path: Path) -> None:
    """A lane costs five times what the weights do, so that more lanes gain little. A run with staleness does not tell
    that, and a usual cost would say that twice as many save half of the step."""
    costs = replace(QUICK, generation=GenerationCost(weights_s=0.002, lane_s=0.01))
    rollout = {**ROLLOUT, "max_running": 2, "staleness": 1}
    run = ran(tmp_path, costs, rollout=rollout, placement=SPLIT, steps=10)
    found = estimate_costs(read_records(run))

    assert found.is_reproduced
    assert not found.knows_lanes
    assert "rollout.max_running" not in keys(run)
    assert not any("rollout.max_running" in line for line in suggestion_lines(run))


def test_lanes_of_episodes_with_tools_are_not_suggested(tmp_path: Path) -> None:
    """As with too few lanes: there twice as many are suggested."""
    costs = replace(QUICK, generation=GenerationCost(weights_s=0.05), answer_tokens=LogNormal(median=40.0, sigma=0.3))
    run = ran(tmp_path, costs, rollout={**ROLLOUT, "max_running": 2})
    found = estimate_costs(read_records(run))
    with_tools = replace(found, has_turns=True)

    assert "rollout.max_running 2 → 4" in getattr(suggest(found, budget_s=60.0), "text", "")
    assert with_tools.knows_lanes is False
    more = suggest(with_tools, budget_s=60.0)
    assert more is None or "rollout.max_running" not in more.text


@pytest.mark.slow
def test_a_large_batch_gets_a_suggestion_from_a_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 episodes a step, simulated as 16 of them with a quarter of the lanes: the same change, and the same gain."""
    costs = replace(QUICK, grading_s=LogNormal(median=2.0), graders=4)
    rollout = {"prompts_per_step": 16, "samples_per_prompt": 4, "max_running": 64}
    run = ran(tmp_path, costs, rollout=rollout, grading={"workers": 4}, steps=6)
    whole = suggest(estimate_costs(read_records(run)), budget_s=60.0)
    monkeypatch.setattr("podium.planning.suggestion._MOST_EPISODES", 16)
    monkeypatch.setattr("podium.planning.suggestion._BUDGET_S", 60.0)
    (line,) = suggestion_lines(run)
    records = read_records(run)
    part = part_of(records.workload(), records.configuration(), 16)
    assert part == Part(groups=4)
    found = suggest(estimate_costs(records, part=part), budget_s=60.0)

    assert whole is not None
    assert found is not None
    assert found.base.changes_to(found.change) == whole.base.changes_to(whole.change) == {"grading.workers": ("4", "8")}
    assert found.saved_s == pytest.approx(whole.saved_s, rel=0.1)
    assert line == f"suggestion: {found.text}"
    assert line.endswith(" a step (from a simulation of 1/4 of each batch)")


def test_a_batch_that_cannot_be_divided_names_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.planning.suggestion._MOST_EPISODES", 4)
    run = ran(tmp_path, QUICK, steps=5)
    assert suggestion_lines(run) == [f"what would be faster: podium plan --from {run}"]


def test_a_pipeline_has_a_line_for_each_stage_that_has_one(tmp_path: Path) -> None:
    costs = replace(QUICK, grading_s=LogNormal(median=4.0), graders=2)
    run = ran(tmp_path, costs, grading={"workers": 2}, steps=6)
    pipeline = run.parent
    values = {"order": ["simulated", "later"], "parents": {}}
    (pipeline / "pipeline.json").write_text(json.dumps(values))

    (line,) = stage_lines(pipeline, budget_s=60.0)
    assert line.startswith("stage simulated: suggestion: ")
    assert "grading.workers 2 → 4" in line
    assert stage_lines(pipeline, budget_s=-1.0) == []
    assert stage_lines(tmp_path) == []


@pytest.mark.slow
def test_overlap_is_suggested_with_its_price(tmp_path: Path) -> None:
    """Generation and update take about as long, one after the other."""
    costs = replace(
        COSTS, generation=GenerationCost(weights_s=0.05), answer_tokens=LogNormal(median=60.0, sigma=0.1),
        update=UpdateCost(token_s=0.003), publish_s=0.05,
    )  # fmt: skip
    run = ran(tmp_path, costs, placement=SPLIT)
    assert keys(run) == {"rollout.staleness": ("0", "1")}
    assert "less on-policy" in suggestion_lines(run)[0]


@pytest.mark.slow
def test_a_run_that_nothing_makes_faster_gets_no_suggestion(tmp_path: Path) -> None:
    costs = replace(QUICK, generation=GenerationCost(weights_s=0.0001), update=UpdateCost(token_s=0.01))
    run = ran(tmp_path, costs, placement={"devices": 1})
    assert keys(run) == {}
    assert suggestion_lines(run) == []


@pytest.mark.slow
def test_no_suggestion_from_a_simulation_that_is_far_from_the_run(tmp_path: Path) -> None:
    costs = replace(QUICK, grading_s=LogNormal(median=4.0), graders=2)
    found = estimate_costs(read_records(ran(tmp_path, costs, grading={"workers": 2})))
    assert suggest(found) is not None
    assert suggest(replace(found, simulated_step_s=1.2 * found.repeated_s)) is None


@pytest.mark.slow
def test_the_suggestion_takes_a_moment_and_never_raises(tmp_path: Path) -> None:
    run = ran(tmp_path, replace(QUICK, grading_s=LogNormal(median=4.0), graders=2), grading={"workers": 2})
    began_s = time.perf_counter()
    assert suggestion_lines(run)
    assert time.perf_counter() - began_s < 20.0  # a second on a quiet machine
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert suggestion_lines(run) == []
    assert suggestion_lines(tmp_path / "nothing") == []


# --- alarms ---


def test_equal_rewards_are_an_alarm_only_while_they_last(tmp_path: Path) -> None:
    recipe = simulated_recipe(tmp_path)
    bad = {"reward/min": 0.0, "reward/max": 0.0, "groups/uniform": 1.0}
    found = [(step, {**values, **bad}) for step, values in steps()]
    assert "every episode has the same total reward" in str(alarm_of(recipe, found))
    later = [(step + 8, values) for step, values in steps()] + [(step + 16, values) for step, values in steps()]
    assert alarm_of(recipe, [*found, *later]) is None
    assert alarm_of(recipe, [*found, (9, steps()[0][1])]) is None  # one good step ends it


def steps(**last: float) -> list[tuple[int, dict[str, float]]]:
    """Eight healthy steps, the last two of which have other values."""
    healthy = {
        "loss": 0.1, "grad_norm": 1.0, "entropy": 2.0, "response/mean": 100.0, "episodes/truncated": 0.1,
        "reward/mean": 0.5, "reward/min": 0.0, "reward/max": 1.0, "groups/solve_rate": 0.5, "gap/mean": 1e-5,
        "kl/reference": 0.01, "lr": 1e-5, "groups/uniform": 0.1,
    }  # fmt: skip
    names = {name.replace("__", "/"): value for name, value in last.items()}
    return [(step, {**healthy, **(names if step > 6 else {})}) for step in range(1, 9)]


@pytest.mark.parametrize(
    ("last", "text"),
    [
        ({"skipped": 1.0}, "not finite"),
        ({"loss": float("nan")}, "not finite"),
        ({"grad_norm": 20.0}, "may diverge"),
        ({"gap__mean": 0.3}, "differ in their log-probs"),
        ({"entropy": 0.05}, "stops exploring"),
        ({"response__mean": 300.0}, "grown from 100 to 300 tokens"),
        ({"episodes__truncated": 0.8}, "80% of the answers are cut off"),
        ({"reward__mean": 0.9, "kl__reference": 0.4}, "may game the reward"),
        ({"reward__mean": 0.9, "groups__solve_rate": 0.2}, "fewer episodes are solved"),
    ],
)
def test_signs_in_the_metrics(tmp_path: Path, last: dict[str, float], text: str) -> None:
    recipe = simulated_recipe(tmp_path)
    assert alarm_of(recipe, steps()) is None
    found = alarm_of(recipe, steps(**last))
    assert found is not None
    assert text in found


def test_training_that_solves_what_heldout_answers_do_not(tmp_path: Path) -> None:
    """The share of solved held-out answers has not fallen: it was never there. Of 64 prompts, 0.5 has an error of
    0.0625, so that the difference has to be above 0.3 + 0.1875."""
    recipe = simulated_recipe(tmp_path)
    learned = steps(groups__solve_rate=1.0, reward__mean=1.0)

    def found(*solved: float, at: int = 8) -> str | None:
        evaluations = [(at - 2 * len(solved) + 2 * (n + 1), {"heldout/solved": each}) for n, each in enumerate(solved)]
        return alarm_of(recipe, learned, evaluations)

    text = found(0.0, 0.0)
    assert text is not None
    assert text.startswith("100% of the training episodes are solved, and 0% of the held-out answers at step 8")
    assert "the reward may pay for something else" in text
    assert found(0.0) == text
    assert found(0.5) is not None
    assert found(0.55) is None
    assert found(0.6, 0.7) is None
    assert found(0.3, at=6) is None  # half of the training episodes were solved then


def test_an_alarm_is_said_instead_of_a_suggestion(tmp_path: Path) -> None:
    run = ran(tmp_path, replace(QUICK, grading_s=LogNormal(median=4.0), graders=2), grading={"workers": 2})
    rewrite(run, lambda step: {"response/mean": 1_000.0 if step > 8 else 90.0})

    (line,) = suggestion_lines(run)
    assert line.startswith("look at this first: answers have grown")


# --- the command ---


@pytest.mark.slow
def test_podium_plan_from_a_run(tmp_path: Path) -> None:
    run = ran(tmp_path, COSTS, placement={"devices": 2})

    shown = CliRunner().invoke(app, ["plan", "--from", str(run)])
    as_json = CliRunner().invoke(app, ["plan", "--from", str(run), "--devices", "2,4", "--staleness", "1", "--json"])

    assert shown.exit_code == 0, shown.output
    assert "the same steps simulated" in shown.output
    assert "best: " in shown.output
    assert "split 1:1, staleness 2" in shown.output
    values = json.loads(as_json.output)
    assert values["current"]["layout"] == "colocated"
    assert {each["devices"] for each in values["predictions"]} == {2, 4}
    assert {each["staleness"] for each in values["predictions"][1:]} == {1}
    for each in values["predictions"]:
        assert sum(each["phases_s"].values()) == pytest.approx(each["step_s"], rel=1e-6)


def test_podium_plan_says_what_is_missing(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert "give a recipe, or a run" in run(app, ["plan"]).output
    assert "give a recipe, or a run" in run(app, ["plan", "a.yaml", "--from", "runs/a"]).output
    missing = run(app, ["plan", "--from", str(tmp_path / "none")])
    assert isinstance(missing.exception, RunFolderError)
    assert "there is no run folder" in str(missing.exception)
    short = ran(tmp_path, COSTS, steps=2)
    assert "needs 4" in str(run(app, ["plan", "--from", str(short)]).exception)
    wrong = run(app, ["plan", "--from", str(short), "--devices", "none"])
    assert isinstance(wrong.exception, RecipeError)
