# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: the resolved recipe, the state of the run, metrics and checkpoints. Torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from podium.errors import RunFolderError
from podium.models.cpu_settings import CpuSettings
from podium.recipe import Recipe, dump_recipe, load_recipe

PIPELINE_STATE = "pipeline.json"
_LOCK_TRIES, _LOCK_PAUSE_S = 3, 0.05
Status = Literal["starting", "running", "stopped", "failed", "finished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Paths of one run. Everything that is not metrics or checkpoints is written by rank 0 or the launcher."""

    path: Path

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def metrics_file(self) -> Path:
        """Metrics, one JSON line per step."""
        return self.path / "metrics.jsonl"

    @property
    def samples_file(self) -> Path:
        """Answers of evaluations, one JSON line each."""
        return self.path / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of all checkpoints."""
        return self.path / "checkpoints"

    @property
    def console_file(self) -> Path:
        """What rank 0 prints, where the ranks are not children of the process that launched them."""
        return self.path / "console.log"

    @property
    def stop_file(self) -> Path:
        """Its presence asks the ranks to save and stop."""
        return self.path / "stop-requested"

    @property
    def _state_file(self) -> Path:
        return self.path / "run.json"

    @classmethod
    def _of(cls, recipe: Recipe) -> RunFolder:
        assert recipe.run.name is not None
        return cls(path=Path(recipe.run.folder) / recipe.run.name)

    @classmethod
    def check_free(cls, recipe: Recipe) -> None:
        """Raises where another run has the recipe's folder."""
        folder = cls._of(recipe)
        if not folder.path.exists() or folder._was_never_begun():
            return
        begun = any(folder.checkpoints.glob("step-*"))
        first = "It has no checkpoint to resume from: remove it"
        if begun or is_pipeline_folder(folder.path):
            first = f"Continue it with `podium resume {folder.path}`"
        raise RunFolderError(f"{folder.path} exists already. {first}, or choose another name with --set run.name=...")

    @classmethod
    def create(
        cls, recipe: Recipe, *, files: Mapping[str, str] | None = None, lineage: Mapping[str, Any] | None = None
    ) -> RunFolder:
        """A new folder with the recipe in it, fingerprints of the files that a resumed run must find unchanged, and the
        run's lineage. A run that has begun is never written over; what a killed start left is."""
        cls.check_free(recipe)
        folder = cls._of(recipe)
        path = folder.path
        if folder._was_never_begun():
            shutil.rmtree(path)
        try:
            folder.checkpoints.mkdir(parents=True)
            folder.recipe_file.write_text(dump_recipe(recipe), encoding="utf-8")
            folder.update(
                status="starting", versions=_versions(), program=recipe.program, files=dict(files or {}),
                lineage=dict(lineage or {}),
            )  # fmt: skip
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise RunFolderError(f"the run folder {path} cannot be written: {error.strerror or error}.") from error
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run."""
        folder = cls(path=Path(path))
        if not folder.path.is_dir():
            raise RunFolderError(
                f"there is no run folder {path}. Runs are under `run.folder` of their recipe, by name."
            )
        if is_pipeline_folder(path):
            raise RunFolderError(f"{path} is the folder of a pipeline. Give that of one of its stages: {path}/STAGE.")
        if not folder.recipe_file.is_file() or not folder._state_file.is_file():
            raise RunFolderError(f"{path} is not a run folder: it has no recipe.yaml and run.json.")
        return folder

    def recipe(self) -> Recipe:
        """The run's resolved recipe."""
        return load_recipe(self.recipe_file)

    def state(self) -> dict[str, Any]:
        """The content of run.json."""
        try:
            values: dict[str, Any] = json.loads(self._state_file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RunFolderError(f"{self._state_file} is damaged ({error}). Restore it, or start a new run.") from error
        return values

    @property
    def status(self) -> Status:
        """The run's status in run.json."""
        status: Status = self.state()["status"]
        return status

    def update(self, **values: Any) -> None:
        """Merges values into run.json, atomically."""
        state = self.state() if self._state_file.exists() else {}
        write_atomically(self._state_file, json.dumps({**state, **values}, indent=1))

    def write_recipe(self, recipe: Recipe) -> None:
        """Replaces the run's recipe file."""
        write_atomically(self.recipe_file, dump_recipe(recipe))

    def discard_if_never_begun(self) -> None:
        """Removes a folder whose run failed before its first step: nothing is half-written, the name is free again."""
        with contextlib.suppress(OSError, RunFolderError, KeyError):
            if self.status == "starting":
                shutil.rmtree(self.path)

    def mark_failed(self, error: BaseException) -> None:
        """Says so in run.json, and adds to the error how to continue."""
        with contextlib.suppress(OSError, RunFolderError):
            if self.path.exists():
                self.update(status="failed")
                steps = sorted(path.name for path in self.checkpoints.glob("step-*"))
                if steps:
                    step = int(steps[-1].removeprefix("step-"))
                    error.add_note(f"continue from the checkpoint of step {step} with: podium resume {self.path}")

    def _was_never_begun(self) -> bool:
        """Left by a process that was killed before the first step, and held by none."""
        with contextlib.suppress(OSError, RunFolderError, KeyError):
            if self._state_file.is_file() and self.status == "starting":
                with self.held():
                    return True
        return False

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Only one process runs a folder at a time."""
        return held(self.path)

    def saved_steps(self) -> list[int]:
        """Steps of complete checkpoints, oldest first."""
        names = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        return sorted(int(name) for name in names if name.isdigit())

    def forget_samples_after(self, step: int) -> None:
        """A resumed run answers the later evaluations again."""
        if self.samples_file.exists():
            lines = self.samples_file.read_text(encoding="utf-8").splitlines(keepends=True)
            kept_lines = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            write_atomically(self.samples_file, "".join(kept_lines))

    def cpu_settings(self, num_ranks: int) -> CpuSettings | None:
        """What a run on so many ranks computes with on CPU, if it has begun. A resumed run keeps it: the number of
        threads changes the order of sums."""
        known = self.state().get("cpu", {})
        if known.get("ranks") != num_ranks:
            return None
        return CpuSettings(threads=known["threads"], onednn=known["onednn"], measured="as before")

    def note_cpu_settings(self, num_ranks: int, settings: CpuSettings) -> None:
        """For `cpu_settings` of a resumed run."""
        self.update(cpu={"ranks": num_ranks, "threads": settings.threads, "onednn": settings.onednn})

    def samples(self, step: int, rows: list[Mapping[str, Any]]) -> None:
        """Appends the answers of one evaluation to samples.jsonl."""
        with self.samples_file.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({"step": step, **row}, ensure_ascii=False, default=str) + "\n")


def is_pipeline_folder(path: str | Path) -> bool:
    """Whether the folder is a pipeline's."""
    return (Path(path) / PIPELINE_STATE).is_file()


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Keeps other processes out of a folder; the operating system lets go when this process ends, however."""
    try:
        lock = (path / "run.lock").open("a+")
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror or error}.") from error
    with lock as file:
        for left in reversed(range(_LOCK_TRIES)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not left:
                    raise RunFolderError(
                        f"{path} is being run by another process right now. Wait for it, or end it first."
                    ) from error
            time.sleep(_LOCK_PAUSE_S)  # a process that only looks whether it is held lets go at once
        yield


def is_held(path: Path) -> bool:
    """Whether a process runs the folder now."""
    try:
        with (path / "run.lock").open("r") as file:  # also where nothing can be written
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file: readers see the old text or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _versions() -> dict[str, str]:
    """Of Python and what Podium computes with."""
    names = ("podium", "torch", "transformers", "numpy")
    versions = {}
    for name in names:
        with contextlib.suppress(Exception):
            versions[name] = version(name)
    return {"python": platform.python_version(), **versions}
