# SPDX-License-Identifier: Apache-2.0
"""Plans: of a recipe before it runs, and of a run afterwards, as lines of text and as values for JSON. Torch-free."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from podium.controller.layout import num_learners
from podium.controller.simulation.costs import LogNormal
from podium.errors import RecipeError, RunFolderError
from podium.observe.formats import table
from podium.planning.devices import Device
from podium.planning.memory import MemoryPlan, memory_of, refusal
from podium.planning.model_shape import shape_of
from podium.planning.prediction import Prediction
from podium.planning.run_costs import Estimate, RunCosts, estimate_costs, fit_line
from podium.planning.run_records import configuration_of, opened, program_of, read_records, step_lines, workload_of
from podium.planning.search import STALENESSES, SearchResult, predicted, search, why
from podium.planning.shape_costs import StepTime, cost_model, training_step
from podium.planning.shape_costs import Workload as Episodes
from podium.recipe import OnPolicyRecipe, Recipe, SpmdRecipe

# A step of fixed data that is shorter takes as long as starting its kernels.
_SMALL_STEP_S = 0.02
# Before a run nothing is known of its answers but their limit.
_USUAL_PART, _USUAL_SIGMA = 4, 0.8
_USUAL_PROMPT = 256
# A run of fixed data needs so many steps, without the first.
_FEWEST_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What a recipe does not say of its episodes; None: a usual value."""

    prompt_tokens: int | None = None
    answer_tokens: int | None = None  # the median
    grading_s: float = 0.0


_USUAL = Assumptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What there is to say: facts, predictions for configurations, and why the best one is the best."""

    title: str
    facts: tuple[str, ...]
    base: Prediction | None
    found: SearchResult | None
    notes: tuple[str, ...]
    values: Mapping[str, Any]  # of the facts, for JSON

    def lines(self) -> list[str]:
        """Readable text."""
        lines = [self.title, *(f"  {fact}" for fact in self.facts)]
        if self.found is not None and self.base is not None:
            lines += ["", *table([_HEADER, *(_row(each, self.base) for each in self._shown())])]
            lines += ["", *self._reasons(self.found, self.base)]
        return [*lines, *self.notes]

    def as_json(self) -> dict[str, Any]:
        """Values of the same."""
        shown = [_values(each) for each in self._shown()]
        best = None if self.found is None else _values(self.found.fastest)
        return {"title": self.title, **self.values, "predictions": shown, "best": best, "notes": list(self.notes)}

    def _shown(self) -> list[Prediction]:
        """One number of devices: every layout. Several: the best of each, and the best on-policy."""
        if self.found is None or self.base is None:
            return []
        choices = self.found.choices
        shown = [self.base]
        for choice in choices:
            some = choice.predictions if len(choices) == 1 else (choice.best, choice.on_policy)
            for each in some:
                if all(each.configuration != other.configuration for other in shown):
                    shown.append(each)
        return shown

    def _reasons(self, found: SearchResult, base: Prediction) -> list[str]:
        best = min(found.fastest, base, key=lambda each: each.step_s)
        lines = [f"best: {why(best, base)}"]
        changes = base.configuration.changes_to(best.configuration)
        if changes:
            lines.append("  set " + ", ".join(f"{key}: {new}" for key, (_, new) in changes.items()))
        fresh = min(
            [choice.on_policy for choice in found.choices if not choice.on_policy.configuration.staleness],
            key=lambda each: each.step_s,
            default=None,
        )
        if best.configuration.staleness and fresh is not None:
            lines.append(f"best on-policy: {fresh.configuration.name}, {_seconds(fresh.step_s)} a step")
        if len(found.choices) > 1:
            cheap = found.cheapest
            lines.append(f"cheapest: {cheap.configuration.name}, {cheap.gpu_hours:.3g} device-hours")
        if not found.is_complete:
            lines.append(f"after {found.seconds:.0f} s the search ended before all numbers of devices were looked at")
        return lines


_HEADER = ("configuration", "s/step", "±", "of now", "trained tokens/s", "device-hours", "idle", "most of it", "age")


def _row(each: Prediction, base: Prediction) -> tuple[str, ...]:
    largest = each.largest_idle
    cause = f"{largest[0]} {largest[2]:.0%} for {largest[1]}" if largest is not None and largest[2] >= 0.01 else "-"
    graders, first = each.configuration.graders, base.configuration.graders
    name = each.configuration.name + (f", {graders} graders" if graders != first else "")
    return (
        name, _number(each.step_s), _number(each.spread_s), f"{each.step_s / base.step_s:.2f}",
        f"{each.tokens_s:,.0f}", f"{each.gpu_hours:.3g}", f"{each.idle:.0%}", cause, f"{abs(each.staleness_mean):.1f}",
    )  # fmt: skip


def _values(each: Prediction) -> dict[str, Any]:
    one = each.configuration
    return {
        "layout": one.layout, "devices": one.devices, "rollout_devices": one.rollout_devices,
        "staleness": one.staleness, "lanes": one.lanes, "graders": one.graders, "step_s": each.step_s,
        "spread_s": each.spread_s, "phases_s": dict(each.phases), "generator_idle": dict(each.generator_idle),
        "learner_idle": dict(each.learner_idle), "idle": each.idle, "tokens_per_s": each.tokens_s,
        "staleness_mean": each.staleness_mean, "gpu_hours": each.gpu_hours,
    }  # fmt: skip


def plan_runs(
    runs: Sequence[Path], *, devices: Sequence[int] = (), stalenesses: Sequence[int] = STALENESSES,
    steps: int | None = None,
) -> Plan:  # fmt: skip
    """What the first run would have done in another configuration. Further runs, of other layouts, tell what it cannot:
    what new weights and changing sides cost. `steps`: of which device-hours are told; default: the recipe's."""
    folder = opened(runs[0])
    recipe = program_of(folder)
    if isinstance(recipe, SpmdRecipe):
        return _plan_spmd_run(runs[0], recipe, step_lines(folder), devices, steps or recipe.steps)
    first, *others = [read_records(run) for run in runs]
    run = estimate_costs(first, others=others)
    if steps is not None:
        run = replace(run, workload=replace(run.workload, steps=steps))
    base = predicted(run.costs, run.workload, run.configuration)
    found = search(
        run.costs, run.workload, run.configuration, devices=devices or (run.configuration.devices,),
        stalenesses=stalenesses,
    )  # fmt: skip
    return Plan(
        title=f"{runs[0]}: {run.configuration.name}",
        facts=tuple(_run_facts(run)),
        base=base,
        found=found,
        notes=tuple(_run_notes(run, found)),
        values={
            "run": str(runs[0]), "measured_step_s": run.measured_step_s, "simulated_step_s": run.simulated_step_s,
            "error": run.error, "costs": [_estimate_values(each) for each in run.estimates],
            "current": _values(base),
        },
    )  # fmt: skip


def _run_facts(run: RunCosts) -> list[str]:
    facts = [
        f"measured: {_seconds(run.measured_step_s)} a step over {run.num_steps} steps; the same steps simulated: "
        f"{run.error:+.1%}"
    ]
    for each in run.estimates:
        error = "" if each.error is None else f", median error {each.error:.1%}"
        kind = "assumed" if each.quality == "assumed" else "from"
        facts.append(f"{each.name}: {_seconds(each.value)} ({kind} {each.how}{error})")
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


def _estimate_values(each: Estimate) -> dict[str, Any]:
    return {"name": each.name, "value": each.value, "unit": each.unit, "quality": each.quality, "error": each.error}


def _plan_spmd_run(
    path: Path, recipe: SpmdRecipe, lines: Sequence[tuple[int, Mapping[str, float]]], devices: Sequence[int], steps: int
) -> Plan:
    kept = [values for _, values in lines[1:]]
    if len(kept) < _FEWEST_STEPS:
        raise RunFolderError(
            f"{path} has {len(lines)} steps, and a plan needs {_FEWEST_STEPS + 1}. Let it train longer."
        )
    now = recipe.placement.devices
    seconds = [values["step_s"] for values in kept]
    counts = [values.get("tokens", 0.0) for values in kept]
    line = fit_line([count / now for count in counts], seconds)
    tokens = statistics.fmean(counts)
    numbers = sorted({now, *(devices or (2 * now, 4 * now))})
    times = {number: line.constant + line.slope * tokens / number for number in numbers}
    facts = [
        f"measured: {_seconds(statistics.fmean(seconds))} a step of {tokens:,.0f} tokens over {len(kept)} steps",
        f"a token on a device {_seconds(line.slope)}, and {_seconds(line.constant)} of every step (median error "
        f"{line.error:.1%})",
        *(
            f"{_devices(number)}: {_seconds(step_s)} a step, {tokens / step_s:,.0f} tokens/s, "
            f"{number * step_s * steps / 3600:.3g} device-hours for {steps:,} steps"
            for number, step_s in times.items()
        ),
    ]
    notes = []
    if len(times) > 1:
        notes.append("what sharding over more devices adds to a step is not in this run's records, and not counted.")
        if line.constant == 0.0:
            notes.append(
                "what a step takes whatever its tokens cannot be told, because steps are few, or all have about as "
                "many tokens: more devices may gain less."
            )
    values = {"run": str(path), "token_s": line.slope, "constant_s": line.constant, "step_s": times}
    return Plan(
        title=f"{path}: {recipe.program} on {_devices(now)}", facts=tuple(facts), base=None, found=None,
        notes=tuple(notes), values=values,
    )  # fmt: skip


def plan_recipe(
    recipe: Recipe, device: Device, *, devices: Sequence[int] = (), stalenesses: Sequence[int] = STALENESSES,
    assumptions: Assumptions = _USUAL, steps: int | None = None,
) -> Plan:  # fmt: skip
    """What a recipe would do on a device: memory by phase, step time, and the best layout. Raises a RecipeError for a
    run that cannot fit."""
    memory = memory_of(recipe, device)
    problem = refusal(memory, recipe)
    if problem is not None:
        raise problem
    if isinstance(recipe, SpmdRecipe):
        return _plan_spmd(recipe, device, memory, steps or recipe.steps)
    if not isinstance(recipe, OnPolicyRecipe):
        raise RecipeError(f"program: {recipe.program} has no plan.")
    shape, base = shape_of(recipe.model), configuration_of(recipe)
    episodes, assumed = _episodes(recipe, assumptions, shape.context)
    costs = cost_model(
        shape, device, episodes, layout="elastic", num_learners=num_learners(recipe),
        checkpointed=recipe.model.activation_checkpointing == "layers",
    )  # fmt: skip
    workload = workload_of(recipe)
    workload = workload if steps is None else replace(workload, steps=steps)
    now = predicted(costs, workload, base)
    found = search(costs, workload, base, devices=devices or (base.devices,), stalenesses=stalenesses)
    return Plan(
        title=f"{recipe.program} on {device.name}: {base.name}",
        facts=(*memory.lines(), *_phase_facts(now)),
        base=now,
        found=found,
        notes=(assumed, *_device_notes(device)),
        values={"device": device.name, "memory": _memory_values(memory), "current": _values(now)},
    )


def _plan_spmd(recipe: SpmdRecipe, device: Device, memory: MemoryPlan, steps: int) -> Plan:
    shape, world = shape_of(recipe.model), recipe.placement.devices
    longest = recipe.data.max_length or shape.context
    rows = recipe.rows_per_step
    tokens = recipe.tokens_per_step if rows is None else rows * recipe.documents_per_row * longest
    of_one = max(1.0, tokens / world)
    length = min(longest, of_one)
    step = training_step(
        shape, device, [length] * max(1, round(of_one / length)), world=world,
        checkpointed=recipe.model.activation_checkpointing == "layers",
    )  # fmt: skip
    # Only a calibration measures what an update takes whatever its size; the table's value has a controller in it.
    parts = {**_step_parts(step), "constant": device.efficiency.update_s if device.is_measured else 0.0}
    step_s = sum(parts.values())
    facts = [
        *memory.lines(),
        f"a step of {tokens:,.0f} tokens takes {_seconds(step_s)}: {_listed(parts)}",
        f"{tokens / step_s:,.0f} tokens/s, {world * step_s * steps / 3600:.3g} device-hours for {steps:,} steps",
    ]
    notes = [f"assumed: documents of {length:,.0f} tokens, as long as they may be. Shorter ones have less attention."]
    if step_s < _SMALL_STEP_S and not device.is_measured:
        notes.append(
            "starting its kernels may take longer than such a small step, and is not counted: this is a lower bound."
        )
    values = {"device": device.name, "memory": _memory_values(memory), "step_s": step_s, "parts_s": parts}
    return Plan(
        title=f"{recipe.program} on {world} x {device.name}", facts=tuple(facts), base=None, found=None,
        notes=(*notes, *_device_notes(device)), values=values,
    )  # fmt: skip


def _step_parts(step: StepTime) -> dict[str, float]:
    return {
        "products": step.products_s, "attention": step.attention_s, "activations": step.activations_s,
        "logits": step.logits_s, "optimizer": step.optimizer_s, "collectives": step.collectives_s,
    }  # fmt: skip


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in parts.items() if seconds > 0)


def _episodes(recipe: OnPolicyRecipe, assumptions: Assumptions, context: int) -> tuple[Episodes, str]:
    """Their lengths, and what was assumed of them. `context`: of the model."""
    limit = recipe.rollout.max_new_tokens
    answer = assumptions.answer_tokens or max(1, limit // _USUAL_PART)
    room = max(1, (recipe.data.max_length or context) - limit)
    prompt = assumptions.prompt_tokens or min(_USUAL_PROMPT, room)
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
    phases = _listed({name: seconds for name, seconds in now.phases.items() if seconds > 1e-6})
    return [f"a step takes {_seconds(now.step_s)} ± {_seconds(now.spread_s)}: {phases}"]


def _device_notes(device: Device) -> list[str]:
    if device.is_measured:
        return []
    if device.kind == "cpu":
        return ["speeds of a CPU core are a guess; podium plan --calibrate measures this machine's."]
    return [
        "speeds of the device are its datasheet's, with the shares that were reached on one H200. On a machine that "
        "has it, podium plan --calibrate measures them."
    ]


def _memory_values(memory: MemoryPlan) -> list[dict[str, Any]]:
    return [
        {
            "phase": phase.phase, "place": phase.place, "bytes": phase.num_bytes,
            "terms": {term.name: term.num_bytes for term in phase.terms},
        }
        for phase in memory.phases
    ]  # fmt: skip


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


def _devices(number: int) -> str:
    return f"{number} device" if number == 1 else f"{number} devices"


def _number(value: float) -> str:
    if 0 < value < 1e-3:
        return f"{value:.1g}" if value >= 5e-5 else "0"
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _seconds(seconds: float) -> str:
    if seconds == 0 or math.isnan(seconds):
        return "0 s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{_number(seconds)} s"
