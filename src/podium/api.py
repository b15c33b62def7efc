# SPDX-License-Identifier: Apache-2.0
"""The verbs of the command line for Python: train, resume, export, show, check, verify, generate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from podium.checks import check_recipe, deep_report
from podium.data.tokenizer import require_tokenizer_files
from podium.errors import ModelError, RecipeError, RunFolderError
from podium.execution import (
    begin,
    check_launcher,
    prepare,
    refuse_inputs_inside,
    refuse_what_breaks_exactness,
    resume_from,
)
from podium.models.folder import is_hub_id
from podium.pipeline_checks import check_pipeline
from podium.recipe import (
    ModelSection,
    PipelineRecipe,
    PlacementSection,
    Recipe,
    RolloutSection,
    SourceSection,
    load_recipe,
    parse_recipe,
)
from podium.recipe.pipeline_loading import (
    load_any_recipe,
    overridden,
    parse_pipeline,
    resolved_pipeline,
    unmade_stage_recipe,
)
from podium.recipe.rules import recipe_warnings
from podium.runs.folder import RunFolder, is_pipeline_folder
from podium.runs.lineage import Prepared, require_what_export_reads, write_note
from podium.runs.pipeline_folder import PipelineFolder
from podium.runs.showing import show_lines

if TYPE_CHECKING:
    from podium.models.verify import Comparison
    from podium.rollout.jobs import GenerationSummary
    from podium.rollout.requests import Sampling
    from podium.runs.result import RunResult
    from podium.spmd.export import ExportDtype, Which


def check(
    recipe: Recipe | PipelineRecipe | str | Path, *, overrides: Sequence[str] = (), deep: bool = False
) -> list[str]:
    """Raises what is wrong with a recipe; returns lines about what was seen."""
    loaded = _loaded(recipe, overrides)
    if isinstance(loaded, PipelineRecipe):
        return check_pipeline(loaded, deep=deep)
    check_recipe(loaded)
    lines = [f"program {loaded.program}: {loaded.execution} execution, {loaded.length}"]
    if is_hub_id(loaded.model.path):
        lines.append(f"model.path: there is no folder {loaded.model.path}; taken as a hub id, not looked up")
    lines += [f"warning: {text}" for text in recipe_warnings(loaded)]
    return lines + (deep_report(loaded) if deep else [])


def train(
    recipe: Recipe | PipelineRecipe | str | Path, *, overrides: Sequence[str] = (), overwrite: bool = False
) -> RunResult:
    """Runs a recipe from its beginning, on one device in this process or on several as processes of their own. Of a
    pipeline that ran before, the stages that did not change are left alone; its result is a PipelineResult.
    `overwrite` removes an earlier run or pipeline of that name first."""
    loaded = _loaded(recipe, overrides)
    if isinstance(loaded, PipelineRecipe):
        return _run_pipeline(resolved_pipeline(loaded), PipelineFolder.at(loaded), overwrite=overwrite)
    return begin(prepare(loaded), overwrite=overwrite)


def resume(folder: str | Path, *, overrides: Sequence[str] = (), step: int | None = None) -> RunResult:
    """Continues a run exactly where its newest (or the given) checkpoint stopped; a pipeline in the stage that was
    interrupted."""
    from podium.engine.checkpoint import newest_usable
    from podium.models.folder import local_folder

    if is_pipeline_folder(folder):
        if step is not None:
            raise RunFolderError(
                f"--step: {folder} is a pipeline, and steps are of its stages. Give the stage's own folder: "
                f"`podium resume {folder}/STAGE --step {step}`."
            )
        pipeline = PipelineFolder.open(folder)
        return _run_pipeline(pipeline.recipe(tuple(overrides)), pipeline)
    opened = RunFolder.open(folder)
    reader = newest_usable(opened.checkpoints, step)
    before = parse_recipe(reader.record["extras"]["recipe"], origin=str(reader.folder))
    now = load_recipe(opened.recipe_file, overrides)
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
    prepared = Prepared(recipe=now, model=local_folder(now.model.path, "model.path"))
    refuse_what_breaks_exactness(before, prepared, opened)
    return resume_from(prepared, opened, reader.step)


def export(
    folder: str | Path,
    out: str | Path,
    *,
    which: Which = "last",
    dtype: ExportDtype | None = None,
    stage: str | None = None,
    adapter: bool = False,
) -> int:
    """Writes a run's checkpoint as a plain Hugging Face folder; returns its step. Of a pipeline it is the last stage's,
    or that of `stage`. An adapter is merged into its base, or with `adapter` written alone, as peft loads it."""
    from podium.spmd.export import export_checkpoint

    run = _run_to_export(folder, stage)
    require_what_export_reads(run)
    step = export_checkpoint(run, Path(out), which=which, dtype=dtype, adapter=adapter)
    write_note(run, Path(out), step=step)
    return step


def show(folder: str | Path) -> list[str]:
    """What there is to know of a run, a pipeline or an exported folder, as lines of text."""
    return show_lines(Path(folder))


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
    section = ModelSection(
        path=str(model), dtype=dtype, compile="on" if compile else "off", trust_remote_code=trust_remote_code
    )
    placement = PlacementSection(devices=devices, device=device)
    return launch(verify_rank, (section, placement), ranks=devices, restarts=0, stop_file=None)


def generate(
    model: str | Path,
    prompts: str | Path | SourceSection,
    out: str | Path,
    *,
    sampling: Sampling,
    samples: int = 1,
    seed: int = 0,
    limit: int | None = None,
    logprobs: bool = False,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    rollout: RolloutSection | None = None,
    tokenizer: str | Path | None = None,
    chat_template: str | Path | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> GenerationSummary:
    """Answers every prompt of a file or other data source into the JSONL file `out`; called again after it was broken
    off, it continues that file. `progress` shows on standard error how far it is."""
    folder = _generating_folder(str(model), needs_tokenizer=tokenizer is None)
    section = ModelSection(
        path=str(folder),
        tokenizer=None if tokenizer is None else str(tokenizer),
        chat_template=None if chat_template is None else str(chat_template),
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    from podium.rollout.jobs import GenerationJob

    job = GenerationJob(
        model=section,
        prompts=prompts if isinstance(prompts, SourceSection) else SourceSection(path=str(prompts)),
        out=Path(out).expanduser(),
        sampling=sampling,
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


def _generating_folder(model: str, *, needs_tokenizer: bool) -> Path:
    """The model's folder, fetched where it is a hub id; what lacks something to generate with is refused."""
    from podium.models.folder import check_model_folder, check_speaks, local_folder

    given = Path(model)
    if (given / "recipe.yaml").is_file() or (given / "checkpoint.json").is_file():
        run = given if (given / "recipe.yaml").is_file() else given.parent.parent
        raise RunFolderError(
            f"MODEL: {model} belongs to a run of Podium and is not a Hugging Face checkpoint. Export it first with "
            f"`podium export {run} OUT`, then give OUT."
        )
    check_model_folder(model, "MODEL", weights=False, tokenizer=False)
    check_speaks(model, "MODEL")
    folder = local_folder(model, "MODEL")
    if not list(folder.glob("*.safetensors")):
        raise ModelError(
            f"MODEL: {model} has no *.safetensors weights to generate with. Convert other weights with transformers' "
            "save_pretrained."
        )
    if needs_tokenizer:
        try:
            require_tokenizer_files(str(folder), "MODEL")
        except ModelError as error:
            raise ModelError(
                f"MODEL: {model} has no tokenizer, and prompts are text. Save one there with "
                "tokenizer.save_pretrained, or give --tokenizer a folder or hub id that has one."
            ) from error
    return folder


def _loaded(recipe: Recipe | PipelineRecipe | str | Path, overrides: Sequence[str]) -> Recipe | PipelineRecipe:
    if not isinstance(recipe, Recipe | PipelineRecipe):
        return load_any_recipe(recipe, overrides)
    loaded = recipe
    if overrides or isinstance(recipe, PipelineRecipe):
        values = overridden(recipe.stored_values(), overrides)
        loaded = parse_pipeline(values) if isinstance(recipe, PipelineRecipe) else parse_recipe(values)
    if loaded.run.name is None:
        raise RecipeError("run.name: a recipe that was not read from a file needs a name for its run folder.")
    return loaded


def _run_pipeline(recipe: PipelineRecipe, folder: PipelineFolder, *, overwrite: bool = False) -> RunResult:
    """Looks at all stages first, so that a mistake in the last one is reported before the first one runs."""
    from podium.engine.checkpoint import newest_usable
    from podium.spmd.launch import place_under_torchrun

    if place_under_torchrun() is not None:
        raise RecipeError(
            "program: a pipeline starts the ranks of its stages itself, and torchrun starts several of it. Run it "
            "without torchrun; placement.devices says how many ranks a stage has."
        )
    check_pipeline(recipe, deep=False)
    for name in recipe.order():
        check_launcher(unmade_stage_recipe(recipe, name), None)
    if overwrite:
        for name in recipe.order():
            refuse_inputs_inside(unmade_stage_recipe(recipe, name), folder.path)
        folder.remove()
    from podium.programs.pipeline import Verbs, run_pipeline  # heavy: imported after all cheap checks

    verbs = Verbs(
        prepare=prepare,
        train=begin,
        # The fingerprint is that of the steps already taken: what they read is what they would read now.
        resume=lambda prepared, run: resume_from(prepared, run, newest_usable(run.checkpoints).step),
        export=lambda run, out: export(run.path, out),
    )
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
