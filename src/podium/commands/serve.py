# SPDX-License-Identifier: Apache-2.0
"""`podium serve`: an OpenAI-compatible server of a model, or of a run's checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from podium import api
from podium.data.control_tokens import ControlRule
from podium.errors import RunFolderError
from podium.generating import generating_folder, section_of
from podium.recipe import ModelSection, RolloutSection
from podium.runs.folder import RunFolder, is_held, is_pipeline_folder
from podium.runs.pipeline_folder import PipelineFolder

_MOST_NAMES = 8


def serve(
    model: Annotated[
        str, typer.Argument(help="Folder of a Hugging Face checkpoint, a hub id, or a run's folder.", metavar="MODEL")
    ],
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than this machine's own need the key that is printed.")
    ] = "127.0.0.1",
    api_key: Annotated[
        str | None, typer.Option(help="Key that clients must send. Other users of this machine can see it: --key-file.")
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="File that holds the key.")] = None,
    name: Annotated[str | None, typer.Option(help="The model's name for clients; default: its folder's.")] = None,
    step: Annotated[int | None, typer.Option(help="Of a run: checkpoint to serve; default: the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Of a run: the best checkpoint.")] = False,
    stage: Annotated[str | None, typer.Option(help="Of a pipeline: the stage; default: the last.")] = None,
    follow: Annotated[
        bool | None,
        typer.Option(
            "--follow/--no-follow",
            help="Of a run: load its newer checkpoints while serving; default: yes, without --step and --best.",
        ),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option()] = "auto",
    engine: Annotated[Literal["native", "vllm"], typer.Option()] = "native",
    memory_gib: Annotated[
        float | None, typer.Option(help="For keys and values; default: see docs/generating.md.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Prompt and answer; default: the model's context, at most 32768.")
    ] = None,
    max_running: Annotated[int | None, typer.Option(help="Answers generated at the same time.")] = None,
    request_seconds: Annotated[float, typer.Option(help="Longest time for one request.", min=1, max=86400)] = 600.0,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub id, when MODEL has none.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A Jinja file to use instead of the tokenizer's.")] = None,
    control_tokens_in_content: Annotated[
        Literal["text", "control"] | None,
        typer.Option(
            help="What messages that spell a control token become; default: the run's recipe says, else text."
        ),
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
) -> None:
    """Serve a model or a run's newest checkpoint over HTTP, for clients of OpenAI's API."""
    from podium.following import FollowedRun, version_name
    from podium.gateway.http import HttpLimits, require_listenable
    from podium.serving import ServingJob, serving_key
    from podium.serving import serve as serve_job

    if best and step is not None:
        raise typer.BadParameter("give --best or --step, not both")
    if follow and (best or step is not None):
        raise typer.BadParameter("--follow serves the newest checkpoint: remove --step and --best")
    key = serving_key(api_key, key_file, host)
    require_listenable(host, port)
    rollout = section_of(
        RolloutSection, engine=engine, memory_gib=memory_gib, max_length=max_length, max_running=max_running
    )
    label = name or Path(model).resolve().name
    which: Literal["best", "last"] | int | None = "best" if best else step
    with chosen_model(model, which, stage, needs_tokenizer=tokenizer is None) as chosen:
        if follow and chosen.run is None:
            raise typer.BadParameter(f"--follow is of a run, and {model} is none")
        rule, followed = chosen.rule, None
        if chosen.run is not None and chosen.step is not None and which is None and follow is not False:
            followed = FollowedRun(run=chosen.run, step=chosen.step)
        section = section_of(
            ModelSection,
            path=str(chosen.folder),
            tokenizer=tokenizer,
            chat_template=None if chat_template is None else str(chat_template),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
        if control_tokens_in_content is not None:
            rule = replace(rule, as_text=control_tokens_in_content == "text")
        job = ServingJob(
            model=section, name=label, rollout=rollout, device=device, host=host, port=port, key=key,
            shows_key=api_key is None and key_file is None, limits=HttpLimits(request_s=request_seconds),
            rule=rule, version=None if chosen.step is None else version_name(chosen.step), follow=followed,
        )  # fmt: skip
        serve_job(job, typer.echo)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenModel:
    """A folder to serve, and what the run that it comes from says of it."""

    folder: Path
    rule: ControlRule
    run: RunFolder | None = None
    step: int | None = None


@contextmanager
def chosen_model(
    model: str, which: Literal["best", "last"] | int | None, stage: str | None, *, needs_tokenizer: bool
) -> Iterator[ChosenModel]:
    """The folder of a model, or of a run's checkpoint for the time of the block. `which`: None: the newest, and the
    model need not be a run."""
    with ExitStack() as stack:
        path, rule, run, step = model, ControlRule(), None, None
        _require_run_there(Path(model))
        if _is_run(Path(model)):
            _require_checkpoint(model)
            path = stack.enter_context(tempfile.TemporaryDirectory(prefix="podium-serve-")) + "/model"
            step = api.export(model, path, which="last" if which is None else which, stage=stage)
            typer.echo(f"step {step} of {model}")
            run = _run_of(model, stage)
            rule = ControlRule.of(run.recipe(needs_environment=False).model)
        elif which is not None or stage is not None:
            raise typer.BadParameter(f"--step, --best and --stage are of a run, and {model} is none")
        folder = generating_folder(path, needs_tokenizer=needs_tokenizer)
        yield ChosenModel(folder=folder, rule=rule, run=run, step=step)


def _require_run_there(path: Path) -> None:
    """Raises an error that names the runs if a folder is missing where runs are."""
    if path.exists() or not path.parent.is_dir() or path.parent == Path():
        return
    runs = sorted(each.name for each in path.parent.iterdir() if _is_run(each))
    if runs:
        more = ", ..." if len(runs) > _MOST_NAMES else ""
        raise RunFolderError(f"there is no {path}. {path.parent} has the runs {', '.join(runs[:_MOST_NAMES])}{more}.")


def _require_checkpoint(folder: str) -> None:
    """Raises an error that says when there will be a checkpoint, if a run that goes on has none yet."""
    if is_pipeline_folder(folder):
        return
    run = RunFolder.open(folder)
    if not any(run.checkpoints.glob("step-*")) and is_held(run.path):
        raise RunFolderError(
            f"{folder} is running and has no checkpoint yet: it saves one every checkpoint.every steps, and at its "
            "end. Wait for the first."
        )


def _run_of(folder: str, stage: str | None) -> RunFolder:
    """A run; of a pipeline, that of `stage` or of the last one."""
    if not is_pipeline_folder(folder):
        return RunFolder.open(folder)
    pipeline = PipelineFolder.open(folder)
    return RunFolder.open(pipeline.run(stage or pipeline.state()["order"][-1]).path)


def _is_run(path: Path) -> bool:
    return is_pipeline_folder(path) or (path / "recipe.yaml").is_file()
