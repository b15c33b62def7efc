# SPDX-License-Identifier: Apache-2.0
"""Runs stages in sequence: each is a separate run, and starts from the weights of earlier ones.

A stage runs when its fingerprint (recipe, data, parent weights) is new. An interrupted stage is resumed, and a finished
one is skipped. Every decision depends only on files, so a pipeline may be killed at any moment."""

from __future__ import annotations

import contextlib
import functools
import gc
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, assert_never

from podium.data.fingerprints import folder_fingerprint, recipe_fingerprint
from podium.errors import RunStoppedError
from podium.observe import Stopwatch
from podium.observe.console import PlainConsole
from podium.recipe import PipelineRecipe, Recipe, parse_recipe
from podium.recipe.pipeline_loading import stage_recipe
from podium.runs.folder import RunFolder
from podium.runs.lineage import Prepared, read_note, short
from podium.runs.pipeline_folder import PipelineFolder, StageRecord
from podium.runs.result import RunResult
from podium.runs.supervised import SUPERVISION, predecessor_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Verbs:
    """Operations on one stage. They are the API's own, which this file cannot import."""

    prepare: Callable[[Recipe], Prepared]
    train: Callable[[Prepared], RunResult]
    resume: Callable[[Prepared, RunFolder], RunResult]
    export: Callable[[RunFolder, Path], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutcome:
    """What was done for a stage. `result` is None if nothing was trained."""

    name: str
    done: Literal["skipped", "exported", "resumed", "trained"]
    fingerprint: str
    result: RunResult | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult(RunResult):
    """How a pipeline ended. Step, loss and scores are those of the last stage trained in this call."""

    stages: tuple[StageOutcome, ...]

    def lines(self) -> list[str]:
        """Where the time went, how the pipeline ended, and the command that comes next."""
        lines = RunResult.lines(self)
        if self.status == "stopped" and self.step == 0 and len(self.stages) > 1:
            name = self.stages[-1].name
            lines[-1] = f"stopped before the first step of stage {name}; continue with: podium resume {self.folder}"
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """The recorded state of a stage on disk, and its present fingerprint."""

    record: StageRecord
    fingerprint: str  # fingerprint of the stage as it should be
    folder_fingerprint: str | None  # of the recipe in its folder on the same content; None: it has no folder
    saved_step: int | None  # newest checkpoint; 0: its controller died, and it goes on in any case
    steps: int
    export_fingerprint: str | None  # fingerprint of the exported weights on disk


Action = Literal["skip", "export", "resume", "train"]


def decide(facts: StageFacts) -> Action:
    """Decides what to do for a stage; pure. If it returns train, an existing folder belongs to something else."""
    if facts.record.fingerprint != facts.fingerprint:
        return "train"
    is_exported = facts.export_fingerprint is not None and facts.export_fingerprint == facts.record.weights
    if facts.record.status == "done" and is_exported:
        return "skip"
    if facts.saved_step is None or facts.folder_fingerprint != facts.fingerprint:
        return "train"
    return "export" if facts.saved_step >= facts.steps else "resume"


def run_pipeline(recipe: PipelineRecipe, folder: PipelineFolder, verbs: Verbs) -> PipelineResult:
    """Runs every stage to its end, in order. The first Ctrl-C stops it at the next step, so that it can be resumed."""
    console, watch, outcomes = PlainConsole(sys.stdout, log_every=1), Stopwatch(), list[StageOutcome]()
    with folder.create_and_hold():
        folder.begin(recipe)
        supervision = SUPERVISION.get()
        if supervision is not None:
            supervision.begins_pipeline(folder.path)
        order = recipe.order()
        for number, name in enumerate(order, start=1):
            say = functools.partial(_say, console, f"stage {number} of {len(order)}, {name}")
            with _accounted(folder, name), watch.span(name):
                outcomes.append(_run_stage(recipe, folder, name, verbs, say))
            _free_memory()
            result = outcomes[-1].result
            if result is not None and result.status == "stopped":
                folder.update(status="stopped")
                break
        else:
            folder.update(status="finished")
        return _result(folder, tuple(outcomes), watch)


def _run_stage(
    recipe: PipelineRecipe, folder: PipelineFolder, name: str, verbs: Verbs, say: Callable[[str], None]
) -> StageOutcome:
    places = {stage: str(folder.export(stage)) for stage in recipe.stages}
    prepared = verbs.prepare(stage_recipe(recipe, name, places, folder.path))
    run, fingerprint = folder.run(name), prepared.fingerprint
    record, result = folder.record(name), None
    action = decide(_facts(folder, name, prepared, record))
    match action:
        case "skip":
            _relocate(run, prepared.recipe)
            say(f"unchanged (fingerprint {short(fingerprint)}), not run again")
            return StageOutcome(name=name, done="skipped", fingerprint=fingerprint, result=None)
        case "train":
            # First move the folder, then write the note: if killed in between, no folder is mistaken for another
            # stage's.
            aside = folder.set_aside(name)
            if aside is not None:
                is_new = record.fingerprint != fingerprint
                say(f"{'changed since it ran' if is_new else 'had no checkpoint to resume from'}; it is now in {aside}")
            record = StageRecord(status="running", fingerprint=fingerprint)
            folder.note(name, record)
            say(f"{prepared.recipe.program}, {prepared.recipe.steps} steps (fingerprint {short(fingerprint)})")
            result = verbs.train(prepared)
        case "resume":
            folder.note(name, replace(record, status="running"))
            prepared = _with_axes_of(run, prepared)
            say(f"resumes where it was interrupted (fingerprint {short(fingerprint)})")
            result = verbs.resume(prepared, run)
        case "export":
            _relocate(run, prepared.recipe)
            say(f"was trained to its end (fingerprint {short(fingerprint)}), its weights are exported")
            run.update(status="finished", step=prepared.recipe.steps)
        case other:
            assert_never(other)
    if result is not None and result.status == "stopped":
        folder.note(name, replace(record, status="stopped"))
    else:
        _export(folder, name, replace(record, status="done"), verbs)
    done: Literal["exported", "resumed", "trained"] = (
        "trained" if action == "train" else "resumed" if action == "resume" else "exported"
    )
    return StageOutcome(name=name, done=done, fingerprint=fingerprint, result=result)


def _with_axes_of(run: RunFolder, prepared: Prepared) -> Prepared:
    """A stage whose axes are left to the planner goes on with those that it began with, on as many devices."""
    recipe, before = prepared.recipe, run.recipe(needs_environment=False).placement
    is_as_large = before.training_devices == recipe.placement.training_devices
    if prepared.mesh_reason is None or before.policy is None or not is_as_large:
        return prepared
    placement = recipe.placement.model_copy(update={"policy": before.policy})
    return replace(prepared, recipe=recipe.model_copy(update={"placement": placement}), mesh_reason=None)


def _say(console: PlainConsole, title: str, text: str) -> None:
    console.note(f"{title}: {text}")


def _facts(folder: PipelineFolder, name: str, prepared: Prepared, record: StageRecord) -> StageFacts:
    run, export = folder.run(name), folder.export(name)
    begun = run.recipe_file.is_file()
    is_exported = export.is_dir() and read_note(export) is not None
    return StageFacts(
        record=record,
        fingerprint=prepared.fingerprint,
        folder_fingerprint=_folder_fingerprint(run, prepared) if begun else None,
        saved_step=max(run.saved_steps(), default=None if predecessor_of(run.path) is None else 0),
        steps=prepared.recipe.steps,
        export_fingerprint=folder_fingerprint(export) if is_exported else None,
    )


def _folder_fingerprint(run: RunFolder, prepared: Prepared) -> str:
    """Of the recipe in a stage's folder, on the present content. It may be of an earlier file, with other environment
    variables."""
    return recipe_fingerprint(run.recipe(needs_environment=False), prepared.inputs)


def _relocate(run: RunFolder, recipe: Recipe) -> None:
    """Points the run at the present paths of base model, tokenizer and new tokens, which an export reads again. They
    may have moved since; the fingerprint shows that they are the same."""
    before = run.recipe() if run.recipe_file.is_file() else None
    if before is not None and before.model != recipe.model:
        values = {**before.stored_values(), "model": recipe.stored_values()["model"]}
        run.write_recipe(parse_recipe(values))


def _export(folder: PipelineFolder, name: str, record: StageRecord, verbs: Verbs) -> None:
    """Exports the weights. The stage is done once they are complete and this is recorded."""
    out = folder.export(name)
    if out.exists():
        shutil.rmtree(out)
    verbs.export(folder.run(name), out)
    folder.note(name, replace(record, weights=folder_fingerprint(out)))


@contextlib.contextmanager
def _accounted(folder: PipelineFolder, name: str) -> Iterator[None]:
    """Records what ends a stage. Adds the stage's name and how to continue to the error."""
    try:
        yield
    except BaseException as error:
        was_asked = isinstance(error, KeyboardInterrupt | RunStoppedError)
        status: Literal["stopped", "failed"] = "stopped" if was_asked else "failed"
        with contextlib.suppress(Exception):
            # A finished stage stays finished: the interrupted work only checked that it is unchanged.
            if folder.record(name).status != "done":
                folder.note(name, replace(folder.record(name), status=status))
            folder.update(status=status)
        # The stage's own error says to resume it alone; the pipeline continues from here instead.
        notes = [note for note in getattr(error, "__notes__", ()) if "podium resume" not in note]
        error.__notes__ = [
            *notes,
            f"this was stage {name}. Continue with: podium resume {folder.path} (what is done is not run again)",
        ]
        raise


def _free_memory() -> None:
    """Frees memory: the next stage may need all of the device."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _result(folder: PipelineFolder, outcomes: tuple[StageOutcome, ...], watch: Stopwatch) -> PipelineResult:
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    last = results[-1] if results else None
    return PipelineResult(
        folder=folder.path,
        status=last.status if last is not None else "finished",
        step=last.step if last is not None else 0,
        loss=last.loss if last is not None else None,
        heldout_loss=last.heldout_loss if last is not None else None,
        score=last.score if last is not None else None,
        time=watch.summary(),
        stages=outcomes,
    )
