# SPDX-License-Identifier: Apache-2.0
"""`podium try`: a few episodes of a recipe, generated, graded and shown."""

from __future__ import annotations

from typing import Annotated

import typer

from podium import api
from podium.commands.arguments import Overrides, RecipeFile
from podium.errors import RewardError, RolloutError


def try_recipe(
    recipe: RecipeFile,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(help="Prompts to answer.", min=1)] = 2,
    samples: Annotated[int, typer.Option(help="Answers to each prompt.", min=1)] = 2,
    stand_in: Annotated[
        bool, typer.Option("--stand-in", help="Generate with a tiny random model in place of the recipe's own.")
    ] = False,
) -> None:
    """Generate and grade a few episodes in one process, and show them; trains nothing."""
    trial = api.try_recipe(
        recipe, overrides=overrides or (), prompts=prompts, samples=samples, stand_in=stand_in, warn=_warn
    )
    for line in trial.lines():
        typer.echo(line)
    if trial.errors:
        count = sum(episode.error is not None for episode in trial.episodes)
        raise RewardError(f"{count} of {len(trial.episodes)} episodes have no reward: {trial.errors[0]}")
    if trial.num_tool_faults:
        raise RolloutError(
            f"tools failed in {trial.num_tool_faults} of {len(trial.episodes)} episodes; the warnings above name file "
            "and line. The model reads such a failure as a result that begins with `error:`. Fix the tool, or let it "
            "return a text where the failure is meant."
        )


def _warn(text: str) -> None:
    typer.echo(f"warning: {text}", err=True)
