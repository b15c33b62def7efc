# SPDX-License-Identifier: Apache-2.0
"""The verbs of the command line for Python: train, resume, evaluate, replay, try, export, show, list, check, init,
verify, generate; and metrics."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from podium.checks import check_recipe, deep_report
from podium.drafting.draft import DraftRequest, draft_recipe
from podium.errors import RecipeError, RunFolderError
from podium.evaluating import EvaluationResult, evaluate_model, evaluate_run
from podium.execution import (
    begin,
    check_launcher,
    prepare,
    refuse_inputs_inside,
    refuse_what_breaks_exactness,
    restart,
    resume_from,
    with_axes,
)
from podium.generating import generating_folder, prompt_source, require_number, sampling_of, section_of
from podium.memory_checks import devices_per_machine, memory_report, refuse_what_cannot_fit
from podium.models.folder import is_hub_id
from podium.observe import FrameLibrary, metrics_frame, read_metrics
from podium.observe.artifacts import artifact_trackers, log_export
from podium.pipeline_checks import check_pipeline, check_stages, refuse_stages_that_cannot_fit
from podium.python_hints import for_python
from podium.python_objects import SectionArguments, without_objects
from podium.recipe import (
    ModelSection,
    PipelineRecipe,
    PlacementSection,
    Recipe,
    RolloutSection,
    SourceSection,
    parse_recipe,
)
from podium.recipe.pipeline_loading import (
    resolved_pipeline,
    unmade_stage_recipe,
)
from podium.recipe.warnings import recipe_warnings
from podium.recipe_arguments import Overrides, RecipeLike, load_recipe_arguments, override_texts
from podium.replaying import FreshResult, ReplayResult, replay_run, train_fresh
from podium.runs.comparing import RunComparison, compare_runs
from podium.runs.folder import RunFolder, is_pipeline_folder
from podium.runs.lineage import Prepared, require_what_export_reads, write_note
from podium.runs.listing import list_lines
from podium.runs.pipeline_folder import PipelineFolder
from podium.runs.showing import show_lines
from podium.runs.supervised import goes_on_with, predecessor_of
from podium.runs.tracing import TraceSummary, write_trace
from podium.trying import run_trial

if TYPE_CHECKING:
    from podium.controller.trial import Trial
    from podium.models.verify import Comparison
    from podium.rollout.jobs import GenerationSummary
    from podium.rollout.requests import Sampling
    from podium.runs.result import RunResult
    from podium.spmd.export import ExportDtype, Which


@for_python
def check(
    recipe: RecipeLike,
    *,
    overrides: Overrides = (),
    deep: bool = False,
    all_rows: bool = False,
    progress: bool = True,
    device: str | None = None,
    data: Mapping[str, Any] | None = None,
    reward: Sequence[Any] | Callable[..., Any] | None = None,
    environment: Any = None,
    loggers: Sequence[Any] | None = None,
) -> list[str]:
    """Raises what is wrong with a recipe, also that it cannot fit the memory; returns lines about what was seen. `deep`
    loads the tokenizer and reads the first rows of every source, `all_rows` reads all of them; `progress` then shows on
    standard error how far it is. `device`: name of a device that the run will have, if it is not this machine's.
    Objects are given as to `train`."""
    sections = SectionArguments(data=data, reward=reward, environment=environment, loggers=loggers)
    with tempfile.TemporaryDirectory(prefix="podium-check-") as cache:  # a check leaves nothing behind
        loaded = load_recipe_arguments(recipe, overrides, sections, cache=Path(cache))
        stream = sys.stderr if progress else None
        return _checked(loaded, deep=deep, all_rows=all_rows, stream=stream, device=device)


def _checked(
    loaded: Recipe | PipelineRecipe, *, deep: bool, all_rows: bool, stream: TextIO | None, device: str | None = None
) -> list[str]:
    if isinstance(loaded, PipelineRecipe):
        return check_pipeline(loaded, deep=deep or all_rows, all_rows=all_rows, progress=stream, device=device)
    check_recipe(loaded, per_machine=devices_per_machine(loaded, device))
    lines = [f"program {loaded.program}: {loaded.execution} execution, {loaded.length}"]
    if is_hub_id(loaded.model.path):
        lines.append(f"model.path: there is no folder {loaded.model.path}; taken as a hub id, not looked up")
    lines += [f"warning: {text}" for text in recipe_warnings(loaded)]
    lines += memory_report(loaded, device)
    return lines + (deep_report(loaded, all_rows=all_rows, progress=stream) if deep or all_rows else [])


@for_python
def try_recipe(
    recipe: RecipeLike,
    *,
    overrides: Overrides = (),
    prompts: int = 2,
    samples: int = 2,
    stand_in: bool = False,
    warn: Callable[[str], None] = lambda text: None,
    data: Mapping[str, Any] | None = None,
    reward: Sequence[Any] | Callable[..., Any] | None = None,
    environment: Any = None,
) -> Trial:
    """Generates and grades a few episodes of a recipe in this process, with its real rewards or environment, and trains
    nothing. `stand_in`: a tiny random model has the place of the recipe's own. `warn` gets the warnings of rewards and
    environments. Objects are given as to `train`."""
    sections = SectionArguments(data=data, reward=reward, environment=environment)
    with tempfile.TemporaryDirectory(prefix="podium-try-") as cache:  # a trial leaves nothing behind
        loaded = load_recipe_arguments(recipe, overrides, sections, cache=Path(cache))
        if isinstance(loaded, PipelineRecipe):
            raise RecipeError("program: a pipeline has several recipes. Try the recipe of one stage.")
        return run_trial(loaded, num_prompts=prompts, samples=samples, stand_in=stand_in, warn=warn)


@for_python
def train(
    recipe: RecipeLike,
    *,
    overrides: Overrides = (),
    overwrite: bool = False,
    ignore_memory: bool = False,
    data: Mapping[str, Any] | None = None,
    reward: Sequence[Any] | Callable[..., Any] | None = None,
    environment: Any = None,
    loggers: Sequence[Any] | None = None,
) -> RunResult:
    """Runs a recipe from its beginning, on one device in this process or on several as processes of their own. Of a
    pipeline that ran before, the stages that did not change are left alone; its result is a PipelineResult.
    `overwrite` replaces an earlier run or pipeline of that name, which is kept until the first step is done.
    `ignore_memory` begins a run also where the prediction says that it cannot fit this machine's memory.

    `data` ({"train": ..., "heldout": ...}), `reward`, `environment` and `loggers` replace what the recipe says. Where
    the recipe has `file.py:function`, they take the function or class itself; for a data source, a list of rows (dicts)
    or a `datasets.Dataset`. Values of a dict recipe may be such objects too (docs/python.md)."""
    sections = SectionArguments(data=data, reward=reward, environment=environment, loggers=loggers)
    loaded = load_recipe_arguments(recipe, overrides, sections)
    if isinstance(loaded, PipelineRecipe):
        pipeline = resolved_pipeline(loaded)
        if not ignore_memory:
            refuse_stages_that_cannot_fit(pipeline)
        return _run_pipeline(pipeline, PipelineFolder.at(loaded), overwrite=overwrite)
    if not ignore_memory:
        refuse_what_cannot_fit(loaded)
    return begin(prepare(loaded), overwrite=overwrite)


@for_python
def resume(
    folder: str | Path,
    *,
    overrides: Overrides = (),
    step: int | None = None,
    accept_changed_data: bool = False,
    reward: Sequence[Any] | Callable[..., Any] | None = None,
    environment: Any = None,
    loggers: Sequence[Any] | None = None,
) -> RunResult:
    """Continues a run exactly where its newest (or the given) checkpoint stopped; a pipeline in the stage that was
    interrupted. `reward`, `environment` and `loggers` replace objects that the run was given, such as a reward function
    in which a mistake was found. `accept_changed_data`: training data may have changed since then; the lineage records
    it."""
    from podium.models.folder import local_folder

    folder, texts = _path(folder, "folder"), override_texts(overrides)
    sections = SectionArguments(reward=reward, environment=environment, loggers=loggers)
    if is_pipeline_folder(folder):
        if step is not None:
            raise RunFolderError(
                f"--step: {folder} is a pipeline, and steps are of its stages. Give the stage's own folder: "
                f"`podium resume {folder}/STAGE --step {step}`."
            )
        if not sections.is_empty:
            raise RunFolderError(
                f"reward, environment, loggers: {folder} is a pipeline. Give them to one of its stages: {folder}/STAGE."
            )
        if accept_changed_data:
            raise RunFolderError(
                f"--accept-changed-data: {folder} is a pipeline, which runs stages again whose data changed. To go on "
                f"with a stage as it is, give the stage's own folder: `podium resume {folder}/STAGE "
                "--accept-changed-data`."
            )
        pipeline = PipelineFolder.open(folder)
        return _run_pipeline(pipeline.recipe(texts), pipeline)
    opened = RunFolder.open(folder)
    if "replay_of" in opened.state():
        raise RunFolderError(
            f"{folder} is a replay, which is not continued. Remove it, and replay again: `podium replay "
            f"{opened.state()['replay_of']}`."
        )
    if goes_on_with(opened.path):
        recipe = opened.recipe()
        return restart(Prepared(recipe=recipe, model=local_folder(recipe.model.path, "model.path")), opened)
    from podium.engine.checkpoint import newest_usable  # imports torch, for which a restarted run does not wait

    reader = newest_usable(opened.checkpoints, step)
    before = parse_recipe(reader.record["extras"]["recipe"], origin=str(reader.folder))
    values = without_objects(sections.within_run(opened.recipe(needs_environment=False).stored_values()), texts)
    now = parse_recipe(values, origin=str(opened.recipe_file))
    if reader.step >= now.steps:
        further = (
            f"train further with --set steps={2 * now.steps}"
            if now.optimizer.schedule == "constant"
            else f"start a new run from the export (the {now.optimizer.schedule} schedule has ended)"
        )
        raise RunFolderError(
            f"{folder} is finished: its checkpoint is of step {reader.step} of {now.steps}. "
            f"Export it with `podium export {folder} OUT`, or {further}."
        )
    check_recipe(now)
    now, reason = with_axes(now)  # only where the overrides say auto: the run's recipe has sizes
    prepared = Prepared(recipe=now, model=local_folder(now.model.path, "model.path"), mesh_reason=reason)
    refuse_what_breaks_exactness(before, prepared, opened, accept_changed_data=accept_changed_data)
    return resume_from(prepared, opened, reader.step)


@for_python
def export(
    folder: str | Path,
    out: str | Path,
    *,
    which: Which = "last",
    dtype: ExportDtype | None = None,
    stage: str | None = None,
    adapter: bool = False,
    log_artifact: bool = False,
) -> int:
    """Writes a run's checkpoint as a plain Hugging Face folder; returns its step. Of a pipeline it is the last stage's,
    or that of `stage`. An adapter is merged into its base, or with `adapter` written alone, as peft loads it. With
    `log_artifact` the folder is an artifact of the run at its trackers too (wandb, mlflow, trackio)."""
    from podium.spmd.export import export_checkpoint

    run, out = _run_to_export(_path(folder, "folder"), stage), _path(out, "out")
    require_what_export_reads(run)
    trackers = artifact_trackers(run.recipe(needs_environment=False).run.loggers) if log_artifact else []
    step = export_checkpoint(run, out, which=which, dtype=dtype, adapter=adapter)
    write_note(run, out, step=step)
    log_export(trackers, run.path, out)
    return step


@for_python
def show(folder: str | Path) -> list[str]:
    """What there is to know of a run, a pipeline or an exported folder, as lines of text."""
    return show_lines(_path(folder, "folder"))


@for_python
def compare(first: str | Path, second: str | Path) -> RunComparison:
    """What the recipes of two runs say differently, and which metrics differ, from which step on. `lines` tells it."""
    return compare_runs(_path(first, "first"), _path(second, "second"))


@for_python
def trace(run: str | Path, out: str | Path) -> TraceSummary:
    """Writes what every worker of a run or pipeline did when to a file for ui.perfetto.dev; compressed if its name ends
    in .gz."""
    return write_trace(_path(run, "run"), _path(out, "out"))


@for_python
def metrics(run: str | Path | RunResult, *, library: FrameLibrary | None = None) -> Any:
    """The metrics of a run (its folder, its metrics.jsonl, or the result of `train`) as a DataFrame with one row per
    step. `library`: pandas or polars; default: pandas, or polars where there is no pandas."""
    return metrics_frame(read_metrics(_path(getattr(run, "folder", run), "run")), library)


@for_python
def list_runs(folder: str | Path = "runs") -> list[str]:
    """The runs and pipelines of a folder as lines of text, the last changed first."""
    return list_lines(Path(folder))


@for_python
def init(
    data: str | Path,
    model: str | Path,
    *,
    program: str | None = None,
    out: str | Path = "recipe.yaml",
    heldout: str | Path | None = None,
    teacher: str | Path | None = None,
    chat_template: str | Path | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Writes a recipe for a data file and a model, and a Python file beside it if the program needs a reward. Returns
    lines about what was seen and written. Without `program`, the data's columns choose it."""
    return draft_recipe(
        DraftRequest(
            data=str(data),
            model=str(model),
            out=Path(out),
            method=program,
            heldout=None if heldout is None else str(heldout),
            teacher=None if teacher is None else str(teacher),
            chat_template=None if chat_template is None else str(chat_template),
            overwrite=overwrite,
        )
    )


@for_python
def evaluate(
    target: str | Path,
    *,
    recipe: str | Path | None = None,
    which: Which = "last",
    overrides: Sequence[str] = (),
) -> EvaluationResult:
    """Evaluates without training: a checkpoint of a run folder (`which`: last, best or a step), or with `recipe` a
    model folder. A run's folder stays as it is, and the metrics are those of its evaluation at that step."""
    path = Path(target)
    if (path / "run.json").is_file() or is_pipeline_folder(path):
        if recipe is not None:
            raise RunFolderError(
                f"--recipe: {target} is a run and has its own recipe. Leave --recipe out, or evaluate what "
                f"`podium export {target} OUT` wrote: `podium evaluate OUT --recipe {recipe}`."
            )
        return evaluate_run(path, which=which, overrides=overrides)
    if (path / "checkpoint.json").is_file():
        step = path.name.removeprefix("step-").lstrip("0")
        raise RunFolderError(
            f"{target} is a checkpoint of a run. Give the run: `podium evaluate {path.parent.parent} --step {step}`."
        )
    if recipe is None:
        raise RunFolderError(
            f"{target} is not a run folder. To evaluate a model, name the recipe whose evaluation is meant: "
            f"`podium evaluate {target} --recipe RECIPE`."
        )
    if which != "last":
        raise RunFolderError(f"--step and --best choose a checkpoint of a run, and {target} is a model. Remove them.")
    return evaluate_model(str(target), recipe, overrides=overrides)


@for_python
def replay(run: str | Path, *, out: str | Path | None = None, fresh: bool = False) -> ReplayResult | FreshResult:
    """Runs the updates of a recorded run again from its record, and compares the weights of its last checkpoint. With
    `fresh`, trains its recipe without staleness instead, and compares the curves. `out`: a new folder for it; default:
    RUN-replay or RUN-fresh beside the run."""
    return train_fresh(_path(run, "run"), out) if fresh else replay_run(_path(run, "run"), out)


@for_python
def verify(
    model: str | Path,
    *,
    devices: int = 1,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    compile: bool = False,
    trust_remote_code: bool = False,
) -> Comparison:
    """Compares Podium's forward with plain transformers'; the result says whether they agree."""
    from podium.models.folder import check_model_folder
    from podium.spmd.launch import launch
    from podium.spmd.verify import verify_rank

    check_model_folder(str(model), "MODEL", weights=False, tokenizer=False)
    section = section_of(
        ModelSection, path=str(model), dtype=dtype, compile="on" if compile else "off",
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    placement = section_of(PlacementSection, devices=devices, device=device)
    return launch(verify_rank, (section, placement), ranks=devices, restarts=0, stop_file=None)


@for_python
def generate(
    model: str | Path,
    prompts: str | Path | SourceSection | Sequence[Mapping[str, Any]] | Any,
    out: str | Path,
    *,
    sampling: Sampling | Mapping[str, Any],
    samples: int = 1,
    seed: int = 0,
    limit: int | None = None,
    logprobs: bool = False,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    rollout: RolloutSection | None = None,
    tokenizer: str | Path | None = None,
    chat_template: str | Path | None = None,
    control_tokens_in_content: Literal["text", "control"] = "text",
    trust_remote_code: bool = False,
    progress: bool = True,
) -> GenerationSummary:
    """Answers every prompt of a file or other data source into the JSONL file `out`; called again after it was broken
    off, it continues that file. Prompts may also be a list of rows or a `datasets.Dataset`, and `sampling` a dict.
    `control_tokens_in_content` is the key of that name in a recipe's `model`. `progress` shows on standard error how
    far it is."""
    folder = generating_folder(str(model), needs_tokenizer=tokenizer is None)
    out = _path(out, "out").expanduser()
    section = section_of(
        ModelSection,
        path=str(folder),
        tokenizer=None if tokenizer is None else str(tokenizer),
        chat_template=None if chat_template is None else str(chat_template),
        control_tokens_in_content=control_tokens_in_content,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    for name, number in (("samples", samples), ("seed", seed), ("limit", 1 if limit is None else limit)):
        require_number(number, name)
    from podium.rollout.jobs import GenerationJob

    job = GenerationJob(
        model=section,
        prompts=prompt_source(prompts, out),
        out=out,
        sampling=sampling_of(sampling),
        samples=samples,
        seed=seed,
        limit=limit,
        logprobs=logprobs,
        device=device,
        rollout=rollout or RolloutSection(),
    )
    rows = job.open_prompts()
    from podium.rollout.batch import generate_file  # heavy: imported after all cheap checks

    return generate_file(job, rows, stream=sys.stderr if progress else None)


def _path(value: Any, name: str) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise RunFolderError(f"{name}: expected a path, found {value!r}.")
    return Path(value)


def _run_pipeline(recipe: PipelineRecipe, folder: PipelineFolder, *, overwrite: bool = False) -> RunResult:
    """Looks at all stages first, so that a mistake in the last one is reported before the first one runs."""
    from podium.engine.checkpoint import newest_usable
    from podium.spmd.launch import place_under_torchrun

    if place_under_torchrun() is not None:
        raise RecipeError(
            "program: a pipeline starts the ranks of its stages itself, and torchrun starts several of it. Run it "
            "without torchrun; placement.devices says how many ranks a stage has."
        )
    check_stages(recipe)
    for name in recipe.order():
        check_launcher(unmade_stage_recipe(recipe, name), None)
    if overwrite:
        for name in recipe.order():
            refuse_inputs_inside(unmade_stage_recipe(recipe, name), folder.path)
    from podium.programs.pipeline import Verbs, run_pipeline  # heavy: imported after all cheap checks

    verbs = Verbs(
        prepare=prepare,
        train=begin,
        # The fingerprint is that of the steps already taken: what they read is what they would read now.
        resume=lambda prepared, run: (
            resume_from(prepared, run, newest_usable(run.checkpoints).step)
            if predecessor_of(run.path) is None
            else restart(prepared, run)
        ),
        export=lambda run, out: export(run.path, out),
    )
    with folder.overwriting() if overwrite else contextlib.nullcontext():
        return run_pipeline(recipe, folder, verbs)


def _run_to_export(folder: str | Path, stage: str | None) -> RunFolder:
    if not is_pipeline_folder(folder):
        if stage is not None:
            raise RunFolderError(f"--stage: {folder} is not the folder of a pipeline. Remove it.")
        return RunFolder.open(folder)
    pipeline = PipelineFolder.open(folder)
    order = pipeline.state()["order"]
    if stage is not None and stage not in order:
        raise RunFolderError(f"--stage: {folder} has no stage {stage!r}. There are: {', '.join(order)}.")
    run = pipeline.run(stage or order[-1])
    if not run.path.is_dir():
        raise RunFolderError(
            f"stage {run.path.name} of {folder} has not been run yet. Run `podium resume {folder}`, or export "
            "another one with --stage."
        )
    return RunFolder.open(run.path)
