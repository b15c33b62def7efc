# SPDX-License-Identifier: Apache-2.0
"""The verbs of the command line for Python: train, resume, export, check, verify, generate."""

from __future__ import annotations

import errno
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from podium.checks import check_recipe, deep_report
from podium.data.tokenizer import require_tokenizer_files
from podium.errors import ModelError, RecipeError, RunFolderError
from podium.models.folder import is_hub_id
from podium.recipe import (
    ModelSection,
    PlacementSection,
    Recipe,
    RolloutSection,
    SourceSection,
    apply_overrides,
    load_recipe,
    parse_recipe,
    plugins,
)
from podium.recipe.changes import changes
from podium.recipe.programs import SIGNALS
from podium.recipe.resolving import resolved
from podium.spmd.folder import RunFolder

# Other files of a model's folder: weights come from the checkpoint.
_NOT_THE_TOKENIZERS = (".safetensors", ".bin", ".md", ".pt", ".pth", ".gguf")
# What a full or read-only disk raises.
_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)

if TYPE_CHECKING:
    from podium.controller.drive import ControlledProgram
    from podium.models.verify import Comparison
    from podium.rollout.jobs import GenerationSummary
    from podium.rollout.requests import Sampling
    from podium.spmd.export import ExportDtype, Which
    from podium.spmd.launch import RankPlace
    from podium.spmd.rank import Program
    from podium.spmd.run import RunResult


def check(recipe: Recipe | str | Path, *, overrides: Sequence[str] = (), deep: bool = False) -> list[str]:
    """Raises what is wrong with a recipe; returns lines about what was seen."""
    made = _recipe(recipe, overrides)
    check_recipe(made)
    lines = [f"program {made.program}: {SIGNALS[made.program].execution} execution, {made.steps} steps"]
    if is_hub_id(made.model.path):
        lines.append(f"model.path: there is no folder {made.model.path}; taken as a hub id, not looked up")
    return lines + (deep_report(made) if deep else [])


def train(recipe: Recipe | str | Path, *, overrides: Sequence[str] = ()) -> RunResult:
    """Runs a recipe from its beginning, on one device in this process or on several as processes of their own."""
    from podium.models.folder import local_folder, read_config
    from podium.programs import registry  # heavy: before the folder is made, so that little is left to fail
    from podium.spmd.launch import place_under_torchrun

    made = _recipe(recipe, overrides)
    check_recipe(made)
    model = local_folder(made.model.path, "model.path")
    made = resolved(made, read_config(model, "model.path"))
    under = place_under_torchrun()
    assert made.run.name is not None
    path = Path(made.run.folder) / made.run.name
    _check_launcher(made, under)
    if under is None or (under.rank == 0 and (under.attempt == 0 or not path.exists())):
        folder = RunFolder.create(made, inputs=_fingerprints(made, model))
    else:
        folder = RunFolder(path=path)
    if SIGNALS[made.program].execution == "controlled":
        return _control(registry.CONTROLLED[made.program], made, folder, resume_step=None)
    return _launch(registry.PROGRAMS[made.program], made, folder, resume_step=None)


def resume(folder: str | Path, *, overrides: Sequence[str] = (), step: int | None = None) -> RunResult:
    """Continues a run exactly where its newest (or the given) checkpoint stopped."""
    from podium.engine.checkpoint import newest_usable
    from podium.models.folder import local_folder
    from podium.programs import registry
    from podium.spmd.launch import place_under_torchrun

    opened = RunFolder.open(folder)
    reader = newest_usable(opened.checkpoints, step)
    before = parse_recipe(reader.record["extras"]["recipe"], origin=str(reader.folder))
    now = parse_recipe(
        apply_overrides(opened.recipe().model_dump(mode="json"), overrides), origin=str(opened.recipe_file)
    )
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
    _refuse_what_breaks_exactness(before, now, opened, local_folder(now.model.path, "model.path"))
    _check_launcher(now, place_under_torchrun())
    if SIGNALS[now.program].execution == "controlled":
        return _control(registry.CONTROLLED[now.program], now, opened, resume_step=reader.step)
    return _launch(registry.PROGRAMS[now.program], now, opened, resume_step=reader.step)


def export(folder: str | Path, out: str | Path, *, which: Which = "last", dtype: ExportDtype | None = None) -> int:
    """Writes a run's checkpoint as a plain Hugging Face folder; returns its step."""
    from podium.spmd.export import export_checkpoint

    return export_checkpoint(RunFolder.open(folder), Path(out), which=which, dtype=dtype)


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
    from podium.spmd.verify import VerifyTask, verify_rank

    check_model_folder(str(model), "MODEL", weights=False, tokenizer=False)
    section = ModelSection(
        path=str(model), dtype=dtype, compile="on" if compile else "off", trust_remote_code=trust_remote_code
    )
    task = VerifyTask(model=section, placement=PlacementSection(devices=devices, device=device))
    return launch(verify_rank, (task,), ranks=devices, restarts=0, stop_file=None)


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
    from podium.rollout.batch import generate_file  # heavy: what can be wrong so far has been looked at

    return generate_file(job, rows, stream=sys.stderr if progress else None)


def _generating_folder(model: str, *, needs_tokenizer: bool) -> Path:
    """The model's folder, fetched where it is a hub id; what lacks something to generate with is refused."""
    from podium.models.folder import check_model_folder, local_folder

    given = Path(model)
    if (given / "recipe.yaml").is_file() or (given / "checkpoint.json").is_file():
        run = given if (given / "recipe.yaml").is_file() else given.parent.parent
        raise RunFolderError(
            f"MODEL: {model} belongs to a run of Podium and is not a Hugging Face checkpoint. Export it first with "
            f"`podium export {run} OUT`, then give OUT."
        )
    check_model_folder(model, "MODEL", weights=False, tokenizer=False)
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


def _check_launcher(recipe: Recipe, under: RankPlace | None) -> None:
    """Devices of this machine are counted here; those of a Ray cluster by its preflight."""
    from podium.engine.mesh import check_devices

    placement = recipe.placement
    if SIGNALS[recipe.program].execution == "controlled":
        if under is not None:
            raise RecipeError(
                f"program: {recipe.program} has one controller that starts its own workers, and torchrun starts "
                "several. Run the recipe without torchrun."
            )
        return
    if under is None and placement.launcher in ("auto", "local"):
        check_devices(placement, placement.devices)
    if under is not None and placement.launcher == "ray":
        raise RecipeError(
            "placement.launcher: ray starts the ranks itself, and torchrun has started this one already. "
            "Run the recipe without torchrun, or remove placement.launcher."
        )


def _recipe(recipe: Recipe | str | Path, overrides: Sequence[str]) -> Recipe:
    if not isinstance(recipe, Recipe):
        return load_recipe(recipe, overrides)
    if overrides:
        recipe = parse_recipe(apply_overrides(recipe.model_dump(mode="json"), overrides))
    if recipe.run.name is None:
        raise RecipeError("run.name: a recipe that was not read from a file needs a name for its run folder.")
    return recipe


def _launch(program: Program, recipe: Recipe, folder: RunFolder, *, resume_step: int | None) -> RunResult:
    from podium.spmd.launch import launch, place_under_torchrun
    from podium.spmd.rank import RankTask, run_rank

    task = RankTask(recipe=recipe, folder=folder.path, resume_step=resume_step)
    placement, under = recipe.placement, place_under_torchrun()
    if under is not None and under.rank != 0:
        return run_rank(under, task, program)
    with _living(recipe, folder, resume_step):
        if under is not None:
            return run_rank(under, task, program)
        if placement.launcher == "ray":
            from podium.spmd.on_ray import RayTask, launch_on_ray

            return launch_on_ray(RayTask(task=task, program=program, placement=placement), folder)
        stop = folder.stop_file
        return launch(run_rank, (task, program), ranks=placement.devices, restarts=placement.restarts, stop_file=stop)


def _control(program: ControlledProgram, recipe: Recipe, folder: RunFolder, *, resume_step: int | None) -> RunResult:
    from podium.controller.drive import run_controlled

    with _living(recipe, folder, resume_step):
        return run_controlled(program, recipe, folder, resume_step=resume_step)


@contextmanager
def _living(recipe: Recipe, folder: RunFolder, resume_step: int | None) -> Iterator[None]:
    """The run has its folder to itself; how it ends is noted there."""
    with folder.held():
        folder.stop_file.unlink(missing_ok=True)  # of an earlier life of this run
        if resume_step is not None:
            folder.write_recipe(recipe)
            folder.update(status="running")
        try:
            yield
        except BaseException as error:
            folder.discard_if_never_begun()
            folder.mark_failed(error)
            if isinstance(error, OSError) and error.errno in _DISK_TROUBLE:
                raise RunFolderError(f"{folder.path} cannot be written: {error}. Make room and go on.") from error
            raise


def _fingerprints(recipe: Recipe, model: Path) -> dict[str, str]:
    """Of what a run reads, so that a resumed run notices when it changed: data (large files by their head and tail),
    config, tokenizer, chat template and `map` plug-ins."""
    from podium.data.sources import open_source

    found = {
        section.path: open_source(section, f"data.train.{index}").fingerprint()
        for index, section in enumerate(recipe.data.train)
    }
    tokenizer = Path(recipe.model.tokenizer) if recipe.model.tokenizer else model
    files = [model / "config.json", *(tokenizer.glob("*") if tokenizer.is_dir() else ())]
    files += [Path(plugins.split_plugin(section.map)[0]) for section in recipe.data.train if section.map is not None]
    if recipe.model.chat_template is not None:
        files.append(Path(recipe.model.chat_template))
    for file in files:
        if file.is_file() and file.suffix not in _NOT_THE_TOKENIZERS:
            found[str(file.resolve())] = f"{zlib.crc32(file.read_bytes()):08x}"
    return found


def _refuse_what_breaks_exactness(before: Recipe, now: Recipe, folder: RunFolder, model: Path) -> None:
    changed = changes(before, now)
    breaking = [f"  {change} ({change.breaks})" for change in changed if change.breaks is not None]
    if not breaking:
        known: Mapping[str, Any] = folder.state().get("inputs", {})
        found = _fingerprints(now, model)
        breaking = [
            f"  {name}: its content is not what the run began with"
            for name in found
            if known.get(name, found[name]) != found[name]
        ]
    if breaking:
        raise RecipeError(
            f"{folder.path} cannot be resumed exactly; this changed since its checkpoint:\n"
            + "\n".join(breaking)
            + "\n"
            "Undo the change, or start a new run with it (model.path may be an export of this one)."
        )
