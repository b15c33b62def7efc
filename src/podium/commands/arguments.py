# SPDX-License-Identifier: Apache-2.0
"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from podium.commands.completion import complete_recipe, complete_run

RecipeFile = Annotated[Path, typer.Argument(help="A YAML recipe.", metavar="RECIPE", autocompletion=complete_recipe)]
RunPath = Annotated[
    Path,
    typer.Argument(help="Folder of a run, for example runs/NAME.", metavar="RUN", autocompletion=complete_run),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="key.path=value, as often as needed.", metavar="KEY=VALUE")
]
Devices = Annotated[int | None, typer.Option(help="Ranks on this machine; short for --set placement.devices=N.", min=1)]
