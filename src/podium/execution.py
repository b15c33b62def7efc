# SPDX-License-Identifier: Apache-2.0
"""Carries out one run: looks at its recipe, makes its folder, starts its ranks or its controller, and notes how it
ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.checks import check_recipe
from podium.data.fingerprints import files_fingerprint, text_fingerprint
from podium.errors import BadRowError, ProgramRaisedError, RecipeError, RunFolderError
from podium.observe import Console, StartUpLog, open_run_console
from podium.observe.metrics import newest_step
from podium.observe.recording import LogFile
from podium.recipe import OnPolicyRecipe, Recipe, SpmdRecipe
from podium.recipe.changes import changes, is_training_data, reason_against, what_matters
from podium.recipe.programs import BUILT_IN
from podium.recipe.resolving import RecipeT, resolved, with_steps
from podium.recipe.variables import KeyParts, texts_of
from podium.recipe.warnings import recipe_warnings
from podium.runs.failing import forget_failures
from podium.runs.folder import RunFolder
from podium.runs.host_memory import held_memory
from podium.runs.lineage import NOTE, Prepared
from podium.runs.supervised import SUPERVISION, SupervisedRun, goes_on_with, is_restarting, predecessor_of
from podium.runs.time_table import closing_lines

# Other files of a model's folder: weights come from the checkpoint.
_NOT_THE_TOKENIZERS = (".safetensors", ".bin", ".md", ".pt", ".pth", ".gguf")
# What a full or read-only disk raises.
_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)

if TYPE_CHECKING:
    from podium.controller.drive import StepChoice
    from podium.controller.start_up import StartUp
    from podium.runs.result import RunResult
    from podium.spmd.launch import RankPlace


def prepare(recipe: Recipe) -> Prepared:
    """Checked, and independent of the folder that podium was started in."""
    from podium.models.folder import local_folder, read_config

    check_recipe(recipe)
    model = local_folder(recipe.model.path, "model.path")
    recipe, reason = with_axes(resolved(recipe, read_config(model, "model.path")))
    recipe = _with_adapter(recipe)
    recipe = _counted(recipe) if recipe.epochs is not None else recipe
    return Prepared(recipe=recipe, model=model, mesh_reason=reason)


def with_axes(recipe: RecipeT) -> tuple[RecipeT, str | None]:
    """A recipe whose axes are left to the planner with the axes that it chooses, and why; both are said and saved. Any
    other recipe as it is."""
    if recipe.placement.policy != "auto":
        return recipe, None
    from podium.observe import open_console
    from podium.planning.mesh_choice import with_chosen_mesh
    from podium.spmd.launch import place_under_torchrun

    under = place_under_torchrun()
    chosen, choice = with_chosen_mesh(recipe, world=None if under is None else under.world)
    console = open_console(rank=0 if under is None else under.rank)
    console.note(choice.text)
    console.close()
    return chosen, choice.text


def _with_adapter(recipe: Recipe) -> Recipe:
    """A recipe that leaves to the planner what generators compute with, with the choice, which is then said and
    saved."""
    if not isinstance(recipe, OnPolicyRecipe) or recipe.model.lora is None or recipe.rollout.adapter != "auto":
        return recipe
    from podium.memory_checks import runs_elsewhere
    from podium.observe import open_console
    from podium.planning.adapter_choice import with_chosen_adapter

    chosen, text = with_chosen_adapter(recipe, is_here=not runs_elsewhere(recipe))
    console = open_console(rank=0)
    console.note(text)
    console.close()
    return chosen


def _counted(recipe: RecipeT) -> RecipeT:
    """A recipe of epochs as one of steps. It reads all training data, so it says so."""
    from podium.data.epochs import steps_of_epochs
    from podium.observe import open_console
    from podium.spmd.launch import place_under_torchrun

    under = place_under_torchrun()
    console = open_console(rank=0 if under is None else under.rank)
    console.note(f"epochs: counting the rows of data.train, for the steps of {recipe.length}")
    counted = with_steps(recipe, steps_of_epochs(recipe))
    console.note(f"epochs: {recipe.length} are {counted.length}")
    console.close()
    return counted


def check_launcher(recipe: Recipe, under: RankPlace | None) -> None:
    """Devices of this machine are counted here; those of a Ray cluster by its preflight."""
    if not isinstance(recipe, SpmdRecipe):
        if under is not None:
            raise RecipeError(
                f"program: {recipe.program} has one controller that starts its own workers, and torchrun starts "
                "several. Run the recipe without torchrun."
            )
        return
    placement = recipe.placement
    if under is None and placement.launcher in ("auto", "local"):
        from podium.engine.mesh import check_devices

        check_devices(placement, placement.devices)
    if under is not None and placement.launcher == "ray":
        raise RecipeError(
            "placement.launcher: ray starts the ranks itself, and torchrun has started this one already. "
            "Run the recipe without torchrun, or remove placement.launcher."
        )


def begin(prepared: Prepared, *, overwrite: bool = False) -> RunResult:
    """Runs a recipe from its beginning. `overwrite` replaces an earlier run of that name, which is kept until the first
    step of the new one is done."""
    recipe = prepared.recipe
    with ExitStack() as stack:
        if isinstance(recipe, OnPolicyRecipe):
            return _train_controlled(prepared, recipe, stack, overwrite=overwrite)
        assert isinstance(recipe, SpmdRecipe)
        return _train_on_ranks(prepared, recipe, stack, overwrite=overwrite)


def _train_on_ranks(prepared: Prepared, recipe: SpmdRecipe, stack: ExitStack, *, overwrite: bool) -> RunResult:
    console, tell = _start_up_console(recipe)
    from podium.programs.spmd import load_program  # heavy: before the folder is made, so that little is left to fail
    from podium.spmd.launch import place_under_torchrun

    load_program(recipe.program)  # a custom one that cannot be loaded is reported before the folder is made
    under = place_under_torchrun()
    assert recipe.run.name is not None
    path = Path(recipe.run.folder) / recipe.run.name
    check_launcher(recipe, under)
    if under is None or (under.rank == 0 and (under.attempt == 0 or not path.exists())):
        if overwrite:
            stack.enter_context(_overwriting(prepared))
        _show_warnings(recipe, console)
        folder = RunFolder.create(
            recipe, files=_fingerprints(prepared), lineage=prepared.lineage(), mesh_reason=prepared.mesh_reason
        )
    else:
        folder = RunFolder(path=path)
    return _launch(prepared, recipe, folder, console, tell, resume_step=None)


def resume_from(prepared: Prepared, folder: RunFolder, step: int) -> RunResult:
    """Continues a run after a checkpoint's step."""
    from podium.spmd.launch import place_under_torchrun

    recipe = prepared.recipe
    check_launcher(recipe, place_under_torchrun())
    if isinstance(recipe, OnPolicyRecipe):
        return _control_again(prepared, recipe, folder, step)
    assert isinstance(recipe, SpmdRecipe)
    console, tell = _start_up_console(recipe)
    return _launch(prepared, recipe, folder, console, tell, resume_step=step)


def restart(prepared: Prepared, folder: RunFolder) -> RunResult:
    """Goes on with a run whose controller died: from memory, or from its newest checkpoint, or from its beginning."""
    from podium.controller.layout import state_folders
    from podium.engine.checkpoint_files import newest_whole

    recipe = prepared.recipe
    assert isinstance(recipe, OnPolicyRecipe)
    predecessor, step = predecessor_of(folder.path), None
    if folder.saved_steps():
        # Workers that live have their state in memory, and read a checkpoint only where they have none.
        is_attached = predecessor is not None and predecessor.has_workers
        step = newest_whole(state_folders(folder), reads_tensors=not is_attached)
        if step is None:
            from podium.engine.checkpoint import newest_usable  # imports torch

            step = newest_usable(folder.checkpoints).step  # says what is damaged
    return _control_again(prepared, recipe, folder, step)


def _control_again(prepared: Prepared, recipe: OnPolicyRecipe, folder: RunFolder, step: int | None) -> RunResult:
    from podium.controller.start_up import early_start

    _tell_supervisor(recipe, folder)
    predecessor = predecessor_of(folder.path)
    console = open_run_console(rank=0, log_every=recipe.run.log_every)
    with early_start(recipe, console, None if predecessor is None else predecessor.ray) as start_up:
        return _control(prepared, recipe, folder, resume_step=step, start_up=start_up)


def _tell_supervisor(recipe: OnPolicyRecipe, folder: RunFolder) -> None:
    """From now on another process goes on with the run if this one dies, where it has a supervisor."""
    supervision, placement = SUPERVISION.get(), recipe.placement
    if supervision is None:
        return
    if not recipe.keeps_snapshots:
        supervision.begins_alone()
    else:
        supervision.begins(
            SupervisedRun(
                folder=folder.path, restarts=placement.restarts, heartbeat_timeout_s=placement.heartbeat_timeout_s
            )
        )


def what_breaks_exactness(before: Recipe, now: Prepared, folder: RunFolder) -> list[tuple[str, bool]]:
    """Keys of the recipe and files that changed since the steps of a run, where a change would have led to other steps.
    With each, whether it is about training data."""
    breaking = [
        (f"  {change} ({change.breaks})", is_training_data(change.key))
        for change in changes(before, now.recipe)
        if change.breaks is not None
    ]
    if all(is_data for _, is_data in breaking):
        known: Mapping[str, Any] = folder.state().get("files", {})
        data = {each.path for each in now.inputs if is_training_data(each.key)}
        breaking += [
            (f"  {name}: its content is not what the run began with", name in data)
            for name, fingerprint in _fingerprints(now, before.references).items()
            if known.get(name, fingerprint) != fingerprint
        ]
    return breaking


def refuse_what_breaks_exactness(
    before: Recipe, now: Prepared, folder: RunFolder, *, accept_changed_data: bool = False
) -> None:
    """Raises where a resumed run would not be the one that was interrupted. `accept_changed_data`: other training data
    than before is no reason."""
    breaking = what_breaks_exactness(before, now, folder)
    refused = [text for text, is_data in breaking if not (is_data and accept_changed_data)]
    if refused:
        advice = "Undo the change, or start a new run with it (model.path may be an export of this one)."
        if all(is_data for _, is_data in breaking):
            advice += (
                f"\nTo go on with the changed data: `podium resume {folder.path} --accept-changed-data`. Rows are then "
                "read from the same position of the new data."
            )
        raise RecipeError(
            f"{folder.path} cannot be resumed exactly; this changed since its checkpoint:\n"
            + "\n".join([*refused, advice])
        )


@contextmanager
def _overwriting(prepared: Prepared) -> Iterator[None]:
    """Sets the folder of an earlier run of the recipe's name aside, unless the recipe reads from it. It is removed
    after the first step of the new run, and brought back if the new run fails before."""
    folder = RunFolder.of(prepared.recipe)
    refuse_inputs_inside(prepared.recipe, folder.path)
    folder.set_aside()
    try:
        yield
        folder.restore_overwritten()  # the new one was stopped before its first step
    except BaseException as error:
        if not is_restarting() and folder.restore_overwritten():
            error.add_note(f"the earlier run in {folder.path} is as it was")
        raise


def refuse_inputs_inside(recipe: Recipe, folder: Path) -> None:
    """Raises where a recipe reads from a folder that is to be removed."""
    for parts, text in texts_of(recipe.model_dump(mode="json")):
        if parts[0] != "run" and "\0" not in text and Path(text).resolve().is_relative_to(folder.resolve()):
            raise RunFolderError(
                f"--overwrite: {'.'.join(map(str, parts))} is in the folder {folder} that would be removed. Move it "
                "elsewhere, or choose another name with --set run.name=..."
            )


def begin_like(earlier: RunFolder, prepared: Prepared, steps: StepChoice, **state: Any) -> RunResult:
    """Runs an on-policy recipe into a new folder, over chosen steps, with the CPU settings of an earlier run. `state`:
    further values for its run.json."""
    recipe, before = prepared.recipe, earlier.state()
    assert isinstance(recipe, OnPolicyRecipe)
    if "cpu" in before:
        state["cpu"] = before["cpu"]
    with ExitStack() as stack:
        return _train_controlled(prepared, recipe, stack, overwrite=False, steps=steps, state=state)


def _train_controlled(
    prepared: Prepared, recipe: OnPolicyRecipe, stack: ExitStack, *, overwrite: bool, steps: StepChoice | None = None,
    state: Mapping[str, Any] | None = None,
) -> RunResult:  # fmt: skip
    from podium.controller.start_up import early_start
    from podium.spmd.launch import place_under_torchrun

    check_launcher(recipe, place_under_torchrun())
    if overwrite:
        stack.enter_context(_overwriting(prepared))
    RunFolder.check_free(recipe)
    _tell_supervisor(recipe, RunFolder.of(recipe))
    console = open_run_console(rank=0, log_every=recipe.run.log_every)
    _show_warnings(recipe, console)
    with early_start(recipe, console) as start_up:
        folder = RunFolder.create(
            recipe, files=_fingerprints(prepared), lineage=prepared.lineage(), mesh_reason=prepared.mesh_reason
        )
        folder.update(**(state or {}))
        return _control(prepared, recipe, folder, resume_step=None, start_up=start_up, steps=steps)


def _show_warnings(recipe: Recipe, console: Console) -> None:
    """Once, before a run begins."""
    for text in recipe_warnings(recipe):
        console.warning(text)
    if recipe.program not in BUILT_IN and recipe.checkpoint.every is None and recipe.steps > 1:
        console.warning(
            "checkpoint.every is not set, so this run saves at its end, on Ctrl-C, and when a step fails before its "
            "update. If the custom program raises between an update and the end of its step, all steps are lost. Set "
            "checkpoint.every, for instance to 10."
        )


def _start_up_console(recipe: SpmdRecipe) -> tuple[Console, StartUpLog]:
    """The console of the process that starts the ranks, and where it reports a start-up on Ray."""
    from podium.spmd.launch import place_under_torchrun

    under = place_under_torchrun()
    console = open_run_console(rank=0 if under is None else under.rank)
    tell = StartUpLog(console)
    if recipe.placement.launcher == "ray":
        tell("importing torch and the program")
    return console, tell


def _launch(
    prepared: Prepared, recipe: SpmdRecipe, folder: RunFolder, console: Console, tell: StartUpLog, *,
    resume_step: int | None,
) -> RunResult:  # fmt: skip
    from podium.programs.spmd import load_program
    from podium.spmd.launch import launch, place_under_torchrun
    from podium.spmd.rank import RankTask, run_rank

    placement, under = recipe.placement, place_under_torchrun()
    task = RankTask(
        recipe=recipe, folder=folder.path, resume_step=resume_step, load_program=load_program,
        launch_id=uuid.uuid4().hex if placement.restarts > 0 and under is None else None,
    )  # fmt: skip
    if under is not None and under.rank != 0:
        return run_rank(under, task)
    with _living(prepared, folder, console, resume_step), ExitStack() as stack:
        if under is not None:
            return _recorded(run_rank(under, task))
        if task.launch_id is not None:
            stack.enter_context(held_memory(folder.path))
        if placement.launcher == "ray":
            from podium.spmd.on_ray import launch_on_ray

            return _recorded(launch_on_ray(task, folder, console, tell))
        stop = folder.stop_file
        return _recorded(
            launch(
                run_rank, (task,), ranks=placement.devices, restarts=placement.restarts, stop_file=stop,
                stacks_file=folder.stacks_file, note=console.note,
                newest_step=lambda: newest_step(folder.metrics_file), most_stopped_s=placement.heartbeat_timeout_s,
                most_hung_s=placement.timeout_s,
            )
        )  # fmt: skip


def _control(
    prepared: Prepared, recipe: OnPolicyRecipe, folder: RunFolder, *, resume_step: int | None, start_up: StartUp,
    steps: StepChoice | None = None,
) -> RunResult:  # fmt: skip
    from podium.controller.drive import ControlledProgram, StepChoice, run_controlled

    def load_program() -> ControlledProgram:
        from podium.programs import controlled  # imports torch

        return controlled.load_program(recipe.program)

    with _living(prepared, folder, start_up.console, resume_step):
        result = run_controlled(
            load_program, recipe, folder, resume_step=resume_step, start_up=start_up, steps=steps or StepChoice()
        )
        return _recorded(result)


def _recorded(result: RunResult) -> RunResult:
    """The result with the table of the workers' time, after its lines were added to the run's console.log."""
    result = replace(result, table=tuple(closing_lines(result.folder)))
    _log(RunFolder(path=result.folder), result.lines())
    return result


def _log(folder: RunFolder, lines: Sequence[str]) -> None:
    """Adds what the command line prints after the run to its console.log."""
    with contextlib.suppress(OSError):  # what the run itself has written counts
        LogFile(folder.console_file).write("".join(f"{line}\n" for line in lines))


@contextmanager
def _living(prepared: Prepared, folder: RunFolder, console: Console, resume_step: int | None) -> Iterator[None]:
    """The run has its folder to itself; what the console shows and how it ends is noted there."""
    with folder.held():
        console.record_in(folder.console_file)
        folder.stop_file.unlink(missing_ok=True)  # of an earlier life of this run
        forget_failures(folder.path)
        if resume_step is not None and not goes_on_with(folder.path):
            folder.write_recipe(prepared.recipe, mesh_reason=prepared.mesh_reason)
            before = folder.state().get("lineage")
            lineage = prepared.lineage(before, step=resume_step)
            for code in prepared.changed_code(before or {}):
                console.note(f"changed since the run was last started, and used as it is now: {code}")
            folder.update(status="running", files=_fingerprints(prepared), lineage=lineage)
        supervision = SUPERVISION.get()
        if supervision is not None:
            supervision.is_recorded()
        try:
            yield
            folder.discard_if_stopped_early()
        except BaseException as error:
            if is_restarting():
                raise
            folder.end_failed(error)
            if isinstance(error, ProgramRaisedError) and folder.console_file.is_file():
                error.add_note(f"the traceback is in {folder.console_file}")
            if isinstance(error, BadRowError):
                error.add_note("rows that cannot be used are skipped with: --set data.on_error=skip")
            _log(folder, [f"error: {error or type(error).__name__}", *getattr(error, "__notes__", ())])
            if isinstance(error, OSError) and error.errno in _DISK_TROUBLE:
                raise RunFolderError(f"{folder.path} cannot be written: {error}. Make room and continue.") from error
            raise


def _fingerprints(prepared: Prepared, written: Mapping[KeyParts, str] | None = None) -> dict[str, str]:
    """Of what a resumed run must find as it was: data with its `map`, weights, config, tokenizer, new tokens, and
    values of environment variables. `written`: the references to those when the run began."""
    recipe = prepared.recipe
    # Weights too: references, teachers and the base of an adapter are read again, and are in no checkpoint of the run.
    # Code of rewards and environments may be fixed: what it raised is often why a run is resumed.
    matters = what_matters(recipe)
    read = [each for each in prepared.inputs if each.key in matters]
    counted = [each for each in read if each.kind != "code" or each.key.startswith("data.")]
    fingerprints = {each.stored_path: each.fingerprint for each in counted}
    tokenizer = Path(recipe.model.tokenizer) if recipe.model.tokenizer else prepared.model
    files = [prepared.model / "config.json", *(tokenizer.glob("*") if tokenizer.is_dir() else ())]
    if recipe.model.chat_template is not None:
        files.append(Path(recipe.model.chat_template))
    for file in files:
        if file.is_file() and file.suffix not in _NOT_THE_TOKENIZERS and file.name != NOTE:
            fingerprints[_stored_name(file, recipe)] = files_fingerprint([file])
    references = recipe.references if written is None else written
    return fingerprints | _environment_fingerprints(prepared, references)


def _stored_name(file: Path, recipe: Recipe) -> str:
    """A file as it is named in run.json: not by the value of an environment variable."""
    for key in ("model.chat_template", "model.tokenizer", "model.path"):
        written, value = recipe.written(key), getattr(recipe.model, key.removeprefix("model."))
        if written is not None and value is not None and file.is_relative_to(value):
            return os.path.normpath(os.path.join(written, file.relative_to(value)))
    return str(file.resolve())


def _environment_fingerprints(prepared: Prepared, written: Mapping[KeyParts, str]) -> dict[str, str]:
    """Of values at keys that refer to environment variables, where another value would change the steps. What a
    variable names is an input and has a fingerprint of its own; options may be secrets, which may be replaced."""
    recipe, matters = prepared.recipe, what_matters(prepared.recipe)
    inputs = {each.key for each in prepared.inputs}
    keys = {".".join(map(str, parts)): text for parts, text in written.items() if "options" not in parts}
    return {
        f"{key} ({text})": text_fingerprint(json.dumps(matters[key]))
        for key, text in keys.items()
        if key in matters and key not in inputs and reason_against(key, recipe) is not None
    }
