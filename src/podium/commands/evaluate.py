# SPDX-License-Identifier: Apache-2.0
"""`podium evaluate`: a recipe's evaluation without training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from podium import api
from podium.commands.arguments import Overrides
from podium.commands.completion import complete_recipe, complete_run
from podium.commands.serve import chosen_model
from podium.lm_evaluating import LmTasks, evaluate_tasks, require_lm_eval
from podium.recipe import ModelSection, RolloutSection
from podium.serving import ServingJob


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            help="Folder of a run, or with --recipe or --tasks a Hugging Face checkpoint.",
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
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-eval instead of held-out data, as arc_easy,gsm8k.", metavar="NAMES")
    ] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="With --tasks: examples in each prompt.", min=0)] = None,
    limit: Annotated[float | None, typer.Option(help="With --tasks: rows of each task.", min=0)] = None,
    include: Annotated[Path | None, typer.Option(help="With --tasks: folder with further tasks.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="With --tasks: prompts in the chat template.")] = False,
    out: Annotated[Path | None, typer.Option(help="With --tasks: folder for results and answers.")] = None,
) -> None:
    """Evaluate a run's checkpoint or a model on held-out data or on tasks of lm-eval, without training."""
    if tasks is not None:
        if recipe is not None or overrides or json_file is not None:
            raise typer.BadParameter("--recipe, --set and --json are for held-out data, and --tasks has none")
        if best and step is not None:
            raise typer.BadParameter("give --best or --step, not both")
        wanted = LmTasks(
            names=tuple(filter(None, (each.strip() for each in tasks.split(",")))),
            num_fewshot=num_fewshot, limit=limit, include=_whole(include), chat=chat, output=_whole(out),
        )  # fmt: skip
        _evaluate_tasks(target, "best" if best else step, wanted)
        return
    if any((num_fewshot is not None, limit is not None, include is not None, chat, out is not None)):
        raise typer.BadParameter("--num-fewshot, --limit, --include, --chat and --out are for --tasks")
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


def _evaluate_tasks(target: str, which: Literal["best"] | int | None, tasks: LmTasks) -> None:
    if not tasks.names:
        raise typer.BadParameter("--tasks: name a task of lm-eval")
    if tasks.include is not None and not tasks.include.is_dir():
        raise typer.BadParameter(f"--include: there is no folder {tasks.include}")
    if tasks.output is not None and tasks.output.is_file():
        raise typer.BadParameter(f"--out: {tasks.output} is a file, and results need a folder")
    require_lm_eval()
    with chosen_model(target, which, None, needs_tokenizer=True) as chosen:
        name = re.sub(r"[^\w.-]", "-", Path(target).resolve().name)  # lm-eval splits its arguments at commas
        job = ServingJob(
            model=ModelSection(path=str(chosen.folder)), name=name, rollout=RolloutSection(), rule=chosen.rule
        )
        evaluate_tasks(job, tasks, typer.echo)


def _whole(path: Path | None) -> Path | None:
    """lm-eval runs in another folder."""
    return None if path is None else path.expanduser().absolute()
