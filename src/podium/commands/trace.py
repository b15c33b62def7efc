# SPDX-License-Identifier: Apache-2.0
"""`podium trace`: what every worker of a run did when, for a trace viewer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from podium import api
from podium.commands.arguments import RunPath


def trace(
    run: RunPath,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write; .json, or compressed as .json.gz.", metavar="FILE")
    ] = Path("trace.json"),
) -> None:
    """Write what every worker of a run or pipeline did when, for ui.perfetto.dev."""
    summary = api.trace(run, out)
    typer.echo(
        f"{summary.file}: {summary.spans} spans of {summary.workers} workers over {summary.seconds:.1f} s. "
        "Open it in ui.perfetto.dev."
    )
