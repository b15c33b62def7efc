# SPDX-License-Identifier: Apache-2.0
"""Plans: of a recipe before it runs, and of a run afterwards, as lines of text and as values for JSON. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from podium.controller.simulation.costs import LogNormal
from podium.errors import RecipeError, RunFolderError
from podium.planning.adapter_choice import adapter_facts
from podium.planning.choices import RecipeChoices, recipe_changes
from podium.planning.devices import Device
from podium.planning.fixed_data_plans import plan_fixed_data, plan_fixed_data_run
from podium.planning.memory import refusal
from podium.planning.model_shape import shape_of
from podium.planning.plan_report import Plan, device_notes, listed, memory_values, prediction_values, seconds_text
from podium.planning.prediction import Configuration, Prediction
from podium.planning.run_costs import Estimate, RunCosts, estimate_costs
from podium.planning.run_records import configuration_of, opened, program_of, read_records, step_lines, workload_of
from podium.planning.search import STALENESSES, MeasuredChoices, SearchResult, predicted, search
from podium.planning.shape_costs import USUAL_PROMPT, Episodes
from podium.recipe import OnPolicyRecipe, Recipe, SpmdRecipe
from podium.recipe.generator_mesh import KEY as GENERATOR_KEY

# Before a run nothing is known of its answers but their limit.
_USUAL_PART, _USUAL_SIGMA = 4, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What a recipe does not say of its episodes; None: a usual value."""

    prompt_tokens: int | None = None
    answer_tokens: int | None = None  # the median
    grading_s: float = 0.0


_USUAL = Assumptions()


def plan_runs(
    runs: Sequence[Path], *, devices: Sequence[int] = (), stalenesses: Sequence[int] | None = None,
    steps: int | None = None,
) -> Plan:  # fmt: skip
    """What the first run would have done in another configuration. Further runs, of other layouts, tell what it cannot:
    what new weights and changing sides cost, and the costs of their layouts. `stalenesses`: default 0, 1, 2 and 4; of a
    run that generates nothing there are none. `steps`: of which device-hours are told; default: the recipe's."""
    folder = opened(runs[0])
    recipe = program_of(folder)
    if isinstance(recipe, SpmdRecipe):
        if stalenesses is not None or len(runs) > 1:
            what = "--staleness" if stalenesses is not None else "a second --from"
            raise RunFolderError(
                f"{what}: {runs[0]} is a run of {recipe.program}, which generates nothing. Leave it out."
            )
        return plan_fixed_data_run(runs[0], recipe, step_lines(folder), devices, steps or recipe.steps)
    _require_single(recipe)
    first, *others = [read_records(run) for run in runs]
    run = estimate_costs(first, others=others)
    if steps is not None:
        run = replace(run, workload=replace(run.workload, steps=steps))
    measured = MeasuredChoices(run.costs_of, run.workload if run.knows_lanes else None)
    base = predicted(measured, run.workload, run.configuration)
    found = search(
        measured, run.workload, run.configuration, devices=devices or (run.configuration.devices,),
        stalenesses=STALENESSES if stalenesses is None else stalenesses,
    )  # fmt: skip
    best = min(found.fastest, base, key=lambda each: each.step_s)
    return Plan(
        title=f"{runs[0]}: {run.configuration.name}",
        facts=tuple(_run_facts(run)),
        base=base,
        found=found,
        notes=(*_run_notes(run, found), *_unmeasured(run, best.configuration)),
        values={
            "run": str(runs[0]), "measured_step_s": run.measured_step_s, "simulated_step_s": run.simulated_step_s,
            "error": run.error, "costs": [_estimate_values(each) for each in run.estimates],
            "current": prediction_values(base),
        },
        changes=recipe_changes(first.recipe, run.configuration, best.configuration),
    )  # fmt: skip


def _run_facts(run: RunCosts) -> list[str]:
    facts = [
        f"measured: {seconds_text(run.measured_step_s)} a step over {run.num_steps} steps; the same steps simulated: "
        f"{run.error:+.1%}"
    ]
    for each in run.estimates:
        error = "" if each.error is None else f", median error {each.error:.1%}"
        kind = "assumed" if each.quality == "assumed" else "from"
        facts.append(f"{each.name}: {seconds_text(each.value)} ({kind} {each.how}{error})")
    return facts


def _run_notes(run: RunCosts, found: SearchResult) -> list[str]:
    notes = []
    if not run.is_reproduced:
        notes.append(
            f"the simulation is {run.error:+.0%} from the measured steps: take the predictions as an order at best. "
            "Tools of episodes and other programs on the machine are not simulated."
        )
    assumed = [each.name for each in run.estimates if each.quality == "assumed"]
    if assumed:
        notes.append(
            f"assumed, because this run does not tell: {'; '.join(assumed)}. A second --from with a run of another "
            "layout may tell."
        )
    if any(choice.best.configuration.staleness for choice in found.choices):
        notes.append("staleness makes steps faster, and training less on-policy: compare rewards, not only times.")
    return notes


def _unmeasured(run: RunCosts, best: Configuration) -> list[str]:
    """Which choices of the winner lie outside of what the run measured, and what was not looked at."""
    base, notes = run.configuration, list[str]()
    if best.lanes != base.lanes:
        low, high = run.decoded_lanes or (0.0, 0.0)
        measured = (
            f"decoding was measured with {low:.0f} to {high:.0f} lanes"
            if high
            else "what a lane costs was found from whole rollouts, not from decoding steps"
        )
        outside = " That is outside of it: a straight line was taken." if high and best.lanes > 1.1 * high else ""
        notes.append(
            f"rollout.max_running {best.lanes}: {measured}.{outside} Whether the KV cache holds so many was not looked "
            "at."
        )
    if run.has_turns:
        notes.append(
            "other rollout.max_running were not looked at: episodes of this run wait for tools or an environment, and "
            "lanes that wait are not simulated. These waits are taken as generation, also with other devices."
        )
    elif not run.knows_lanes:
        notes.append("other rollout.max_running were not looked at: this run does not tell what a lane costs.")
    if best.num_learners != base.num_learners:
        notes.append(
            f"{best.num_learners} learners: updates were measured with {base.num_learners}. Their time was taken in "
            "proportion to the tokens of a learner, without what collectives cost and whether the memory suffices."
        )
    if 0 < run.micro_batches <= 1 and best.num_learners >= base.num_learners:
        notes.append(
            "other micro_batch_tokens were not looked at: every optimizer step of this run was one micro-batch, so "
            "that a larger one changes nothing."
        )
    else:
        known = f" of {run.micro_batches:.3g} micro-batches" if run.micro_batches > 1 else ""
        notes.append(
            f"other micro_batch_tokens were not looked at: a run whose updates{known} have one size does not tell what "
            "another takes. `podium plan RECIPE` predicts them from the shape of the model."
        )
    return notes


def _estimate_values(each: Estimate) -> dict[str, Any]:
    return {"name": each.name, "value": each.value, "unit": each.unit, "quality": each.quality, "error": each.error}


def plan_recipe(
    recipe: Recipe, device: Device, *, devices: Sequence[int] = (), stalenesses: Sequence[int] = STALENESSES,
    assumptions: Assumptions = _USUAL, steps: int | None = None,
) -> Plan:  # fmt: skip
    """What a recipe would do on a device: memory by phase, step time, and the best layout, lanes and micro-batch.
    Raises a RecipeError for a run that cannot fit, whatever is changed of it."""
    if isinstance(recipe, SpmdRecipe):
        return plan_fixed_data(recipe, device, devices, steps or recipe.steps)
    if not isinstance(recipe, OnPolicyRecipe):
        raise RecipeError(f"program: {recipe.program} has no plan.")
    _require_single(recipe)
    base, workload = configuration_of(recipe, kind=device.kind), workload_of(recipe)
    workload = workload if steps is None else replace(workload, steps=steps)
    episodes, assumed = _episodes(recipe, assumptions, shape_of(recipe.model).context)
    choices = RecipeChoices(recipe, device, episodes, base, workload)
    memory = choices.memory(base)
    mesh = choices.mesh(base)
    problem = refusal(memory, recipe, choice=mesh)
    try:
        found = search(choices, workload, base, devices=devices or (base.devices,), stalenesses=stalenesses)
    except RecipeError as error:
        raise (problem or error) from error
    now = predicted(choices, workload, base) if problem is None else None
    best = found.fastest if now is None else min(found.fastest, now, key=lambda each: each.step_s)
    facts = [*([] if mesh is None else [mesh.text]), *memory.lines(), *adapter_facts(recipe, device)]
    facts += [] if now is None else _phase_facts(now)
    return Plan(
        title=f"{recipe.program} on {device.name}: {base.name}",
        facts=(*facts, *([] if problem is None else [f"as it is, it cannot run. {problem}"])),
        base=now,
        found=found,
        notes=(assumed, *_turn_notes(recipe), *device_notes(device)),
        values={
            "device": device.name, "memory": memory_values(memory),
            "current": None if now is None else prediction_values(now),
        },
        changes=recipe_changes(recipe, base, best.configuration),
        reasons=tuple(choices.reasons(best.configuration)),
    )  # fmt: skip


def _turn_notes(recipe: OnPolicyRecipe) -> list[str]:
    if recipe.environment is None:
        return []
    return [
        "environment: turns and waits for tools are not simulated. Episodes take longer than predicted, and "
        "rollout.max_running may gain more or less."
    ]


def _require_single(recipe: Recipe) -> None:
    """Plans count one device for each generator."""
    if isinstance(recipe, OnPolicyRecipe) and recipe.placement.generator_tensor > 1:
        raise RecipeError(
            f"{GENERATOR_KEY}: plans know generators of one device only, not of {recipe.placement.generator_tensor}. "
            "`podium check` says what the run takes of memory."
        )


def _episodes(recipe: OnPolicyRecipe, assumptions: Assumptions, context: int) -> tuple[Episodes, str]:
    """Their lengths, and what was assumed of them. `context`: of the model."""
    limit = recipe.rollout.max_new_tokens
    answer = assumptions.answer_tokens or max(1, limit // _USUAL_PART)
    room = max(1, (recipe.data.max_length or context) - limit)
    prompt = assumptions.prompt_tokens or min(USUAL_PROMPT, room)
    episodes = Episodes(
        prompt_tokens=prompt,
        answer_tokens=LogNormal(median=min(answer, limit), sigma=_USUAL_SIGMA, cap=limit),
        samples_per_prompt=recipe.rollout.samples_per_prompt,
        grading_s=LogNormal(median=assumptions.grading_s),
    )
    return episodes, (
        f"assumed: prompts of {prompt} tokens, answers of {min(answer, limit)} in the median and {limit} at most, "
        f"{assumptions.grading_s:g} s to grade one. Change it with --prompt-tokens, --answer-tokens and --grading; "
        "after some steps, podium plan --from RUN knows."
    )


def _phase_facts(now: Prediction) -> list[str]:
    phases = listed({name: seconds for name, seconds in now.phases.items() if seconds > 1e-6})
    return [f"a step takes {seconds_text(now.step_s)} ± {seconds_text(now.spread_s)}: {phases}"]


def device_numbers(text: str) -> tuple[int, ...]:
    """`8`, `2,4,8`, or `1-1024`: all powers of two between both, and both."""
    try:
        if "-" in text:
            low, high = (int(part) for part in text.split("-"))
            powers = [2**power for power in range(11) if low < 2**power < high]
            found = (low, *powers, high) if low < high else (low,) if low == high else ()
        else:
            found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or max(found) > 1024:
        raise RecipeError(
            f"--devices: {text} is not a number of devices from 1 to 1024, a list (2,4) or a range (1-64)."
        )
    return found
