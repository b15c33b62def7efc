# SPDX-License-Identifier: Apache-2.0
"""`podium replay`: the updates of a recorded run, run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from podium import api
from podium.commands.arguments import RunPath
from podium.replaying import ReplayResult


def replay(
    run: RunPath,
    out: Annotated[
        Path | None, typer.Option(help="New folder for it; default: RUN-replay or RUN-fresh.", metavar="FOLDER")
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Train the same recipe with rollout.staleness 0 instead, and show both curves."),
    ] = False,
) -> None:
    """Run the updates of a recorded run again, and compare the weights; exit code 1 if they differ."""
    result = api.replay(run, out=out, fresh=fresh)
    for line in result.lines():
        typer.echo(line)
    if isinstance(result, ReplayResult) and not result.is_identical:
        raise typer.Exit(1)
