# SPDX-License-Identifier: Apache-2.0
"""`podium plan`: memory, step time and the best layout, before a run and after it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from podium.commands.arguments import Overrides
from podium.commands.completion import complete_recipe, complete_run
from podium.errors import RecipeError
from podium.recipe import PipelineRecipe, Recipe, SpmdRecipe
from podium.recipe.pipeline_loading import load_any_recipe

if TYPE_CHECKING:
    from podium.planning.devices import Device


def plan(
    recipe: Annotated[
        Path | None, typer.Argument(help="A YAML recipe.", metavar="RECIPE", autocompletion=complete_recipe)
    ] = None,
    overrides: Overrides = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", help="Plan from what this run has measured; a second one in another layout tells more.",
            metavar="RUN", autocompletion=complete_run,
        ),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine's device, for later plans.")
    ] = False,
    devices: Annotated[
        str | None, typer.Option(help="Numbers of devices to look at: 8, 2,4,8 or 1-1024. Default: as it is.")
    ] = None,
    staleness: Annotated[
        list[int] | None, typer.Option(help="Only this staleness; as often as needed. Default: 0, 1, 2, 4.", min=0)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Another device than this machine's, for example H100 or H200.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps of which device-hours are told. Default: the recipe's.", min=1)
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Before a run: usual tokens of a prompt.", min=1)] = None,
    answer_tokens: Annotated[int | None, typer.Option(help="Before a run: usual tokens of an answer.", min=1)] = None,
    grading: Annotated[
        float | None, typer.Option(help="Before a run: seconds to grade an episode. Default: 0.", min=0)
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Fixed data: place the model as a rank of its mesh does; count memory and collectives."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:  # fmt: skip
    """Predict memory, step time and idle devices of a recipe or a run, and find its best layout."""
    if calibrate:
        if recipe is not None or runs:
            raise typer.BadParameter("--calibrate measures this machine: give no recipe and no --from with it")
        _calibrate("cpu" if device == "cpu" else "auto")
        return
    before = {
        "--set": overrides, "--device": device, "--prompt-tokens": prompt_tokens, "--answer-tokens": answer_tokens,
        "--grading": grading,
    }  # fmt: skip
    _require_recipe_or_runs(recipe, runs, before)
    if dry_run:
        others = {**before, "--set": None, "--device": None, "--from": runs, "--devices": devices, "--steps": steps}
        if recipe is None or (unused := [name for name, value in others.items() if value]):
            raise typer.BadParameter(f"--dry-run is of a recipe as it is: leave out {', '.join(unused or ['--from'])}")
        _dry_run(_loaded(recipe, overrides or []), device, as_json=as_json)
        return
    from podium.planning.plans import Assumptions, device_numbers, plan_recipe, plan_runs
    from podium.planning.search import STALENESSES

    numbers = device_numbers(devices) if devices else ()
    if recipe is None:
        found = plan_runs(runs or [], devices=numbers, stalenesses=staleness, steps=steps)
    else:
        assumptions = Assumptions(prompt_tokens=prompt_tokens, answer_tokens=answer_tokens, grading_s=grading or 0.0)
        loaded = _loaded(recipe, overrides or [])
        if isinstance(loaded, SpmdRecipe):
            _refuse_for_fixed_data(loaded, {**before, "--set": None, "--device": None, "--staleness": staleness})
        found = plan_recipe(
            loaded, _device(loaded, device), devices=numbers, stalenesses=staleness or STALENESSES,
            assumptions=assumptions, steps=steps,
        )  # fmt: skip
    _show(found.as_json() if as_json else found.lines())


def _require_recipe_or_runs(recipe: Path | None, runs: list[Path] | None, before: Mapping[str, object]) -> None:
    """One of both, and with runs none of the options that are about a recipe."""
    if (recipe is None) == (not runs):
        raise typer.BadParameter("give a recipe, or a run with --from")
    if runs and (unused := [name for name, value in before.items() if value is not None]):
        raise typer.BadParameter(f"{', '.join(unused)}: only with a recipe. A run tells that itself; leave it out")


def _show(found: Mapping[str, object] | Sequence[str]) -> None:
    """JSON, or lines."""
    typer.echo(json.dumps(found, indent=1) if isinstance(found, Mapping) else "\n".join(found))


def _dry_run(recipe: Recipe, device: str | None, *, as_json: bool) -> None:
    if not isinstance(recipe, SpmdRecipe):
        raise RecipeError(
            f"program: a dry run is of programs on fixed data, and {recipe.program} generates. Its learner is placed "
            "like an sft on as many devices: dry-run that."
        )
    found = _device(recipe, device)
    from podium.dry_run.fake_ranks import dry_run
    from podium.planning.fixed_data_plans import mesh_facts

    chosen, counted = mesh_facts(recipe, found), dry_run(recipe, found)
    _show(counted.as_json() if as_json else [*chosen, *counted.lines()])


def _refuse_for_fixed_data(recipe: SpmdRecipe, options: Mapping[str, object]) -> None:
    """Options that say something of episodes."""
    unused = [name for name, value in options.items() if value is not None]
    if unused:
        raise typer.BadParameter(f"{', '.join(unused)}: {recipe.program} generates nothing. Leave it out")


def _loaded(recipe: Path, overrides: list[str]) -> Recipe:
    loaded = load_any_recipe(recipe, overrides)
    if isinstance(loaded, PipelineRecipe):
        raise RecipeError(f"{recipe}: a pipeline has no plan of its own. Give the recipe of one stage.")
    return loaded


def _device(recipe: Recipe, name: str | None) -> Device:
    from podium.planning.devices import device_named, device_names, found_device

    found = found_device(recipe.placement.device) if name is None else device_named(name)
    if found is None:
        raise RecipeError(
            "placement.device: there is no GPU here that the planner knows. Name one with --device, for example "
            f"{', '.join(device_names()[:4])}."
        )
    return found


def _calibrate(kind: Literal["auto", "cpu"]) -> None:
    from podium.planning.calibration import calibrate

    done = calibrate(kind, note=lambda text: typer.echo(f"measuring {text}"))
    for line in done.lines():
        typer.echo(line)
