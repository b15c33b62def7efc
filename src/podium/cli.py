# SPDX-License-Identifier: Apache-2.0
"""The command line. Torch is imported only by the verbs that compute."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from pydantic import ValidationError

from podium import api
from podium.errors import PodiumError, RecipeError, RunStoppedError
from podium.recipe import RolloutSection, SourceSection
from podium.recipe.fields import Section
from podium.recipe.pipeline_loading import recipe_schema
from podium.spmd.launch import place_under_torchrun

if TYPE_CHECKING:
    from podium.programs.pipeline import PipelineResult

app = typer.Typer(
    name="podium",
    help="Post-train language models from a recipe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SectionKind = TypeVar("SectionKind", bound=Section)

RecipeFile = Annotated[Path, typer.Argument(help="A YAML recipe.", metavar="RECIPE")]
RunPath = Annotated[Path, typer.Argument(help="Folder of a run, for example runs/NAME.", metavar="RUN")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="key.path=value, as often as needed.", metavar="KEY=VALUE")
]
Devices = Annotated[int | None, typer.Option(help="Ranks on this machine; short for --set placement.devices=N.", min=1)]


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
def train(recipe: RecipeFile, overrides: Overrides = None, devices: Devices = None) -> None:
    """Run a recipe from its beginning; of a pipeline, the stages that changed or did not end."""
    _report(api.train(recipe, overrides=_with_devices(overrides, devices)))


@app.command()
def resume(
    run: RunPath,
    overrides: Overrides = None,
    devices: Devices = None,
    step: Annotated[int | None, typer.Option(help="Checkpoint to resume from; default: the newest.")] = None,
) -> None:
    """Continue a run exactly where it stopped."""
    _report(api.resume(run, overrides=_with_devices(overrides, devices), step=step))


@app.command()
def check(
    recipe: RecipeFile,
    overrides: Overrides = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also load tokenizer and model config, and read data.")] = False,
) -> None:
    """Check schema, files and plug-ins without running anything."""
    for line in api.check(recipe, overrides=overrides or (), deep=deep):
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
) -> None:
    """Write a run's weights as a plain Hugging Face checkpoint."""
    if best and step is not None:
        raise typer.BadParameter("give --best or --step, not both")
    which: Literal["best", "last"] | int = "best" if best else "last" if step is None else step
    done = api.export(run, out, which=which, dtype=dtype, adapter=adapter, stage=stage)
    typer.echo(f"step {done} of {run} is in {out}")


@app.command()
def show(
    run: Annotated[
        Path, typer.Argument(help="Folder of a run, of a pipeline, or of an exported model.", metavar="FOLDER")
    ],
) -> None:
    """Tell how a run or pipeline stands, and what its weights come from."""
    for line in api.show(run):
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


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face checkpoint, or a hub id.")],
    prompts: Annotated[
        str, typer.Option(help="Rows with messages, prompt or text: JSONL, Parquet, CSV, a glob, or a datasets id.")
    ],
    out: Annotated[Path, typer.Option(help="JSONL file of the answers. If it was begun before, it is continued.")],
    samples: Annotated[int, typer.Option(help="Answers to each prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="1: off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: off.")] = 0,
    min_p: Annotated[float, typer.Option(help="0: off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1: off.")] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help=r"Text that ends an answer (\n is a new line); as often as needed.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Answers depend on seed, row and sample, not on their company.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Only the first rows.")] = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Also write token ids and their log-probs.")] = False,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option()] = "auto",
    engine: Annotated[Literal["native", "vllm"], typer.Option()] = "native",
    memory_gib: Annotated[
        float | None, typer.Option(help="For keys and values; default: see docs/generating.md.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Prompt and answer; default: what the prompts need.")] = None,
    max_running: Annotated[int | None, typer.Option(help="Answers generated at the same time.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub id, when MODEL has none.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A Jinja file to use instead of the tokenizer's.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
    column: Annotated[
        list[str] | None, typer.Option(help="prompt=question reads the column question as the prompt.")
    ] = None,
) -> None:
    """Answer every prompt of a file with a model; after an interruption, the same command continues."""
    from podium.rollout.requests import Sampling

    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop_strings=tuple(_unescaped(text) for text in stop or ()),
    )
    try:
        done = api.generate(
            model,
            _section(SourceSection, path=prompts, columns=_columns(column or [])),
            out,
            sampling=sampling,
            samples=samples,
            seed=seed,
            limit=limit,
            logprobs=logprobs,
            device=device,
            dtype=dtype,
            rollout=_section(
                RolloutSection,
                engine=engine,
                memory_gib=memory_gib,
                max_length=max_length,
                max_running=max_running,
            ),
            tokenizer=tokenizer,
            chat_template=chat_template,
            trust_remote_code=trust_remote_code,
        )
    except KeyboardInterrupt as error:
        typer.echo("\n".join(getattr(error, "__notes__", ["stopped"])), err=True)
        raise typer.Exit(130) from error
    for line in done.lines():
        typer.echo(line)


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    typer.echo(json.dumps(recipe_schema(), indent=1))


def main() -> None:
    """Entry point: Podium's own errors are printed as they are, everything else keeps its traceback."""
    try:
        app()
    except RunStoppedError as error:
        print("\n".join([str(error), *getattr(error, "__notes__", ())]))
    except PodiumError as error:
        sys.stdout.flush()
        under = place_under_torchrun()
        if under is not None and under.rank != 0 and isinstance(error, RecipeError):
            sys.exit(2)  # every rank of torchrun reads the same recipe; one of them says what is wrong with it
        print("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        blocking = sys.modules.get("podium.cluster.blocking")
        if blocking is not None and blocking.is_any_left():
            sys.stderr.flush()
            os._exit(2)  # a call that hangs in a dead Ray would crash when the interpreter takes itself apart
        sys.exit(2)
    except KeyboardInterrupt as error:
        print("\n".join(["interrupted", *getattr(error, "__notes__", ())]), file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)  # a thread in user code that hangs would keep the process


def _with_devices(overrides: list[str] | None, devices: int | None) -> list[str]:
    return [*(overrides or []), *([f"placement.devices={devices}"] if devices is not None else [])]


def _columns(given: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    for text, (new, _, old) in zip(given, pairs, strict=True):
        if not new or not old:
            raise typer.BadParameter(f"{text!r} is not NAME=COLUMN; prompt=question reads `question` as the prompt")
    return {new: old for new, _, old in pairs}


def _section(kind: type[SectionKind], **values: object) -> SectionKind:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + ".".join(map(str, first["loc"])).replace("_", "-")
        raise typer.BadParameter(f"{option}: {first['msg']}") from error


def _unescaped(text: str) -> str:
    """A shell does not turn \\n into a new line, and who types it means one."""
    return re.sub(r"\\([ntr\\])", lambda match: {"n": "\n", "t": "\t", "r": "\r"}.get(match[1], "\\"), text)


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


def _report_pipeline(result: PipelineResult) -> None:
    for line in result.time.lines():
        typer.echo(f"  {line}")
    if result.status == "finished":
        typer.echo(f"finished: {result.folder}")
        typer.echo(f"  look at it with: podium show {result.folder}")
        typer.echo(f"  export its last stage with: podium export {result.folder} OUT")
    else:
        stage = result.stages[-1].name
        typer.echo(f"stopped at step {result.step} of stage {stage}; continue with: podium resume {result.folder}")


if __name__ == "__main__":
    main()
