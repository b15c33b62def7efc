# SPDX-License-Identifier: Apache-2.0
"""The command line. Torch is imported only by the verbs that compute."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from podium import api
from podium.commands.arguments import Devices, Overrides, RecipeFile, RunPath
from podium.commands.compare import compare
from podium.commands.completion import complete_folder, complete_run
from podium.commands.evaluate import evaluate
from podium.commands.generate import generate
from podium.commands.init import init
from podium.commands.plan import plan
from podium.commands.replay import replay
from podium.commands.report import report
from podium.commands.serve import serve
from podium.commands.trace import trace
from podium.commands.try_recipe import try_recipe
from podium.commands.ui import ui
from podium.errors import PodiumError, RecipeError, RunStoppedError
from podium.observe.console import WIDTH, wrapped
from podium.python_hints import PythonNote
from podium.recipe.pipeline_loading import recipe_schema
from podium.runs.supervised import is_restarting, note_end
from podium.spmd.launch import place_under_torchrun

if TYPE_CHECKING:
    from podium.programs.pipeline import PipelineResult

# Exit code of a process whose run goes on in another one.
_RESTARTS = 3

app = typer.Typer(
    name="podium",
    help="Post-train language models from a recipe.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(version("podium"))
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Post-train language models from a recipe."""


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    devices: Devices = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace an earlier run or pipeline of this name, unless it is still running."
        ),
    ] = False,
    ignore_memory: Annotated[
        bool, typer.Option("--ignore-memory", help="Begin also what is predicted not to fit this machine's memory.")
    ] = False,
) -> None:
    """Run a recipe from its beginning; of a pipeline, the stages that changed or did not end."""
    changes = _with_devices(overrides, devices)
    _report(api.train(recipe, overrides=changes, overwrite=overwrite, ignore_memory=ignore_memory))


@app.command()
def resume(
    run: RunPath,
    overrides: Overrides = None,
    devices: Devices = None,
    step: Annotated[int | None, typer.Option(help="Checkpoint to resume from; default: the newest.")] = None,
    accept_changed_data: Annotated[
        bool, typer.Option("--accept-changed-data", help="Go on although files of data.train changed; it is recorded.")
    ] = False,
) -> None:
    """Continue a run exactly where it stopped."""
    overrides = _with_devices(overrides, devices)
    _report(api.resume(run, overrides=overrides, step=step, accept_changed_data=accept_changed_data))


@app.command()
def check(
    recipe: RecipeFile,
    overrides: Overrides = None,
    devices: Devices = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also load tokenizer and model config, and read data.")] = False,
    all_rows: Annotated[bool, typer.Option("--all", help="With --deep: read every row, not only the first.")] = False,
    device: Annotated[
        str | None,
        typer.Option(help="Device that the run will have, such as H100 or H100:94 (GiB); default: this machine's."),
    ] = None,
) -> None:
    """Check schema, files, plug-ins and memory without running anything."""
    changes = _with_devices(overrides, devices)
    for line in api.check(recipe, overrides=changes, deep=deep, all_rows=all_rows, device=device):
        typer.echo(line)
    typer.echo(f"{recipe}: ok")


@app.command()
def export(
    run: RunPath,
    out: Annotated[Path, typer.Argument(help="New folder for the Hugging Face checkpoint.")],
    step: Annotated[int | None, typer.Option(help="Checkpoint to export; default: the newest.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The one with the lowest held-out loss, or highest score.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="Default: as the base model's config.")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="Of a pipeline: the stage to export; default: the last.")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the adapter, for peft; default: merged into its base.")
    ] = False,
    log_artifact: Annotated[
        bool, typer.Option("--log-artifact", help="Also log it as an artifact of the run at its trackers.")
    ] = False,
) -> None:
    """Write a run's weights as a plain Hugging Face checkpoint."""
    if best and step is not None:
        raise typer.BadParameter("give --best or --step, not both")
    which: Literal["best", "last"] | int = "best" if best else "last" if step is None else step
    done = api.export(run, out, which=which, dtype=dtype, adapter=adapter, stage=stage, log_artifact=log_artifact)
    typer.echo(f"step {done} of {run} is in {out}")


@app.command("list")
def list_runs(
    folder: Annotated[
        Path, typer.Argument(help="Folder of runs.", metavar="FOLDER", autocompletion=complete_folder)
    ] = Path("runs"),
) -> None:
    """List the runs and pipelines of a folder, the last changed first."""
    for line in api.list_runs(folder):
        typer.echo(line)


@app.command()
def show(
    run: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run, of a pipeline, or of an exported model.",
            metavar="FOLDER",
            autocompletion=complete_run,
        ),
    ],
) -> None:
    """Tell how a run or pipeline stands, and what its weights come from."""
    for line in [*api.show(run), *_suggestions(run)]:
        typer.echo(line)


@app.command()
def verify(
    model: Annotated[
        str, typer.Argument(help="Folder of a Hugging Face checkpoint (a config alone is enough), or a hub id.")
    ],
    devices: Annotated[int, typer.Option(help="Ranks to shard over.", min=1)] = 1,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option()] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="Compile the layers, as training on CUDA does.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
) -> None:
    """Compare Podium's packed, sharded, compiled forward with plain transformers."""
    agreement = api.verify(
        model, devices=devices, device=device, dtype=dtype, compile=compile, trust_remote_code=trust_remote_code
    )
    typer.echo(str(agreement))
    if not agreement.agrees:
        typer.echo("unsupported: Podium would train this architecture wrongly, so it refuses to.", err=True)
        raise typer.Exit(1)


app.command()(init)
app.command("try")(try_recipe)
app.command()(evaluate)
app.command()(replay)
app.command()(compare)
app.command()(trace)
app.command()(plan)
app.command()(ui)
app.command()(report)
app.command()(generate)
app.command()(serve)


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    typer.echo(json.dumps(recipe_schema(), indent=1))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command, by default that of the command line. Podium's own errors are printed as they are, everything else
    keeps its traceback."""
    try:
        app(arguments)
    except RunStoppedError as error:
        print("\n".join([str(error), *_notes(error)]))
    except PodiumError as error:
        sys.stdout.flush()
        if is_restarting():
            os._exit(_RESTARTS)  # the supervisor says what happened; a call may hang in a dead Ray
        under = place_under_torchrun()
        if under is not None and under.rank != 0 and isinstance(error, RecipeError):
            sys.exit(2)  # every rank of torchrun reads the same recipe; one of them says what is wrong with it
        print("\n".join([f"error: {error}", *_notes(error)]), file=sys.stderr)
        blocking = sys.modules.get("podium.cluster.blocking")
        if blocking is not None and blocking.is_any_left():
            sys.stderr.flush()
            _exit_at_once(2)  # a call that hangs in a dead Ray would crash when the interpreter takes itself apart
        sys.exit(2)
    except KeyboardInterrupt as error:
        print("\n".join(["interrupted", *_notes(error)]), file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        _exit_at_once(130)  # a thread in user code that hangs would keep the process


def _exit_at_once(code: int) -> NoReturn:
    note_end()
    os._exit(code)


def _notes(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", ()) if not isinstance(note, PythonNote)]


def _with_devices(overrides: list[str] | None, devices: int | None) -> list[str]:
    return [*(overrides or []), *([f"placement.devices={devices}"] if devices is not None else [])]


def _report(result: object) -> None:
    from podium.programs.pipeline import PipelineResult
    from podium.runs.result import RunResult

    assert isinstance(result, RunResult)
    under = place_under_torchrun()
    if under is not None and under.rank != 0:
        return
    if isinstance(result, PipelineResult):
        _report_pipeline(result)
        return
    for line in result.lines():
        typer.echo(line)
    _echo_suggestions(result.folder)


def _echo_suggestions(run: Path) -> None:
    for line in _suggestions(run):
        for part in wrapped(f"  {line}", WIDTH, indent="    "):
            typer.echo(part)


def _suggestions(run: Path) -> list[str]:
    """What would make a run, or stages of a pipeline, faster, or what is more important."""
    from podium.runs.folder import is_pipeline_folder

    if is_pipeline_folder(run):
        from podium.planning.suggestion import stage_lines

        return stage_lines(run)
    if not (run / "timeline.jsonl").is_file():
        return []
    from podium.planning.suggestion import suggestion_lines

    return suggestion_lines(run)


def _report_pipeline(result: PipelineResult) -> None:
    for line in result.time.lines():
        typer.echo(f"  {line}")
    _echo_suggestions(result.folder)
    if result.status == "finished":
        typer.echo(f"finished: {result.folder}")
        typer.echo(f"  look at it with: podium show {result.folder}")
        typer.echo(f"  export its last stage with: podium export {result.folder} OUT")
    else:
        stage = result.stages[-1].name
        typer.echo(f"stopped at step {result.step} of stage {stage}; continue with: podium resume {result.folder}")


if __name__ == "__main__":
    main()
