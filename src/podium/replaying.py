# SPDX-License-Identifier: Apache-2.0
"""`podium replay`: runs the updates of a recorded run again and compares the weights, or trains the run's recipe
without staleness beside it and compares the curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import RecipeError, RunFolderError, StepRecordError
from podium.execution import begin_like, prepare, what_breaks_exactness
from podium.observe import StepMetrics, read_metrics
from podium.observe.formats import table
from podium.recipe import OnPolicyRecipe, Recipe, parse_recipe
from podium.runs.folder import RunFolder, is_held
from podium.runs.step_files import recorded_steps, verify_steps

if TYPE_CHECKING:
    from podium.engine.checkpoint_difference import CheckpointDifference
    from podium.runs.lineage import Prepared

# Metrics that an update computes: the first that differs tells where two runs part.
_OF_UPDATES = ("loss", "grad_norm", "value/loss", "value/grad_norm")
_REWARD, _SCORE = "reward/mean", "heldout/score"
_MOST_ROWS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDifference:
    """The first step of two runs whose update differs."""

    step: int
    metric: str
    original: float | None  # None: the run does not have it
    replayed: float | None

    def __str__(self) -> str:
        values = f"{self.original!r} in the run and {self.replayed!r} in the replay"
        if self.original is None or self.replayed is None:
            return f"step {self.step}: {self.metric} is {values}"
        return f"step {self.step}: {self.metric} is {values}, {abs(self.original - self.replayed):.3g} apart"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayResult:
    """How the weights of a replay compare with those of the run."""

    run: Path
    folder: Path
    step: int  # of the run's last checkpoint
    replayed: int  # steps that were replayed: fewer if the user stopped it
    weights: CheckpointDifference | None  # None: it was stopped
    first: MetricDifference | None  # the first update that differs
    notes: tuple[str, ...] = ()  # what may be the reason for a difference

    @property
    def is_identical(self) -> bool:
        """Whether all tensors of the last checkpoint are equal, bit for bit."""
        return self.weights is not None and self.weights.is_none

    def lines(self) -> list[str]:
        """The result in words."""
        if self.weights is None:
            return [
                f"stopped at step {self.replayed} of {self.step}: nothing is compared. {self.folder} can be removed"
            ]
        count = self.weights.num_tensors
        if self.is_identical:
            return [
                f"identical: all {count} tensors of step {self.step} are those of {self.run}, bit for bit",
                f"  the replay is in {self.folder}",
            ]
        names = self.weights.different
        first = "no update has another loss or gradient norm" if self.first is None else str(self.first)
        return [
            f"different: {len(names)} of {count} tensors of step {self.step} are not those of {self.run}",
            f"  first difference: {first}",
            f"  largest difference of a number: {self.weights.largest:.3g}; first tensor: {names[0]}",
            *(f"  {note}" for note in self.notes),
            f"  the replay is in {self.folder}",
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FreshResult:
    """A run with staleness, and the same recipe without it."""

    run: Path
    folder: Path
    staleness: int
    steps: int
    original: Sequence[StepMetrics]
    fresh: Sequence[StepMetrics]

    def lines(self) -> list[str]:
        """Both curves side by side: `reward/mean`, as the mean over the steps since the row before, and
        `heldout/score` where there is one."""
        sides = (self.original, self.fresh)
        rewards = [{each.step: each.values[_REWARD] for each in side if _REWARD in each.values} for side in sides]
        scores = [{each.step: each.values[_SCORE] for each in side if _SCORE in each.values} for side in sides]
        shown = _shown_steps(self.steps, scores[0].keys() | scores[1].keys())
        head: tuple[str, ...] = ("step", "reward", "reward fresh")
        if any(scores):
            head = (*head, "score", "score fresh")
        rows: list[tuple[str, ...]] = [head]
        before = 0
        for step in shown:
            means = [_mean([side[each] for each in range(before + 1, step + 1) if each in side]) for side in rewards]
            cells = [str(step), *means]
            if any(scores):
                cells += [f"{side[step]:.4f}" if step in side else "-" for side in scores]
            rows.append(tuple(cells))
            before = step
        return [
            *table(rows),
            f"  reward, score: {self.run}, staleness {self.staleness}",
            f"  fresh: {self.folder}, staleness 0",
        ]


def replay_run(path: str | Path, out: str | Path | None = None) -> ReplayResult:
    """Runs the updates of a recorded run again, up to its last checkpoint, in the folder `out` (default: RUN-replay),
    and compares the weights."""
    run, recipe = _opened(path)
    folder = _free_folder(run, out, "replay")
    if not recorded_steps(run.steps):
        raise StepRecordError(
            f"{run.path} has no record of its steps, because rollout.record was off (its default at rollout.staleness "
            "0). Train it again with rollout.record: true to be able to replay it."
        )
    from podium.controller.drive import StepChoice
    from podium.engine.checkpoint import newest_usable
    from podium.engine.checkpoint_difference import compare_checkpoints

    reader = newest_usable(run.checkpoints)
    extras = reader.record["extras"]
    verify_steps(run.steps, reader.step, extras.get("record"))
    prepared = prepare(_replay_recipe(recipe, folder))
    before = parse_recipe(extras["recipe"], origin=str(reader.folder))
    _refuse_changes(run, what_breaks_exactness(before, prepared, run))
    notes = _notes(run, prepared, ranks=reader.record["ranks"])
    choice = StepChoice(recorded=run.steps.absolute(), last=reader.step)
    result = begin_like(run, prepared, choice, replay_of=str(run.path.absolute()))
    if result.step < reader.step:
        return ReplayResult(
            run=run.path, folder=folder, step=reader.step, replayed=result.step, weights=None, first=None
        )
    return ReplayResult(
        run=run.path,
        folder=folder,
        step=reader.step,
        replayed=result.step,
        weights=compare_checkpoints(reader, newest_usable(RunFolder.open(folder).checkpoints, reader.step)),
        first=first_difference(read_metrics(run.path), read_metrics(folder), last=reader.step),
        notes=notes,
    )


def train_fresh(path: str | Path, out: str | Path | None = None) -> FreshResult:
    """Trains the recipe of a run without staleness, on the same prompts and for as many steps as the run has, in the
    folder `out` (default: RUN-fresh)."""
    run, recipe = _opened(path)
    folder = _free_folder(run, out, "fresh")
    staleness = recipe.rollout.staleness
    if staleness == 0:
        raise RunFolderError(
            f"{run.path} was trained with rollout.staleness 0: a run without staleness would be the same run."
        )
    original = read_metrics(run.path)
    steps = max((each.step for each in original if _REWARD in each.values), default=0)
    if steps == 0:
        raise RunFolderError(f"{run.path} has finished no step, so there is nothing to compare with.")
    from podium.controller.drive import StepChoice

    prepared = prepare(_fresh_recipe(recipe, folder))
    _refuse_changes(run, what_breaks_exactness(prepared.recipe, prepared, run))
    begin_like(run, prepared, StepChoice(last=steps))
    return FreshResult(
        run=run.path, folder=folder, staleness=staleness, steps=steps, original=original, fresh=read_metrics(folder)
    )


def first_difference(
    original: Sequence[StepMetrics], replayed: Sequence[StepMetrics], *, last: int
) -> MetricDifference | None:
    """The first step up to `last` whose update has another loss or gradient norm."""
    runs = [_updates(side) for side in (original, replayed)]
    for step in range(1, last + 1):
        mine, theirs = (side.get(step, {}) for side in runs)
        for metric in _OF_UPDATES:
            one, other = mine.get(metric), theirs.get(metric)
            if one != other and not (one is not None and other is not None and math.isnan(one) and math.isnan(other)):
                return MetricDifference(step=step, metric=metric, original=one, replayed=other)
    return None


# --- internals ---


def _opened(path: str | Path) -> tuple[RunFolder, OnPolicyRecipe]:
    run = RunFolder.open(path)
    if is_held(run.path):
        raise RunFolderError(f"{run.path} is running right now. Wait until it has ended, then replay it.")
    recipe = run.recipe()
    if not isinstance(recipe, OnPolicyRecipe):
        raise RecipeError(
            f"program: {run.path} is a run of {recipe.program}, which trains on fixed data and records no steps. "
            "`podium train` with the same recipe repeats it."
        )
    if "replay_of" in run.state():
        raise RunFolderError(f"{run.path} is a replay itself. Replay the run: {run.state()['replay_of']}.")
    return run, recipe


def _free_folder(run: RunFolder, out: str | Path | None, suffix: str) -> Path:
    path = run.path.absolute()
    folder = path.with_name(f"{path.name}-{suffix}") if out is None else Path(out).absolute()
    if folder.exists():
        raise RunFolderError(f"{folder} exists already. Remove it, or name another folder with --out.")
    return folder


def _replay_recipe(recipe: OnPolicyRecipe, folder: Path) -> Recipe:
    """The recipe without what a replay does not do: evaluations, loggers, and limits that would stop it."""
    values = _in_folder(recipe, folder)
    values["run"]["loggers"] = []
    values["data"] |= {"heldout": []}
    values["checkpoint"] |= {"every": None, "keep_best": False}
    values["optimizer"] |= {"max_skipped_in_a_row": recipe.steps + 1}
    values["rollout"] |= {"record": False}
    if "max_kl_behavior" in values["algorithm"]:
        values["algorithm"] |= {"max_kl_behavior": None}
    del values["evaluation"]
    return parse_recipe(values)


def _fresh_recipe(recipe: OnPolicyRecipe, folder: Path) -> Recipe:
    values = _in_folder(recipe, folder)
    values["rollout"] |= {"staleness": 0, "on_new_weights": "keep", "record": None}
    return parse_recipe(values)


def _in_folder(recipe: OnPolicyRecipe, folder: Path) -> dict[str, Any]:
    values = recipe.stored_values()
    return {**values, "run": {**values["run"], "name": folder.name, "folder": str(folder.parent)}}


def _refuse_changes(run: RunFolder, breaking: Sequence[tuple[str, bool]]) -> None:
    if breaking:
        raise RecipeError(
            f"{run.path} cannot be run again as it was; this changed since its last checkpoint:\n"
            + "\n".join([*(text for text, _ in breaking), "Undo the change."])
        )


def _notes(run: RunFolder, prepared: Prepared, *, ranks: int) -> tuple[str, ...]:
    """What may make a replay differ, and is no reason to refuse it."""
    from podium.controller.layout import num_learners

    recipe, lineage = prepared.recipe, run.state().get("lineage") or {}
    assert isinstance(recipe, OnPolicyRecipe)
    notes = [f"changed since the run: {code}" for code in prepared.changed_code(lineage)]
    if len(codes := lineage.get("code", ())) > 1:
        steps = ", ".join(str(code["after_step"]) for code in codes[1:])
        notes.append(f"the run was resumed with other versions of its code, after step {steps}")
    if num_learners(recipe) != ranks:
        notes.append(f"the run's checkpoint is of {ranks} learners, and the replay has {num_learners(recipe)}")
    return tuple(notes)


def _updates(lines: Sequence[StepMetrics]) -> dict[int, Mapping[str, float]]:
    """Step -> metrics, of the lines of steps."""
    return {line.step: line.values for line in lines if "step_s" in line.values}


def _shown_steps(last: int, evaluated: Iterable[int]) -> list[int]:
    """All steps of a short run. Of a long one those that were evaluated, or else every n-th."""
    steps = sorted(step for step in evaluated if step <= last)
    if last <= _MOST_ROWS:
        steps = sorted({*steps, *range(1, last + 1)})
    elif not steps:
        steps = list(range(1, last + 1))
    every = math.ceil(len(steps) / _MOST_ROWS) if last > _MOST_ROWS else 1
    return sorted({*steps[every - 1 :: every], last})


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.4f}" if values else "-"
