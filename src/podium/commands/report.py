# SPDX-License-Identifier: Apache-2.0
"""`podium report`: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from podium.commands.arguments import RunPath


def report(
    run: RunPath,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.", metavar="FILE")] = Path("report.html"),
) -> None:
    """Write a run or pipeline as one HTML file that needs no server: to mail, or to keep."""
    from podium.ui.report import write_report

    summary = write_report(run, out)
    typer.echo(f"{summary.file}: {summary.num_bytes / 1e6:.1f} MB, opens in any browser.")
    for line in summary.left_out:
        typer.echo(f"  {line}")
