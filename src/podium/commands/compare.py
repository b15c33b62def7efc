# SPDX-License-Identifier: Apache-2.0
"""`podium compare`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from podium import api
from podium.commands.completion import complete_run


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="A", autocompletion=complete_run)],
    second: Annotated[Path, typer.Argument(help="Folder of another.", metavar="B", autocompletion=complete_run)],
    everything: Annotated[bool, typer.Option("--all", help="All metrics that differ, not only the first.")] = False,
) -> None:
    """Show what the recipes of two runs say differently, and which metrics differ from which step on."""
    for line in api.compare(first, second).lines(everything=everything):
        typer.echo(line)
