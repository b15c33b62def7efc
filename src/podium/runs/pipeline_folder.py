# SPDX-License-Identifier: Apache-2.0
"""The folder of a pipeline: its recipe, pipeline.json, and one run folder for each stage. Torch-free."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from podium.errors import RecipeError, RunFolderError
from podium.recipe import PipelineRecipe, dump_recipe
from podium.recipe.loading import read_values
from podium.recipe.pipeline_loading import overridden, parse_pipeline
from podium.runs.folder import (
    PIPELINE_STATE,
    RunFolder,
    held,
    is_pipeline_folder,
    overwritten,
    write_atomically,
)

StageStatus = Literal["waiting", "running", "stopped", "failed", "done"]
_EARLIER = ".earlier"
# Files that a killed start may have left in a folder that is not yet a pipeline's.
_OF_A_START = {"recipe.yaml", "recipe.yaml.tmp", PIPELINE_STATE + ".tmp", "run.lock"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """The entry of a stage in pipeline.json. `fingerprint` is that of the stage when its folder was created."""

    status: StageStatus = "waiting"
    fingerprint: str | None = None
    weights: str | None = None  # fingerprint of the exported folder


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFolder:
    """Paths and state of one pipeline."""

    path: Path

    @property
    def recipe_file(self) -> Path:
        """The pipeline's recipe."""
        return self.path / "recipe.yaml"

    @property
    def _state_file(self) -> Path:
        return self.path / PIPELINE_STATE

    def run(self, stage: str) -> RunFolder:
        """The run folder of a stage."""
        return RunFolder(path=self.path / stage)

    def export(self, stage: str) -> Path:
        """Exported weights of a stage, for the stages after it."""
        return self.path.absolute() / stage / "export"

    @classmethod
    def at(cls, recipe: PipelineRecipe) -> PipelineFolder:
        """The folder that a recipe names: a new one, or that of an earlier run of the pipeline. Any other folder is
        refused."""
        if recipe.run.name is None:
            raise RecipeError("run.name: a recipe that was not read from a file needs a name for its folder.")
        folder = cls(path=Path(recipe.run.folder) / recipe.run.name)
        if folder.path.exists() and not is_pipeline_folder(folder.path):
            names = {path.name for path in folder.path.iterdir()} if folder.path.is_dir() else {folder.path.name}
            if names - _OF_A_START:
                raise RunFolderError(
                    f"{folder.path} exists already and is not a pipeline's. Choose another name with --set run.name=..."
                )
        return folder

    @classmethod
    def open(cls, path: str | Path) -> PipelineFolder:
        """Opens an existing pipeline."""
        if not is_pipeline_folder(path):
            raise RunFolderError(f"{path} is not the folder of a pipeline: it has no {PIPELINE_STATE}.")
        return cls(path=Path(path))

    @contextlib.contextmanager
    def overwriting(self) -> Iterator[None]:
        """Sets an earlier pipeline with all its stages aside while the new one begins. The first step of the new one
        removes it; it is brought back if the new one ends before. One that a process runs now is refused, whole or a
        single stage of it."""
        self._set_all_aside()
        try:
            yield
            self._restore_overwritten()  # the new one was stopped before its first step
        except BaseException as error:
            if self._restore_overwritten():
                # What the new one says about continuing would continue the earlier one.
                notes = [note for note in getattr(error, "__notes__", ()) if "podium resume" not in note]
                error.__notes__ = [*notes, f"the earlier pipeline in {self.path} is as it was"]
            raise

    def _set_all_aside(self) -> None:
        if not is_pipeline_folder(self.path):
            return
        with held(self.path), contextlib.ExitStack() as stages:
            for stage in self.path.iterdir():
                if (stage / "run.json").is_file():
                    stages.enter_context(held(stage))
            aside = overwritten(self.path)
            if aside.exists() and not self._has_begun():
                shutil.rmtree(self.path)  # a killed start; the pipeline before it is still set aside
                return
            if aside.exists():
                shutil.rmtree(aside)
            os.replace(self.path, aside)

    def _restore_overwritten(self) -> bool:
        """Brings the earlier pipeline back if the new one has taken no step; returns whether it did."""
        aside = overwritten(self.path)
        if not aside.exists() or self._has_begun():
            return False
        if self.path.exists():
            shutil.rmtree(self.path)
        os.replace(aside, self.path)
        return True

    def _has_begun(self) -> bool:
        """Whether a stage has taken a step. Runs that end before their first step remove their folder; that of a killed
        one is still starting."""
        runs = [RunFolder(path=path.parent) for path in self.path.glob("*/run.json")]
        return (self.path / _EARLIER).exists() or not all(run.is_starting for run in runs)

    def recipe(self, overrides: tuple[str, ...] = (), *, needs_environment: bool = True) -> PipelineRecipe:
        """The recipe of the last run, with its `--set` changes. Without `needs_environment` it can be read where
        environment variables of the run are missing."""
        for text in overrides:
            if text.startswith("defaults"):
                raise RecipeError(
                    f"--set {text}: {self.recipe_file} has the defaults written into every stage. Set stages.NAME.KEY, "
                    "or change your own file and `podium train` it again."
                )
        values = overridden(read_values(self.recipe_file), overrides)
        return parse_pipeline(values, origin=str(self.recipe_file), needs_environment=needs_environment)

    def create_and_hold(self) -> contextlib.AbstractContextManager[None]:
        """Creates the folder if needed, and locks it against other processes."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"the folder {self.path} cannot be made: {error.strerror or error}.") from error
        return held(self.path)

    def begin(self, recipe: PipelineRecipe) -> None:
        """Records the recipe of this run; the records of stages stay."""
        write_atomically(self.recipe_file, dump_recipe(recipe))
        self.update(status="running", order=list(recipe.order()), parents=recipe.parents())

    def state(self) -> dict[str, Any]:
        """The content of pipeline.json."""
        try:
            values: dict[str, Any] = json.loads(self._state_file.read_text(encoding="utf-8"))
            problem = _damage(values)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            problem = str(error)
        except OSError as error:
            raise RunFolderError(f"{self._state_file} cannot be read: {error.strerror or error}.") from error
        if problem is not None:
            raise RunFolderError(
                f"{self._state_file} is damaged ({problem}). Restore it, or `podium train` the recipe into another "
                "folder with --set run.name=..."
            )
        return values

    def update(self, **values: Any) -> None:
        """Merges values into pipeline.json, atomically."""
        state = self.state() if self._state_file.exists() else {}
        write_atomically(self._state_file, json.dumps({**state, **values}, indent=1))

    def record(self, stage: str) -> StageRecord:
        """The record of a stage; empty for a stage that never ran."""
        known: Mapping[str, Any] = self.state().get("stages", {}).get(stage, {})
        return StageRecord(**known)

    def note(self, stage: str, record: StageRecord) -> None:
        """Writes the record of a stage."""
        values = {name: getattr(record, name) for name in StageRecord.__slots__}
        self.update(stages={**self.state().get("stages", {}), stage: values})

    def set_aside(self, stage: str) -> Path | None:
        """Moves the folder of a stage aside so that the stage can start again. None: there was no folder."""
        run = self.run(stage).path
        if not run.exists():
            return None
        with held(run):  # fails if another process runs the stage alone
            pass
        aside = self.path / _EARLIER
        aside.mkdir(exist_ok=True)
        number = 1 + max((_number(path, stage) for path in aside.iterdir()), default=0)
        target = aside / f"{stage}-{number}"
        os.replace(run, target)
        return target


def _damage(values: Any) -> str | None:
    """What is wrong with the content of pipeline.json, or None."""
    if not isinstance(values, dict):
        return "it does not hold an object"
    if not isinstance(values.get("order"), list) or not isinstance(values.get("parents"), dict):
        return "it does not say which stages there are"
    stages = values.get("stages", {})
    known = {field.name for field in fields(StageRecord)}
    if not isinstance(stages, dict) or not all(
        isinstance(each, dict) and known >= each.keys() for each in stages.values()
    ):
        return "it does not say how the stages stand"
    return None


def _number(path: Path, stage: str) -> int:
    name, _, number = path.name.rpartition("-")
    return int(number) if name == stage and number.isdigit() else 0
