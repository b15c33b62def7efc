# SPDX-License-Identifier: Apache-2.0
"""Evaluates a checkpoint of a run, or a model folder, as a recipe's evaluation does during training. Works in a
temporary folder, so that the run's own folder stays as it is."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.data.tokenizer import has_tokenizer
from podium.errors import RecipeError, RunFolderError
from podium.execution import check_launcher, prepare
from podium.observe import StartUpLog, open_run_console, read_metrics
from podium.observe.metrics import json_value
from podium.recipe import DpoRecipe, OnPolicyRecipe, Recipe, SpmdRecipe, apply_overrides, load_recipe, parse_recipe
from podium.recipe.dense import ReferencedPreference
from podium.runs.folder import RunFolder

if TYPE_CHECKING:
    from podium.engine.checkpoint import CheckpointReader
    from podium.spmd.export import Which


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluationResult:
    """Metrics of one evaluation by their names in metrics.jsonl (`heldout/loss`, `heldout/score`), and every greedy
    answer with its prompt, reference and score. On fixed data there are answers if the recipe generates some
    (`evaluation.generation`)."""

    evaluated: str  # the run's folder or the model's
    step: int | None  # of the run's checkpoint; None: a model's folder
    metrics: Mapping[str, float]
    answers: tuple[Mapping[str, Any], ...]

    def lines(self) -> list[str]:
        """One line per metric."""
        return [f"{name}: {value:.6g}" for name, value in self.metrics.items()]

    def as_json(self) -> str:
        """All fields as JSON. Non-finite metrics are strings, as in metrics.jsonl."""
        values = {
            "evaluated": self.evaluated,
            "step": self.step,
            "metrics": {name: json_value(value) for name, value in self.metrics.items()},
            "answers": list(self.answers),
        }
        return json.dumps(values, indent=1, ensure_ascii=False, default=str) + "\n"


def evaluate_run(path: str | Path, *, which: Which = "last", overrides: Sequence[str] = ()) -> EvaluationResult:
    """Evaluates a checkpoint of a run with the recipe that it was saved with. `which` 0 is the model before training.
    The metrics are those of the evaluation in training at that step."""
    run = RunFolder.open(path)
    reader: CheckpointReader | None = None
    values = run.recipe().stored_values()
    if which != 0:
        from podium.spmd.export import chosen_checkpoint

        reader = chosen_checkpoint(run, which)
        values = reader.record["extras"]["recipe"]
    # Run folders may be opened from elsewhere; what was computed before training is cached beside them.
    values = {**values, "run": {**values["run"], "folder": str(run.path.absolute().parent)}}
    recipe = parse_recipe(apply_overrides(values, overrides), origin=str(run.recipe_file))
    state = run.state()
    with _scratch(recipe, reader, {"cpu": state["cpu"]} if "cpu" in state else {}) as folder:
        return _evaluated(recipe, folder, str(path), step=0 if reader is None else reader.step)


def evaluate_model(model: str, recipe: str | Path, *, overrides: Sequence[str] = ()) -> EvaluationResult:
    """Evaluates a model folder (or hub id, or adapter folder) as the recipe would evaluate its own model."""
    changed = recipe_for_model(load_recipe(recipe, overrides), model)
    with _scratch(changed, None, {}) as folder:
        return _evaluated(changed, folder, model, step=None)


def recipe_for_model(recipe: Recipe, model: str) -> Recipe:
    """The recipe with another model. What the recipe's loss compares with stays the recipe's own model."""
    values = recipe.model_dump(mode="json")
    section, base, folder = values["model"], recipe.model.path, Path(model)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        section["lora"] = {"adapter": model}
    else:
        section.update(path=model, init="pretrained", lora=None)
        if section["tokenizer"] is None and folder.is_dir() and not has_tokenizer(folder):
            section["tokenizer"] = base
    if isinstance(recipe, DpoRecipe) and _compares_with_itself(recipe):
        _require_plain_reference(recipe)
        values["preference"]["reference_model"] = base
    return parse_recipe(values)


def _compares_with_itself(recipe: DpoRecipe) -> bool:
    return isinstance(recipe.preference, ReferencedPreference) and recipe.preference.reference_model is None


def _require_plain_reference(recipe: DpoRecipe) -> None:
    lora = recipe.model.lora
    if recipe.model.init == "random" or (lora is not None and lora.adapter is not None):
        raise RecipeError(
            "preference.reference_model: the recipe compares with its own initial weights, which are random or have "
            "an adapter, so no folder holds them. Set it to a folder with --set, or evaluate the run itself."
        )


def _evaluated(recipe: Recipe, folder: RunFolder, evaluated: str, *, step: int | None) -> EvaluationResult:
    if not recipe.data.heldout:
        raise RecipeError(
            "data.heldout: the recipe has no held-out data, so there is nothing to evaluate. Name some with "
            "--set 'data.heldout=[{path: FILE}]'."
        )
    _refuse_torchrun()
    # Loggers of the run would take this evaluation for one of the training.
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"loggers": ()})})
    recipe = prepare(recipe).recipe
    check_launcher(recipe, None)
    resume_step = step or None
    if isinstance(recipe, OnPolicyRecipe):
        from podium.controller.drive import evaluate_controlled
        from podium.controller.start_up import early_start

        with early_start(recipe, open_run_console(rank=0)) as start_up:
            evaluate_controlled(recipe, folder, resume_step=resume_step, start_up=start_up)
    else:
        assert isinstance(recipe, SpmdRecipe)
        _evaluate_on_ranks(recipe, folder, resume_step)
    metrics = read_metrics(folder.metrics_file)[-1].values
    lines = folder.samples_file.read_text(encoding="utf-8").splitlines() if folder.samples_file.is_file() else []
    answers = ({name: value for name, value in json.loads(line).items() if name != "step"} for line in lines)
    return EvaluationResult(evaluated=evaluated, step=step, metrics=metrics, answers=tuple(answers))


def _evaluate_on_ranks(recipe: SpmdRecipe, folder: RunFolder, resume_step: int | None) -> None:
    from podium.programs.spmd import load_program
    from podium.spmd.launch import launch
    from podium.spmd.rank import RankTask, run_rank

    task = RankTask(
        recipe=recipe, folder=folder.path, resume_step=resume_step, load_program=load_program, evaluates_only=True
    )
    if recipe.placement.launcher == "ray":
        from podium.spmd.on_ray import launch_on_ray

        console = open_run_console(rank=0)
        launch_on_ray(task, folder, console, StartUpLog(console))
    else:
        launch(run_rank, (task,), ranks=recipe.placement.devices, restarts=0, stop_file=None)


def _refuse_torchrun() -> None:
    from podium.spmd.launch import place_under_torchrun

    if place_under_torchrun() is not None:
        raise RecipeError(
            "podium evaluate starts the ranks itself, and torchrun starts several of it. Run it without torchrun; "
            "--set placement.devices=N says how many ranks there are."
        )


@contextmanager
def _scratch(recipe: Recipe, reader: CheckpointReader | None, state: Mapping[str, Any]) -> Iterator[RunFolder]:
    """A temporary run folder with a link to the checkpoint. On a running Ray cluster it is beside the runs, because
    workers on other nodes read it."""
    parent = recipe.run.folder if os.environ.get("RAY_ADDRESS") else None
    try:
        if parent is not None:
            Path(parent).mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=".podium-evaluate-", dir=parent)
    except OSError as error:
        raise RunFolderError(f"no temporary folder for the evaluation: {error.strerror or error}.") from error
    with temporary as name:
        folder = RunFolder(path=Path(name).absolute())
        folder.checkpoints.mkdir()
        if reader is not None:
            (folder.checkpoints / reader.folder.name).symlink_to(reader.folder.resolve(), target_is_directory=True)
        folder.update(status="starting", **state)
        yield folder
