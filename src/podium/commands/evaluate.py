# SPDX-License-Identifier: Apache-2.0
"""`podium evaluate`: a recipe's evaluation without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from podium import api
from podium.commands.arguments import Overrides
from podium.commands.completion import complete_recipe, complete_run


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            help="Folder of a run, or with --recipe a Hugging Face checkpoint.",
            metavar="RUN|MODEL",
            autocompletion=complete_run,
        ),
    ],
    recipe: Annotated[
        Path | None, typer.Option(help="For a model: the recipe that says how.", autocompletion=complete_recipe)
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Checkpoint of the run; default: the newest. 0: before training.", min=0)
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The one with the lowest held-out loss, or highest score.")
    ] = False,
    overrides: Overrides = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write metrics and every answer to this file.", metavar="FILE")
    ] = None,
) -> None:
    """Evaluate a run's checkpoint or a model on held-out data, without training."""
    if best and step is not None:
        raise typer.BadParameter("give --best or --step, not both")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"--json: there is no folder {json_file.parent}")
    which: Literal["best", "last"] | int = "best" if best else "last" if step is None else step
    result = api.evaluate(target, recipe=recipe, which=which, overrides=overrides or ())
    typer.echo(f"evaluated: {result.evaluated}" + ("" if result.step is None else f", step {result.step}"))
    for line in result.lines():
        typer.echo(f"  {line}")
    if json_file is not None:
        json_file.write_text(result.as_json(), encoding="utf-8")
        typer.echo(f"  written to {json_file}")
