# SPDX-License-Identifier: Apache-2.0
"""`podium init`: a recipe for a data file and a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from podium import api
from podium.commands.completion import complete_data, complete_folder
from podium.drafting.columns import METHODS
from podium.observe.console import aligned


def init(
    data: Annotated[
        str, typer.Option(help="JSONL, Parquet or CSV, one row per example.", autocompletion=complete_data)
    ],
    model: Annotated[
        str, typer.Option(help="Folder of a Hugging Face checkpoint, or a hub id.", autocompletion=complete_folder)
    ],
    program: Annotated[
        str | None,
        typer.Argument(
            help=f"{', '.join(METHODS)}; default: what the columns of the data fit.",
            metavar="PROGRAM",
            autocompletion=lambda incomplete: [name for name in METHODS if name.startswith(incomplete)],
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The recipe to write.")] = Path("recipe.yaml"),
    heldout: Annotated[
        str | None, typer.Option(help="Rows of the same kind to evaluate on.", autocompletion=complete_data)
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="For distillation: the model to learn from.", autocompletion=complete_folder)
    ] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A Jinja file to use instead of the tokenizer's.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
) -> None:
    """Write a recipe that fits a data file and a model."""
    lines = api.init(
        data,
        model,
        program=program,
        out=out,
        heldout=heldout,
        teacher=teacher,
        chat_template=chat_template,
        overwrite=overwrite,
    )
    for line in aligned(lines):
        typer.echo(line)
